"""``python -m drivetrain`` is the same as ``drivetrain``."""

from drivetrain.cli import main

main()
