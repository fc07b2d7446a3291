"""Arguments of other trainers as configurations of ours: one reader a format, rules a trainer, names as data.

A source is read as text and never run: no shell, no Python, no environment. Each of its arguments ends in one of four
lists (taken over, same, not supported, unknown), and what is left out is said. What must not live here: anything that
writes files, or knows of runs.
"""

from drivetrain.config.importing.arguments import TRAINERS, Trainer
from drivetrain.config.importing.conversion import Lacking, Same, Taken, Unknown
from drivetrain.config.importing.importer import Imported, import_file
from drivetrain.config.importing.written import imported_toml

__all__ = [
    "TRAINERS",
    "Imported",
    "Lacking",
    "Same",
    "Taken",
    "Trainer",
    "Unknown",
    "import_file",
    "imported_toml",
]
