"""A run's state on disk: ``checkpoints/step-<8 digits>/``, safetensors and JSON only.

``save.py`` writes one and ``load.py`` reads one, whatever part of the tensors a rank holds (``held_state.py``);
``saver.py`` does it for a run, at once or in a thread. ``write_plan.py`` says which rank writes what, ``places.py``
where it lies in a file, ``tensor_files.py`` puts it there, ``source.py`` gets it back. ``folder.py`` knows the names,
finds the newest sound one and removes old ones, ``manifest.py`` tells sound from damaged. What a trainer keeps besides
(counters, data position) is a plain dict here. Nothing in this folder unpickles, and nothing decides *when* to save:
that is the loop's.
"""

from drivetrain.engine.checkpoint.agreement import ALONE, Agreement, agreement_over
from drivetrain.engine.checkpoint.folder import find_latest, remove_leftovers, set_aside
from drivetrain.engine.checkpoint.held_state import HeldState, held_state, whole_state
from drivetrain.engine.checkpoint.load import (
    LoadedCheckpoint,
    checked_checkpoint,
    load_checkpoint,
    load_model,
)
from drivetrain.engine.checkpoint.manifest import damage
from drivetrain.engine.checkpoint.save import save_checkpoint
from drivetrain.engine.checkpoint.saver import CheckpointSaver, Saved

__all__ = [
    "ALONE",
    "Agreement",
    "CheckpointSaver",
    "HeldState",
    "LoadedCheckpoint",
    "Saved",
    "agreement_over",
    "checked_checkpoint",
    "damage",
    "find_latest",
    "held_state",
    "load_checkpoint",
    "load_model",
    "remove_leftovers",
    "save_checkpoint",
    "set_aside",
    "whole_state",
]
