"""The benchmark scripts are no package: their folder is on the path for the tests that import from it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
