"""``check``, and every start: what a memory budget has backward compute again, tried without memory."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from drivetrain.config import RunConfig

__all__ = ["print_recompute", "recompute_document", "require_fitting_budget"]


def require_fitting_budget(config: "RunConfig", world_size: int) -> None:
    """Raise ConfigurationError where no recomputation makes a stage fit ``memory.budget_bytes``."""
    if config.memory.recompute_granularity != "budget":
        return
    from drivetrain.engine.memory.recompute_budget import budget_of, plans_of_stages

    plans_of_stages(config, world_size, budget_of(config))


def recompute_document(config: "RunConfig", world_size: int) -> dict[str, Any] | None:
    """What ``--json`` shows of it; None where a run goes by no budget. ``violations`` says why nothing fits."""
    if config.memory.recompute_granularity != "budget":
        return None
    from drivetrain.cli.environment import require_torch

    require_torch()
    from drivetrain.engine.memory.recompute_budget import budget_of, plans_of_stages
    from drivetrain.errors import ConfigurationError

    try:
        plans = plans_of_stages(config, world_size, budget_of(config))
    except ConfigurationError as error:
        return {
            "stages": [],
            "lines": [],
            "violations": [
                {
                    "rule": "recompute-budget-suffices",
                    "fields": ["memory.budget_bytes"],
                    "message": str(error),
                }
            ],
        }
    return {
        "stages": [{"rank": rank, **plan.to_document()} for rank, plan in plans],
        "lines": [line for _, plan in plans for line in plan.lines()],
        "violations": [],
    }


def print_recompute(lines: list[str]) -> None:
    """The same for a reader."""
    for line in lines:
        print(line)
