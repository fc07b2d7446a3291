"""Run every benchmark and write RESULTS.md: ``make bench``. On an otherwise idle machine, an hour or so. What
takes hours is run where it is named alone.

python benchmarks/run_all.py
python benchmarks/run_all.py --only logging_overhead
"""

import argparse
import datetime
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness.claims import Claim
from harness.report import Section, machine, markdown

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
SCRIPTS: dict[str, list[str]] = {
    "step_vs_peers": ["--raw", str(RESULTS)],
    "logging_overhead": [],
    "trace": [],
    "gate_power": [],
    "trial_aa": [],
    "parallel": [],
    "operators": [],
    "attention_memory": [],
    "data": [],
    "slow_transform": [],
    "diagnosis": [],
    "levels": [],
    "layout_curves": [],
    "kill_ranks": [],
    "resume_layouts": [],
    "overlap": [],
    "memory": ["--raw", str(RESULTS)],
    "tuner": ["--raw", str(RESULTS)],
}
HOURS = ("tuner",)
"""Run where they are named alone: each takes hours."""


def run_script(script: str) -> None:
    """Run one script; its claims go to ``results/<script>.json``."""
    command = [sys.executable, str(HERE / f"{script}.py"), *SCRIPTS[script], "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        out, _ = process.communicate()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    if process.returncode != 0:
        sys.exit(f"{script} ended with exit code {process.returncode}; RESULTS.md is left as it was")
    RESULTS.mkdir(exist_ok=True)
    measured = {"date": datetime.date.today().isoformat(), "machine": machine()}
    body = {"schema": 1, **measured, **json.loads(out)}
    (RESULTS / f"{script}.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def sections() -> list[Section]:
    """What ``results/`` holds, in the order of the scripts."""
    found = []
    for script in SCRIPTS:
        path = RESULTS / f"{script}.json"
        if path.exists():
            body = json.loads(path.read_text(encoding="utf-8"))
            claims = [Claim(**claim) for claim in body["claims"]]
            command = f"python benchmarks/{script}.py ({body['date']})"
            found.append(Section(script, command, claims, where=body.get("machine", "")))
    return found


def revision() -> str:
    """Git revision of our code, and whether it was changed since."""
    command = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "not a git checkout"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="each script's quick part; RESULTS.md is not written"
    )
    parser.add_argument("--only", action="append", choices=list(SCRIPTS), help="this script; may be repeated")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    start = time.monotonic()
    scripts = options.only or [script for script in SCRIPTS if script not in HOURS]
    if options.quick:
        for script in scripts:
            subprocess.run([sys.executable, str(HERE / f"{script}.py"), "--quick", "--json"], check=True)
        return
    source = revision()
    for script in scripts:
        run_script(script)
    minutes = (time.monotonic() - start) / 60
    page = markdown(sections(), date=datetime.date.today(), minutes=minutes, source=source)
    (HERE / "RESULTS.md").write_text(page, encoding="utf-8")
    print(f"wrote {HERE / 'RESULTS.md'}", file=sys.stderr)


if __name__ == "__main__":
    main()
