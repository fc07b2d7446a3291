"""What training stands still for too often: checkpoints and evaluations."""

from scenario import Scenario

__all__ = ["SCENARIOS"]

SCENARIOS = (
    Scenario(
        "maintenance.checkpoint_too_often",
        ("maintenance.checkpoint_too_often",),
        ("maintenance.checkpoint_too_often",),
        "process",
        lambda place: place.job("checkpoint.save_interval=2"),
        lambda place: place.job(),
        "a checkpoint every other step, written while training stands still",
    ),
    Scenario(
        "maintenance.evaluation_too_often",
        ("maintenance.evaluation_too_often",),
        ("maintenance.evaluation_too_often",),
        "process",
        lambda place: place.job("training.eval_interval=4", "training.eval_iters=4"),
        lambda place: place.job(),
        "an evaluation of four batches every four steps",
    ),
    Scenario(
        "maintenance.evaluation_too_often + maintenance.checkpoint_too_often",
        ("maintenance.evaluation_too_often", "maintenance.checkpoint_too_often"),
        ("maintenance.evaluation_too_often",),
        "process",
        lambda place: place.job(
            "training.eval_interval=2", "training.eval_iters=4", "checkpoint.save_interval=2"
        ),
        lambda place: place.job(),
        "an evaluation of four batches and a checkpoint, both every other step",
    ),
    Scenario(
        "maintenance.checkpoint_too_often + memory.recompute_without_need",
        ("maintenance.checkpoint_too_often", "memory.recompute_without_need"),
        ("maintenance.checkpoint_too_often",),
        "process",
        lambda place: place.job("checkpoint.save_interval=1", "memory.recompute_granularity=full"),
        lambda place: place.job(),
        "a checkpoint after every step, and layers that are computed twice",
    ),
)
