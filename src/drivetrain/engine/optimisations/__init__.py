"""What the engine does for each entry of the catalogue, one file an optimisation, named like its entry.

Each module has an ``IMPLEMENTATION`` and is found by being there. What an optimisation claims, needs and treats is
said in ``catalogue/``, not here.
"""
