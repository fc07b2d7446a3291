"""The sources' cases, each as a configuration for two CPU cores whose step spends its time as the source says.

What lives here: declarations, one case a module, and the transform that they plant. How they are run is
``harness/case_runs.py`` and ``harness/case_calibration.py``; what is claimed of them, ``tuner.py``.
"""

from collections.abc import Mapping

from cases.a15 import A15
from cases.b import B
from cases.c15 import C15
from cases.case import Case, Parameter, Share
from cases.e10 import E10

__all__ = ["CASES", "Case", "Parameter", "Share"]

CASES: Mapping[str, Case] = {case.name: case for case in (E10, C15, A15, B)}
