"""The training engine: the only part of Drivetrain that imports torch, imported by the command line only.

What lives here runs a model: the decoder (``model/``), data (``data/``), process groups (``parallel/``),
memory accounting (``memory/``), checkpoints (``checkpoint/``) and the loop that ties them together. What may
not: FLOP formulas and metric definitions (``measure``), files of the run directory (``archive``), and
anything a trace reader, planner or report would need, which must work without torch.
"""

__all__: list[str] = []
