"""What is declared of a ladder before it starts, in the form that its state keeps."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from drivetrain.catalogue import LearningRateRule
from drivetrain.errors import RunError
from drivetrain.tune.gate_runs import GateSettings
from drivetrain.tune.goals import Goal

__all__ = ["LadderSettings"]


@dataclass(frozen=True)
class LadderSettings:
    """How a ladder is climbed.

    Attributes:
        budget_s: wall time of all its runs together.
        only: names of the entries that may be tried; empty: all.
        leave_one_out: remove each kept change once at the end.
        gate: how much each gate spends.
        looks: units of four blocks (A B B A, then B A A B) after which a trial is judged.
        trial_steps: measured steps of a block; None: as many as take ``block_s``, 12 to 100.
        block_s: see ``trial_steps``.
        profile_steps: steps of a profiled window.
        knob_trials: most trials of one knob's search.
        world_size: processes of each run.
        batch_rule: how the learning rate follows a larger global batch; None: the global batch stays.
        goal: what counts.
        device_type: what the runs compute on, ``cpu`` or ``cuda``; None: nobody has looked.
        launcher: template of the command that starts the processes of a run; None: they are of this machine.
    """

    budget_s: float
    only: tuple[str, ...] = ()
    leave_one_out: bool = True
    gate: GateSettings = field(default_factory=GateSettings)
    looks: tuple[int, ...] = (1, 2)
    trial_steps: int | None = None
    block_s: float = 4.0
    profile_steps: int = 16
    knob_trials: int = 4
    world_size: int = 1
    batch_rule: LearningRateRule | None = None
    launcher: str | None = None
    goal: Goal = field(default_factory=Goal)
    device_type: str | None = None

    def to_document(self) -> dict[str, Any]:
        """As ``tune.json`` keeps them."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "LadderSettings":
        """What :meth:`to_document` made.

        Raises:
            RunError: it is of another version.
        """
        try:
            gate = {**document["gate"], "looks": tuple(document["gate"]["looks"])}
            own = {
                **document,
                "only": tuple(document["only"]),
                "looks": tuple(document["looks"]),
                "gate": GateSettings(**gate),
                "goal": Goal.from_document(document.get("goal")),
            }
            unknown = set(own) - {one.name for one in fields(cls)}
            if unknown:
                raise KeyError(*sorted(unknown))
            return cls(**own)
        except (KeyError, TypeError) as error:
            raise RunError(f"the tune's settings are of another version: {error}") from error
