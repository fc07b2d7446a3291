"""The parts of ``gpu.py``: one file each, and what they share. Torch is imported here; ``gpu.py`` runs each part in a
process of its own. What may not live here: whatever decides which backend trains."""
