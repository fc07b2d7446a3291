"""What an optimisation is expected to gain, from the account of a run: one subject a file.

A model takes times that were measured in the run, counts that follow from its configuration, and rates that were
measured on its machine (``drivetrain bench``). It holds no speed-up as a number. Where it lacks a fact it says which,
and predicts nothing. Here lives no entry, and nothing that reads a trace.
"""

from drivetrain.catalogue.time_models.facts import TimeFacts, Traffic, facts_of_account
from drivetrain.catalogue.time_models.model import MeanStep, TimeModel, mean_step, predicted

__all__ = ["MeanStep", "TimeFacts", "TimeModel", "Traffic", "facts_of_account", "mean_step", "predicted"]
