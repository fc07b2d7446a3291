"""The account's classes as losses: what each takes of a step, and which entries of the catalogue treat it."""

from collections.abc import Iterator, Sequence

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.remedies import remedies_for
from drivetrain.diagnose.rule import Rule
from drivetrain.measure.waterfall import FLOP_CLASSES, Bar

__all__ = ["CAUSES", "RULE"]

CAUSES: tuple[tuple[str, str], ...] = (
    ("compute.matmul", "matrix products run below what the device sustains"),
    ("compute.attention", "attention runs below what the device sustains"),
    ("compute.optimizer", "the optimizer's update"),
    ("compute.norm", "norms"),
    ("compute.activation", "activations"),
    ("compute.elementwise", "element-wise operators and reductions"),
    ("compute.loss", "the loss"),
    ("compute.copy_cast", "copies and casts done by kernels"),
    ("compute.other", "other computation: embedding, sorting, kernels that no rule knows"),
    ("recompute", "forward work repeated in the backward pass"),
    ("communication", "communication that nothing hides"),
    ("copy", "copies between host and device that nothing hides"),
    ("unclassified", "kernels of which nothing tells whether they compute or communicate"),
    ("bubble", "a pipeline stage without work"),
    ("data.loader", "the training thread waits for its batch"),
    ("maintenance.checkpoint", "training stands still for a checkpoint"),
    ("maintenance.evaluation", "training stands still for an evaluation"),
    ("maintenance.profiler", "the profiler itself"),
    ("maintenance.compile", "training stands still for a compilation"),
    ("host.sync", "the training thread waits in a synchronising call"),
    ("host.gc", "Python's garbage collector"),
    ("host.launch", "work is on its way: operators and runtime calls that do none themselves"),
    ("host.python", "Python code between operators"),
    ("idle", "neither work nor a cause is recorded"),
    ("unexplained", "the records are missing, clipped or contradictory"),
)
"""Class, or group of classes → what it means that time goes there."""


def _cause(name: str) -> str:
    return next(text for start, text in CAUSES if name == start or name.startswith(f"{start}."))


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
    remedies, none, requested = remedies_for(facts, classes, cost_ns)
    evidence = [
        Evidence(f"{name} takes {taken_ns / 1e6:.3f} ms of {facts.mean.window_ns / 1e6:.3f} ms", "account")
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
        cause=cause,
        cost_ns=cost_ns,
        points=bar.points if facts.has_points else None,
        share=facts.share_of(taken_ns if cost_ns is None else cost_ns),
        evidence=tuple(evidence),
        remedies=remedies,
        no_remedy=none,
        unknown=unknown,
    )


RULE = Rule("account_classes", _detect)
