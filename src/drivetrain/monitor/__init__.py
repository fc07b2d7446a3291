"""What watches a run while it trains: the facts of one step, and where they are shown.

No torch here, and nothing that decides about the training: a trainer hands over a :class:`StepInfo`
and the monitor shows it.
"""

from drivetrain.monitor.console import Console
from drivetrain.monitor.step_info import StepInfo

__all__ = ["Console", "StepInfo"]
