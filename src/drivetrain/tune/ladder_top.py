"""The end of a ladder: each kept change is removed once, and what is left is held against the first baseline."""

from collections.abc import Mapping, Sequence
from typing import Any

from drivetrain.archive.atomic import write_text
from drivetrain.config import tokens_per_step
from drivetrain.errors import DrivetrainError
from drivetrain.measure.statistics import least_effect
from drivetrain.tune.gate import TIERS
from drivetrain.tune.goals import kept_speed
from drivetrain.tune.ladder_bench import Bench
from drivetrain.tune.ladder_records import (
    BASELINE_FILE,
    FINAL_FILE,
    Kept,
    Rung,
    View,
    account_of_side,
    empty_step,
    fill,
    final_toml,
    in_words,
    step_seconds,
)
from drivetrain.tune.moves import Change, changed
from drivetrain.tune.saved_seconds import AGREES_WITHIN, saved

__all__ = ["Top"]


class Top:
    """What happens at the top of a ladder that kept something.

    Args:
        bench: makes the pieces.
        view: is written to.
        kept: the changes; what is dropped is taken out.
        baseline: where the ladder began.
    """

    def __init__(self, bench: Bench, view: View, kept: list[Kept], baseline: Rung) -> None:
        self._bench = bench
        self._view = view
        self._kept = kept
        self._baseline = baseline
        self._no_windows: str | None = None

    def leave_one_out(self, current: Rung) -> Rung:
        """Take each kept change away once; one whose removal does not slow the run is dropped.

        A single change needs none: its own trial is that comparison.
        """
        for kept in list(self._kept):
            if len(self._kept) < 2:
                break
            if kept not in self._kept:
                continue
            own = self._with_its_knobs(kept)
            takes_back = Change(_former_values(own), f"without {in_words(kept.change)}")
            if self._bench.why_illegal(current.config, takes_back) is not None:
                self._view.findings.append(f"{in_words(kept.change)} cannot be removed alone: others need it")
            elif not self._fits(current):
                self._view.findings.append(f"the budget left no room to remove {in_words(kept.change)} once")
            else:
                current = self._without(current, kept, own, takes_back)
        return current

    def _with_its_knobs(self, kept: Kept) -> list[Kept]:
        """A change, and what was later found by searching a knob of its entry: it goes with it."""
        later = self._kept[self._kept.index(kept) + 1 :]
        return [kept, *(one for one in later if one.name is not None and one.name == kept.name)]

    def _fits(self, current: Rung) -> bool:
        """Whether one more trial and the end fit the budget."""
        costs = self._bench.costs
        tier = max((kept.numerics for kept in self._kept), key=TIERS.index)
        end_s = costs.of_final_trial(current.config) + costs.of_gate(tier)
        return costs.of_trial(current.config) + end_s <= self._bench.left_s

    def _without(self, current: Rung, kept: Kept, own: Sequence[Kept], takes_back: Change) -> Rung:
        index = kept.step["index"]
        step = empty_step(index, kept.name, takes_back, kept.step["treats"])
        self._view.leave_one_out.append(step)
        self._bench.say(takes_back.name or "")
        config = changed(current.config, takes_back)
        file = self._bench.write(config)
        before = self._bench.journal.device_seconds
        goal = self._bench.goal.after(kept_speed([one.step for one in self._kept]))
        found = self._bench.trial(f"without-{index}", current, file, config, goal=goal)
        fill(step, found)
        profile, stays = None, _why_it_stays(found)
        if stays is None:
            try:
                profile = self._bench.profile(file, config, f"profile-without-{index}")
            except DrivetrainError as error:
                stays = f"the run without it cannot go on: {error}"
        step["device_seconds"] += self._bench.journal.device_seconds - before
        if profile is None:
            step["kept"] = True
            step["why"] = f"it stays, {stays}; {found['why']}"
            self._bench.say(f"  {step['why']}")
            return current
        step["why"] = f"dropped, its removal does not slow the run; {found['why']}"
        self._bench.say(f"  {step['why']}")
        self._view.findings.append(
            f"{in_words(kept.change)} was kept and then dropped, because its removal does not slow the run: "
            f"{found['why']}"
        )
        for one in own:
            one.step["kept"] = False
            one.step["why"] += "; dropped at the end, its removal does not slow the run"
            self._kept.remove(one)
        return Rung(file, config, profile)

    def finish(self, final: Rung) -> None:
        """The final configuration against the first baseline: the gate, the speed, and what is saved."""
        trial = self._final_trial(final)
        verdict = self._final_gate(final)
        self._view.final_trial = {key: trial[key] for key in ("measured", "why", "blocks")}
        self._view.final_gate = {key: verdict[key] for key in ("tier", "verdict", "why")}
        why = None
        if verdict["verdict"] != "pass":
            why = f"its gate against the first baseline says {verdict['verdict']}: {verdict['why']}"
        elif not trial["faster"]:
            why = f"it was not shown to be faster than the first baseline: {trial['why']}"
        if why is not None:
            self._view.findings.append(f"the final configuration is withdrawn, {why}")
            self._bench.say(f"withdrawn, {why}")
            return
        self._view.speed_up = _ratio(trial.get("speed") or trial["measured"])
        figures = trial.get("figures") or {}
        self._view.goal = {
            **(self._view.goal or {}),
            **_ratio(trial["measured"]),
            "baseline": figures.get("A"),
            "final": figures.get("B"),
        }
        self._show_accounts(trial, final)
        self._view.saved = saved(
            trial,
            steps=self._baseline.config.training.train_iters,
            world_size=self._bench.processes_of(self._baseline.config),
            final_world_size=self._bench.processes_of(final.config),
            final_share=tokens_per_step(self._baseline.config) / tokens_per_step(final.config),
            treated=tuple(dict.fromkeys(name for kept in self._kept for name in kept.step["treats"])),
            withheld=self._no_windows or self._why_nothing_is_saved(trial),
        )
        if self._view.saved["agreement"] == "differ":
            self._view.findings.append(
                f"the account does not explain what was saved: its classes deviate from the measured seconds by "
                f"{self._view.saved['deviation_low']:+.0%} to {self._view.saved['deviation_high']:+.0%}, where "
                f"{AGREES_WITHIN:.0%} are allowed"
            )
        write_text(
            self._bench.folder / FINAL_FILE,
            final_toml(final.config, self._kept, self._bench.settings.goal.ratio_of),
        )

    def _why_nothing_is_saved(self, trial: Mapping[str, Any]) -> str | None:
        """Where another goal than speed may leave a run as slow as it was: nothing to divide a deviation by."""
        speed = trial.get("speed")
        if speed is None or speed["low"] > 1:
            return None
        goal = self._bench.settings.goal.name
        return f"no time is shown to be saved, and the goal was {goal}"

    def _show_accounts(self, trial: Mapping[str, Any], final: Rung) -> None:
        """Both configurations with the account of processes that were measured, else of their profiles."""
        of_baseline = account_of_side(trial, "A", BASELINE_FILE, tokens_per_step(self._baseline.config))
        if of_baseline is not None:
            self._view.baseline = of_baseline
        step_s = step_seconds(trial, "B")
        tokens = tokens_per_step(final.config)
        self._view.final = account_of_side(trial, "B", FINAL_FILE, tokens) or {
            **final.profile.to_document(FINAL_FILE),
            "step_s": step_s,
            "tokens_per_second": tokens / step_s,
        }

    def _is_one_step(self) -> bool:
        """Whether the final configuration is one step from the first baseline, already measured and judged so.

        What a search found was picked as the best of several trials, so its own trial flatters it.
        """
        if len(self._kept) != 1:
            return False
        (kept,) = self._kept
        return kept.parent == self._baseline.file and not kept.searched

    def _final_trial(self, final: Rung) -> dict[str, Any]:
        growth = tokens_per_step(final.config) / tokens_per_step(self._baseline.config)
        if (
            self._is_one_step()
            and self._bench.costs.of_final_trial(final.config, growth) > self._bench.left_s
        ):
            self._no_windows = "the budget left no room for a trial whose blocks carry a profiled window each"
            self._view.findings.append(
                "the one change that was kept is shown by its own trial: the budget left no room for another"
            )
            return {**self._kept[0].step, "faster": True}
        self._bench.say(
            "the final configuration against the first baseline, its blocks with a profiled window each"
        )
        return self._bench.trial("final-trial", self._baseline, final.file, final.config, final=True)

    def _final_gate(self, final: Rung) -> dict[str, Any]:
        if self._is_one_step():
            gate: dict[str, Any] = self._kept[0].step["gate"]
            return gate
        tier = max((kept.numerics for kept in self._kept), key=TIERS.index)
        return self._bench.gate("final-gate", self._baseline, final.file, final.config, tier)


def _ratio(measured: Mapping[str, Any]) -> dict[str, Any]:
    return {key: measured[key] for key in ("ratio", "low", "high")}


def _why_it_stays(removal: Mapping[str, Any]) -> str | None:
    """Why the trial without a change does not drop it; None where the run without it is not slower, or by less than
    the least effect that ever counts."""
    measured = removal["measured"]
    if measured is None:
        itself = removal["blocks"][-1]["side"] == "A"
        return "the run itself failed in that trial" if itself else "it could not be run without it"
    if measured["low"] > 1 - least_effect(0):
        return None
    return "the run is slower without it" if removal["state"] == "slower" else "by its own trial"


def _former_values(kept: Sequence[Kept]) -> dict[str, Any]:
    """Values from before the earliest of several changes."""
    values: dict[str, Any] = {}
    for one in reversed(kept):
        values.update(one.takes_back.leaves)
    return values
