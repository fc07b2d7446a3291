"""What the engine does for each entry of the catalogue, one file an optimisation, named like its entry.

Each of those modules has an ``IMPLEMENTATION`` and is found by being there; ``implementation`` says what that is,
``in_effect`` applies all of them to a run and knows what became of each. What an optimisation claims, needs and treats
is said in ``catalogue/``, not here.
"""

__all__: list[str] = []
