"""Cycles are looked for seldom, in each process that a command line starts."""

import subprocess
import sys

LOOK = (
    "import atexit, gc\n"
    "atexit.register(lambda: print(gc.get_threshold()[0], gc.get_freeze_count() > 0))\n"
    "import sys; sys.argv = ['drivetrain', '--version']\n"
    "from {module} import {name}\n"
    "{call}\n"
)


def looked(module: str, name: str, call: str) -> list[str]:
    code = LOOK.format(module=module, name=name, call=call)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1].split()


def test_a_command_looks_for_cycles_seldom_and_not_at_its_end() -> None:
    assert looked("drivetrain.cli", "main", "main()") == ["100000", "True"]


def test_a_process_that_does_not_ask_for_it_has_pythons_own_numbers() -> None:
    assert looked("drivetrain.collector", "collect_seldom", "pass") == ["700", "False"]
