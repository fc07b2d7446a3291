"""Diagnosis: what an account, a run's records and its configuration say is lost, ranked, with what would help.

``rules/`` holds one rule a file; each looks for one kind of cause and returns findings with cost and evidence. Remedies
come from the catalogue, and nothing here measures: every figure is one of the sources', with the source beside it.
"""

from drivetrain.diagnose.diagnosis import LEAST_SHARE, Diagnosis, diagnose
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding, Remedy

__all__ = ["LEAST_SHARE", "Diagnosis", "Evidence", "Facts", "Finding", "Remedy", "diagnose"]
