"""A run's state on disk: ``checkpoints/step-<8 digits>/``, safetensors and JSON only.

``save.py`` writes one, ``load.py`` reads one, ``folder.py`` knows the names, finds the newest sound one and
removes old ones, ``manifest.py`` tells sound from damaged. The weights' own format is
``engine/model/huggingface.py``; what a trainer keeps besides (counters, data position) is a plain dict here.
Nothing in this folder unpickles, and nothing decides *when* to save: that is the loop's.
"""

from drivetrain.engine.checkpoint.folder import find_latest, remove_leftovers, set_aside
from drivetrain.engine.checkpoint.load import LoadedCheckpoint, load_checkpoint, load_model
from drivetrain.engine.checkpoint.manifest import damage
from drivetrain.engine.checkpoint.save import save_checkpoint

__all__ = [
    "LoadedCheckpoint",
    "damage",
    "find_latest",
    "load_checkpoint",
    "load_model",
    "remove_leftovers",
    "save_checkpoint",
    "set_aside",
]
