"""The rules of a profile window. They are silent while ``profiler.profile`` is off."""

from drivetrain.config.rules import LaunchFacts, Rule
from drivetrain.config.schema import RunConfig

__all__ = ["PROFILER_RULES"]


def _window_not_empty(config: RunConfig, _: LaunchFacts) -> str | None:
    profiler = config.profiler
    start, end = profiler.profile_step_start, profiler.profile_step_end
    if not profiler.profile or start < end:
        return None
    return (
        f"{end} ends the window before it begins: profile_step_start = {start}, and the end is not part of "
        f"it; the nearest legal value is {start + 1}"
    )


def _window_inside_run(config: RunConfig, facts: LaunchFacts) -> str | None:
    profiler, last = config.profiler, config.training.train_iters
    if not profiler.profile or _window_not_empty(config, facts) is not None:
        return None
    if profiler.profile_step_end <= last + 1:
        return None
    message = (
        f"{profiler.profile_step_end} is beyond the run's last step, {last}; nearest legal values: "
        f"training.train_iters = {profiler.profile_step_end - 1}"
    )
    if profiler.profile_step_start <= last:
        message += f"; profile_step_end = {last + 1}"
    return message


def _ranks_exist(config: RunConfig, facts: LaunchFacts) -> str | None:
    profiler = config.profiler
    if not profiler.profile:
        return None
    absent = [rank for rank in profiler.profiled_ranks(facts.world_size) if rank >= facts.world_size]
    if not absent:
        return None
    last = facts.world_size - 1
    there = "the only rank is 0" if last == 0 else f"the ranks are 0 to {last}"
    return f"rank {absent[0]} does not exist: {there}; the nearest legal value is {last}, or use all"


PROFILER_RULES: tuple[Rule, ...] = (
    Rule(
        "profile-window-not-empty",
        ("profiler.profile_step_end", "profiler.profile_step_start", "profiler.profile"),
        _window_not_empty,
        "With profiler.profile, profile_step_start is below profile_step_end.",
    ),
    Rule(
        "profile-window-inside-run",
        ("profiler.profile_step_end", "training.train_iters", "profiler.profile"),
        _window_inside_run,
        "With profiler.profile, the window ends with the run's last step at the latest.",
    ),
    Rule(
        "profile-ranks-exist",
        ("profiler.profile_ranks", "profiler.profile"),
        _ranks_exist,
        "With profiler.profile, each of profile_ranks is a rank of the run.",
    ),
)
"""Part of ``BASIC_RULES``."""
