"""Pipeline stages that compute longer than others: all wait for the slowest, micro-batch by micro-batch."""

import statistics
from collections import defaultdict
from collections.abc import Iterator

from drivetrain.config.layout import layout_of, stage_plan
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding, Remedy
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import setting_remedy
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.config is not None
    assert facts.launch is not None
    ranks = facts.config.parallelism.pipeline_model_parallel_size
    if ranks == 1 or not facts.mean.is_step:
        return
    layout = layout_of(facts.config, facts.launch.world_size)
    of_stage: dict[int, list[float]] = defaultdict(list)
    who: dict[int, list[int]] = defaultdict(list)
    for rank in facts.account.ranks:
        stage = layout.coordinates(rank.rank)["pp"]
        computed = [
            step.window.group_ns("compute") + step.window.group_ns("recompute") for step in rank.steady_steps
        ]
        of_stage[stage].append(statistics.fmean(computed))
        who[stage].append(rank.rank)
    if len(of_stage) < ranks:
        return  # A stage without a trace may be the slow one.
    times = {stage: statistics.fmean(values) for stage, values in of_stage.items()}
    slowest = max(times, key=lambda stage: times[stage])
    cost = times[slowest] - statistics.fmean(times.values())
    yield loss(
        facts,
        "unbalanced_stages",
        "pipeline.unbalanced_stages",
        f"stage on pipeline rank {slowest}",
        cost,
        confidence="medium",
        evidence=(
            Evidence(
                "computation a step: "
                + ", ".join(f"pipeline rank {stage} {times[stage] / 1e6:.3f} ms" for stage in sorted(times)),
                "account",
                {f"pipeline_rank_{stage}_ms": ns / 1e6 for stage, ns in times.items()},
                ranks=tuple(who[slowest]),
            ),
        ),
        remedies=_moved(facts, times, slowest, cost),
        # The others wait for it: in bubbles where those are recorded, else in collectives of the pipeline.
        part_of=next((one for one in ("bubble", "communication.pp") if facts.group_ns(one) >= cost), None),
        class_name="bubble",
    )


def _moved(facts: Facts, times: dict[int, float], slowest: int, cost: float) -> tuple[Remedy, ...]:
    """One layer less on the slowest rank and one more on the fastest, where each has one stage."""
    assert facts.config is not None
    plan = stage_plan(facts.config)
    if plan.num_stages != plan.pp:
        return ()
    layers = list(plan.layers_per_stage)
    fastest = min(times, key=lambda stage: times[stage])
    if layers[slowest] < 2:
        return ()
    per_layer = times[slowest] / layers[slowest]
    layers[slowest] -= 1
    layers[fastest] += 1
    after = max(times[stage] + per_layer * ((stage == fastest) - (stage == slowest)) for stage in times)
    saved = times[slowest] - after
    if saved <= 0:
        return ()
    return (
        setting_remedy(
            facts,
            {"parallelism.pipeline_model_parallel_layout": ",".join(map(str, layers))},
            cost,
            saved_ns=saved,
            rule="a layer takes the slowest stage's time over its layers, wherever it lies",
            numerics="round-off",
        ),
    )


RULE = Rule("unbalanced_stages", ("pipeline.unbalanced_stages",), ("configuration", "several ranks"), _detect)
