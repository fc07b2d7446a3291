"""A pipeline, or a step, that is cut in the wrong number of pieces or at the wrong places. Over gloo, two ranks."""

from scenario import Job, Place, Scenario

__all__ = ["SCENARIOS"]

_LONG_STEPS = ("training.train_iters=26",)


def two_stages(place: Place, *overrides: str) -> Job:
    """Two stages of two layers each, sixteen sequences a step, in micro-batches of one."""
    return place.job(
        "parallelism.pipeline_model_parallel_size=2",
        "training.micro_batch_size=1",
        "training.global_batch_size=16",
        "model.num_layers=4",
        "model.seq_length=128",
        *_LONG_STEPS,
        *overrides,
        world_size=2,
    )


SCENARIOS = (
    Scenario(
        "pipeline.too_few_micro_batches",
        ("pipeline.too_few_micro_batches",),
        ("pipeline.too_few_micro_batches",),
        "ranks",
        lambda place: two_stages(place, "training.micro_batch_size=8"),
        two_stages,
        "two micro-batches for two stages: each stands for a third of the step",
    ),
    Scenario(
        "pipeline.unbalanced_stages",
        ("pipeline.unbalanced_stages",),
        ("pipeline.unbalanced_stages",),
        "ranks",
        lambda place: two_stages(place, "parallelism.pipeline_model_parallel_layout=3,1"),
        two_stages,
        "three of four layers are on the first of two stages",
    ),
    Scenario(
        "pipeline.accumulation_too_deep",
        ("pipeline.accumulation_too_deep",),
        ("pipeline.accumulation_too_deep",),
        "process",
        lambda place: place.job(
            "training.micro_batch_size=1",
            "training.global_batch_size=64",
            "model.seq_length=16",
            "model.hidden_size=64",
            "model.num_layers=8",
        ),
        lambda place: place.job(
            "training.micro_batch_size=8",
            "training.global_batch_size=64",
            "model.seq_length=16",
            "model.hidden_size=64",
            "model.num_layers=8",
        ),
        "64 micro-batches of 16 tokens each: what an operator costs whatever its size is most of a step",
    ),
    Scenario(
        "pipeline.unbalanced_stages + memory.recompute_without_need",
        ("pipeline.unbalanced_stages", "memory.recompute_without_need"),
        ("pipeline.unbalanced_stages",),
        "ranks",
        lambda place: two_stages(
            place, "parallelism.pipeline_model_parallel_layout=3,1", "memory.recompute_granularity=full"
        ),
        two_stages,
        "three of four layers are on the first stage, and all are recomputed",
    ),
    Scenario(
        "pipeline.too_few_micro_batches + maintenance.checkpoint_too_often",
        ("pipeline.too_few_micro_batches", "maintenance.checkpoint_too_often"),
        ("pipeline.too_few_micro_batches",),
        "ranks",
        lambda place: two_stages(place, "training.micro_batch_size=8", "checkpoint.save_interval=2"),
        two_stages,
        "two micro-batches for two stages, and a checkpoint every other step",
    ),
)
