"""The account's classes as losses: what each takes of a step, and which entries of the catalogue treat it."""

from collections.abc import Iterator, Sequence

from drivetrain.catalogue import catalogue
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.remedies import remedies_for
from drivetrain.diagnose.rule import Rule
from drivetrain.measure.waterfall import FLOP_CLASSES, Bar

__all__ = ["CAUSE_OF_CLASS", "RULE"]

CAUSE_OF_CLASS: tuple[tuple[str, str, str], ...] = (
    ("compute.matmul", "kernels.products_below_peak", "matrix products run below what the device sustains"),
    ("compute.attention", "kernels.attention_below_peak", "attention runs below what the device sustains"),
    ("compute.optimizer", "kernels.optimizer_update", "the optimizer's update"),
    ("compute.norm", "kernels.memory_bound_operators", "norms"),
    ("compute.activation", "kernels.memory_bound_operators", "activations"),
    ("compute.elementwise", "kernels.memory_bound_operators", "element-wise operators and reductions"),
    ("compute.loss", "kernels.memory_bound_operators", "the loss"),
    ("compute.copy_cast", "kernels.memory_bound_operators", "copies and casts done by kernels"),
    ("compute.other", "kernels.other", "other computation: embedding, sorting, kernels that no rule knows"),
    ("recompute", "memory.recompute", "forward work repeated in the backward pass"),
    ("communication", "communication.exposed", "communication that nothing hides"),
    ("copy", "memory.copies", "copies between host and device that nothing hides"),
    (
        "unclassified",
        "records.unclassified",
        "kernels of which nothing tells whether they compute or communicate",
    ),
    ("bubble", "pipeline.bubble", "a pipeline stage without work"),
    ("data.loader", "data.waiting", "the training thread waits for its batch"),
    ("maintenance.checkpoint", "maintenance.checkpoint", "training stands still for a checkpoint"),
    ("maintenance.evaluation", "maintenance.evaluation", "training stands still for an evaluation"),
    ("maintenance.profiler", "maintenance.profiler", "the profiler itself"),
    ("maintenance.compile", "maintenance.compilation", "training stands still for a compilation"),
    ("host.sync", "host.synchronisation", "the training thread waits in a synchronising call"),
    ("host.gc", "host.garbage_collection", "Python's garbage collector"),
    ("host.launch", "host.launch", "work is on its way: operators and runtime calls that do none themselves"),
    ("host.python", "host.python", "Python code between operators"),
    ("idle", "records.idle", "neither work nor a cause is recorded"),
    ("unexplained", "records.unexplained", "the records are missing, clipped or contradictory"),
)
"""Class, or group of classes; the cause that its time is a loss by; what it means that time goes there."""


def _row(name: str) -> tuple[str, str, str]:
    return next(row for row in CAUSE_OF_CLASS if name == row[0] or name.startswith(f"{row[0]}."))


def _cause(name: str) -> str:
    return _row(name)[2]


def _detect(facts: Facts) -> Iterator[Finding]:
    drawn = facts.account.waterfall
    for bar in drawn.bars if drawn is not None else ():
        if bar.kind in ("mfu", "peak_not_achievable") or bar.points <= 0:
            continue  # Not lost, or not to be had; a negative bar is a finding of the account.
        yield _of_flops(facts, bar) if _holds_flops(bar) else _of_time(facts, bar)


def _holds_flops(bar: Bar) -> bool:
    return bar.kind == "peak_and_shortfall" or bar.class_name in FLOP_CLASSES


def _of_time(facts: Facts, bar: Bar) -> Finding:
    """A class all of whose time is lost."""
    name = bar.class_name or bar.name
    classes = [bar.class_name] if bar.class_name is not None else []
    cost = facts.mean.classes.get(name, 0.0)
    return _finding(facts, name, _cause(name) if classes else bar.name, classes, cost, bar, cost)


def _of_flops(facts: Facts, bar: Bar) -> Finding:
    """A class that holds model FLOPs: what it takes beyond them is lost, and only FLOPs and a peak tell how much."""
    classes = [bar.class_name] if bar.class_name is not None else list(FLOP_CLASSES)
    name = " and ".join(classes)
    taken = sum(facts.mean.classes.get(one, 0.0) for one in classes)
    if facts.has_points:
        cause = (
            _cause(classes[0])
            if bar.class_name is not None
            else "matrix products and attention run below peak"
        )
        return _finding(facts, name, cause, classes, bar.points / 100 * facts.mean.window_ns, bar, taken)
    what = "matrix products take" if name == "compute.matmul" else "attention takes"
    return _finding(
        facts, name, f"{what} this share; how much of it is lost is unknown", classes, None, bar, taken
    )


def _finding(
    facts: Facts,
    name: str,
    cause: str,
    classes: Sequence[str],
    cost_ns: float | None,
    bar: Bar,
    taken_ns: float,
) -> Finding:
    identifier = _row(classes[0] if classes else "unexplained")[1]
    remedies, none, requested = remedies_for(facts, classes, cost_ns)
    # What names the cause itself first: a class may be treated by a dozen entries for a part of it each.
    cures = {one.name for one in catalogue() if identifier in one.cures}
    remedies = tuple(sorted(remedies, key=lambda one: one.name not in cures))
    evidence = [
        Evidence(
            f"{name} takes {taken_ns / 1e6:.3f} ms of {facts.mean.window_ns / 1e6:.3f} ms",
            "account",
            {"class_ms": taken_ns / 1e6, "step_ms": facts.mean.window_ns / 1e6},
        )
    ]
    if remedies and requested:
        evidence.append(Evidence(f"asked for already: {', '.join(requested)}", "configuration"))
    unknown = dict(facts.no_points)
    if cost_ns is None:
        unknown["cost_ns"] = (
            f"the part that is lost needs model FLOPs and a peak: {facts.no_points['points']}"
        )
    return Finding(
        rule="account_classes",
        kind="loss",
        subject=name,
        cause=identifier,
        text=cause,
        class_name=name,
        cost_ns=cost_ns,
        points=bar.points if facts.has_points else None,
        share=facts.share_of(taken_ns if cost_ns is None else cost_ns),
        evidence=tuple(evidence),
        remedies=remedies,
        no_remedy=none,
        unknown=unknown,
    )


RULE = Rule("account_classes", tuple(dict.fromkeys(cause for _, cause, _ in CAUSE_OF_CLASS)), (), _detect)
