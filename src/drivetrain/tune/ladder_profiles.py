"""The profiles that a ladder compares with its final trial: taken again where the machine was in another state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import DrivetrainError
from drivetrain.tune.ladder_bench import Bench
from drivetrain.tune.ladder_records import Profile, Rung
from drivetrain.tune.profile_state import ProfileState, state_of
from drivetrain.tune.trial_statistics import Side

__all__ = ["FURTHER_ATTEMPTS", "Checked", "Profiles", "withheld"]

FURTHER_ATTEMPTS = 2
"""How often a profile of another state of the machine is taken again."""


@dataclass(frozen=True)
class Checked:
    """A configuration's profile as it was found to stand for the trial or not.

    Attributes:
        what: the configuration, in words.
        profile: the one whose state is ``alike``; else the first.
        state: of the one whose state is ``alike``; else of the one that came closest.
        states: of all that were taken, in their order.
        ended: why it was not taken again, or why that brought nothing; empty where nothing stood in the way.
    """

    what: str
    profile: Profile
    state: ProfileState
    states: Sequence[ProfileState]
    ended: str

    def to_document(self) -> dict[str, Any]:
        """As ``tune.json`` shows it."""
        attempts = [one.to_document() for one in self.states]
        return {**self.state.to_document(), "attempts": attempts, "ended": self.ended}


class Profiles:
    """Holds profiles against a trial.

    Args:
        bench: takes them again.
        trial: the document of the final trial.

    Attributes:
        findings: what became of profiles that were taken again.
    """

    def __init__(self, bench: Bench, trial: dict[str, Any]) -> None:
        self._bench = bench
        self._trial = trial
        self.findings: list[str] = []

    def of(self, what: str, rung: Rung, side: Side) -> Checked:
        """The profile of ``rung``, which is ``side`` of the trial; taken again where the budget has room for it."""
        profile = rung.profile
        state = self._state(profile, side)
        states, ended = [state], ""
        for number in range(1, FURTHER_ATTEMPTS + 1):
            if state.answer != "other":
                break
            self._bench.say(f"the profile of the {what} does not stand for the trial: {state.in_words}")
            if self._bench.costs.of_profile > self._bench.left_s:
                ended = "the budget left no room to take it again"
                break
            name = f"{what.partition(' ')[0]}-again-{number}"
            try:
                again = self._bench.profile(rung.file, rung.config, name)
            except DrivetrainError as error:
                ended = str(error)
                break
            state = self._state(again, side)
            states.append(state)
            if state.answer == "alike":
                self.findings.append(
                    f"the profile of the {what} was taken {len(states)} times: in the first, {states[0].in_words}"
                )
                return Checked(what, again, state, states, "")
        return Checked(what, profile, min(states, key=lambda one: one.distance), states, ended)

    def _state(self, profile: Profile, side: Side) -> ProfileState:
        return state_of(profile.run, profile.mean_plain_step_s, profile.plain_steps, self._trial, side)


def withheld(profiles: Sequence[Checked]) -> str | None:
    """Why the account is not compared with what was measured, in one sentence; None where it is."""
    reasons = [_reason(one) for one in profiles if one.state.answer != "alike"]
    if not reasons:
        return None
    disturbed = any(one.state.answer == "other" for one in profiles)
    return f"{'; '.join(reasons)}; tune again{' while nothing else uses the machine' if disturbed else ''}"


def _reason(one: Checked) -> str:
    if one.state.answer == "unknown":
        return (
            f"nothing tells whether the profile of the {one.what} stands for the trial, {one.state.in_words}"
        )
    tries = f" (the nearest of {len(one.states)} profiles)" if len(one.states) > 1 else ""
    ended = f"; {one.ended}" if one.ended else ""
    return f"the profile of the {one.what} does not stand for the trial, {one.state.in_words}{tries}{ended}"
