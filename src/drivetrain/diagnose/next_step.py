"""The one thing to do next: of a diagnosis the largest loss that something can be done about, and how it is tried."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.catalogue import entry
from drivetrain.diagnose.causes import CAUSES
from drivetrain.diagnose.diagnosis import Diagnosis
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Confidence, Finding, Remedy

__all__ = ["NextStep", "next_step"]

Kind = Literal["change", "advice", "nothing"]
_LEAST_GAIN = 1.01
"""Ratio below which a gain that is expected is not worth a trial."""


@dataclass(frozen=True)
class NextStep:
    """What to do.

    Attributes:
        kind: ``change``: another value of a setting; ``advice``: something that no command does; ``nothing``: no loss
            was found that anything is known against.
        position: of the finding it is against, among the diagnosis' findings, from 1; None without one.
        subject: of that finding.
        what: what to do, in words.
        command: to be typed as it is; None where a person must do it.
        after: what the command leaves to do by hand; None: nothing.
        bound, estimate, estimate_rule, numerics, memory_bytes: of the remedy.
        confidence: of the finding.
        known: what would make the diagnosis tell more: words and, where there is one, the command.
    """

    kind: Kind
    what: str
    position: int | None = None
    subject: str | None = None
    command: str | None = None
    after: str | None = None
    bound: float | None = None
    estimate: float | None = None
    estimate_rule: str | None = None
    numerics: str | None = None
    memory_bytes: int | None = None
    confidence: Confidence | None = None
    known: tuple[tuple[str, str | None], ...] = ()

    def to_document(self) -> dict[str, Any]:
        """The value of ``next`` in ``drivetrain diagnose --json``."""
        return {
            "kind": self.kind,
            "position": self.position,
            "subject": self.subject,
            "what": self.what,
            "command": self.command,
            "after": self.after,
            "bound": self.bound,
            "estimate": self.estimate,
            "estimate_rule": self.estimate_rule,
            "numerics": self.numerics,
            "memory_bytes": self.memory_bytes,
            "confidence": self.confidence,
            "known": [{"what": what, "command": command} for what, command in self.known],
        }


def next_step(facts: Facts, diagnosis: Diagnosis) -> NextStep:
    """The largest known loss that has a remedy, and of its remedies the one that is expected to gain most, else the
    first; without one what a person can do about the first finding."""
    known = tuple(_known(facts, diagnosis))
    ranked = list(enumerate(diagnosis.findings, start=1))
    losses = [(place, one) for place, one in ranked if one.kind == "loss"]
    settings = [(place, one) for place, one in ranked if one.kind == "setting"]
    for place, finding in (*losses, *settings):
        remedy = _best(finding)
        if remedy is not None:
            return _change(facts, place, finding, remedy, known)
    for place, finding in (*(pair for pair in losses if pair[1].cost_ns is not None), *settings, *losses):
        what = finding.no_remedy or CAUSES[finding.cause].advice
        return NextStep("advice", what, place, finding.subject, confidence=finding.confidence, known=known)
    return NextStep("nothing", "nothing is lost that anything is known against", known=known)


def _best(finding: Finding) -> Remedy | None:
    """The remedy that is expected to gain most; the first of those without an estimate where none is worth it."""
    estimated = [one for one in finding.remedies if (one.estimate or 0.0) >= _LEAST_GAIN]
    if estimated:
        return max(estimated, key=lambda one: one.estimate or 0.0)
    return next((one for one in finding.remedies if one.estimate is None), None)


def _change(
    facts: Facts,
    place: int,
    finding: Finding,
    remedy: Remedy,
    known: tuple[tuple[str, str | None], ...],
) -> NextStep:
    change = remedy.change
    words = (
        remedy.field if change is None else ", ".join(_setting(leaf, value) for leaf, value in change.items())
    )
    if remedy.name is None:
        what = f"set {words}"
    else:
        what = f"{remedy.name}: {entry(remedy.name).summary.rstrip('.')} ({words})"
    command, after = (None, None) if change is None else _command(facts, remedy.name, change)
    return NextStep(
        "change",
        what,
        place,
        finding.subject,
        command=command,
        after=after or remedy.note,
        bound=remedy.ratio,
        estimate=remedy.estimate,
        estimate_rule=remedy.estimate_rule,
        numerics=remedy.numerics,
        memory_bytes=remedy.memory_bytes,
        confidence=finding.confidence,
        known=known,
    )


def _setting(leaf: str, value: object) -> str:
    if value is None:
        return f"{leaf}=none"
    return f"{leaf}={str(value).lower() if isinstance(value, bool) else value}"


def _command(facts: Facts, name: str | None, change: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The ladder for an entry of the catalogue; for another setting a run with it, which nothing compares."""
    if facts.run_path is None or facts.launch is None:
        return None, None
    config = f"{facts.run_path.rstrip('/')}/config.toml"
    size = facts.launch.world_size
    local = facts.figures.local_processes if facts.figures is not None else None
    settings = [_setting(leaf, value) for leaf, value in change.items()]
    if size > 1 and local != size:
        return None, f"the run spans machines: start it there as before, with {' '.join(settings)}"
    ranks = ["--nproc", str(size)] if size > 1 else []
    if name is not None:
        return shlex.join(["drivetrain", "tune", config, "--only", name, *ranks]), None
    return (
        shlex.join(["drivetrain", "train", config, *settings, *ranks]),
        f"then: drivetrain compare {shlex.quote(facts.run_path)} latest",
    )


def _known(facts: Facts, diagnosis: Diagnosis) -> Iterator[tuple[str, str | None]]:
    """What would make a diagnosis say more, the most useful first."""
    if diagnosis.mfu is None:
        if facts.run_path is None:
            yield (
                "MFU and what matrix products lose: give the model and the device",
                "--model PRESET|TOML --tokens-per-step N --device NAME",
            )
        elif facts.figures is not None and facts.figures.device_type == "cpu":
            threads = facts.figures.threads
            of = "" if threads is None else f" --threads {threads}"
            yield (
                "MFU and what matrix products lose: measure the machine of the run, then diagnose again",
                f"drivetrain bench gemm --dtype {facts.achievable_dtype}{of}",
            )
        elif diagnosis.mfu_reason is not None:
            yield f"MFU and what matrix products lose: {diagnosis.mfu_reason}", None
    if not facts.mean.is_step:
        yield "costs of a step: record at least two steps, with ProfilerStep marks", None
    absent = facts.account.absent_ranks
    if absent and facts.run_path is not None:
        yield (
            "who waits for whom: profile every rank",
            shlex.join(
                [
                    "drivetrain",
                    "profile",
                    f"{facts.run_path}/config.toml",
                    "--nproc",
                    str(facts.account.world_size),
                ]
            ),
        )
    elif absent:
        names = _ranks(absent)
        yield f"who waits for whom: add the traces of rank{'s' if len(absent) > 1 else ''} {names}", None


def _ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
