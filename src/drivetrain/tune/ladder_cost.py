"""What a piece of a ladder will take, estimated from the pieces that were measured."""

import math

from drivetrain.catalogue import Numerics
from drivetrain.config import RunConfig
from drivetrain.tune.block_window import WINDOW_STEPS, BlockPlan
from drivetrain.tune.ladder_settings import LadderSettings
from drivetrain.tune.trial import TrialSettings

__all__ = ["Costs"]

_BLOCKS = 4
_FEWEST_STEPS, _MOST_STEPS = 12, 100


class Costs:
    """Estimates in seconds of wall time, once :meth:`learn_baseline` was told of the first profile.

    A trial and a gate are reckoned with their first look, a gate as if nothing of an earlier one could be used. What
    was measured to take longer replaces the estimate.
    """

    def __init__(self, settings: LadderSettings) -> None:
        self._settings = settings
        self._profile_s = 0.0
        self._step_s = 0.0
        self._start_s = 0.0
        self._block_s = 0.0
        self._gates: dict[Numerics, float] = {}

    def learn_baseline(self, elapsed_s: float, step_s: float, steps_s: float) -> None:
        """From the baseline's profile: its wall time, a plain step, and all its steps together."""
        self._step_s = step_s
        self._start_s = max(0.0, elapsed_s - steps_s)

    def learn_profile(self, elapsed_s: float) -> None:
        """From a finished profile."""
        self._profile_s = max(self._profile_s, elapsed_s)

    def learn_trial(self, elapsed_s: float, blocks: int) -> None:
        """From a finished trial."""
        if blocks:
            self._block_s = max(self._block_s, elapsed_s / blocks)

    def learn_gate(self, tier: Numerics, elapsed_s: float) -> None:
        """From a finished gate."""
        self._gates[tier] = max(self._gates.get(tier, 0.0), elapsed_s)

    def trial_settings(self, step_s: float, *, final: bool = False) -> TrialSettings:
        """How trials are run, given the median step of the parent.

        Args:
            final: the trial of the final configuration. Its blocks carry windows, whose interval needs more than two
                blocks a side: it is not judged before two units, where a look at as many is declared.
        """
        steps = self._settings.trial_steps
        if steps is None:
            wanted = math.ceil(self._settings.block_s / step_s)
            steps = min(max(wanted, _FEWEST_STEPS), _MOST_STEPS)
        if not final:
            return TrialSettings(steps=steps, looks=self._settings.looks)
        looks = tuple(units for units in self._settings.looks if units > 1) or self._settings.looks
        return TrialSettings(steps=steps, looks=looks, window_steps=WINDOW_STEPS)

    @property
    def of_profile(self) -> float:
        """A profile: the longest so far."""
        return self._profile_s

    def of_trial(self, config: RunConfig, growth: float = 1.0) -> float:
        """A trial up to its first look.

        Args:
            growth: tokens of the candidate's step over those of its parent's, which take as much longer.
        """
        return self._of_trial(self.trial_settings(self._step_s), config, growth)

    def of_final_trial(self, config: RunConfig, growth: float = 1.0) -> float:
        """The trial of the final configuration up to its first look.

        A window's trace is written as that of the first profile was, whose time is in that of every start.

        Args:
            growth: see :meth:`of_trial`.
        """
        return self._of_trial(self.trial_settings(self._step_s, final=True), config, growth)

    def _of_trial(self, settings: TrialSettings, config: RunConfig, growth: float) -> float:
        plan = BlockPlan.of(config, self._settings.world_size, settings.steps, settings.window_steps)
        step_s = self._step_s * (1 + growth) / 2
        beside_s = (plan.last - plan.measured_to) * step_s
        block_s = max(self._block_s + beside_s, self._start_s + plan.last * step_s)
        return _BLOCKS * settings.looks[0] * block_s

    def of_gate(self, tier: Numerics) -> float:
        """A gate up to its first look."""
        gate = self._settings.gate
        runs, steps = {
            "exact": (2, gate.exact_steps),
            "round-off": (2 + gate.perturbations, gate.roundoff_steps),
            "statistical": (2 * gate.looks[0], gate.statistical_steps + gate.eval_iters),
        }[tier]
        return max(self._gates.get(tier, 0.0), runs * (self._start_s + steps * self._step_s))

    def of_step(self, config: RunConfig, tier: Numerics, growth: float = 1.0) -> float:
        """A trial, its gate (over as many tokens whatever a step has), and the profile of what is kept.

        Args:
            growth: see :meth:`of_trial`.
        """
        return self.of_trial(config, growth) + self.of_gate(tier) + self._profile_s * growth
