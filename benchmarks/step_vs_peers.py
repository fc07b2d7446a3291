"""Time of a training step against ``transformers.Trainer`` and ``lightning.Trainer``.

Both sides train the same Llama (a preset's shape) from the same weights on the same rows: bf16 compute, fp32
masters, AdamW, gradients clipped to 1.0, two threads. Ours is the ``drivetrain train`` command with its
log line, metrics and heartbeat at every step; theirs are their own training loops. Blocks of steps, each in
a process of its own, alternate in one session. First a pilot finds the best settings of each side.

    python benchmarks/step_vs_peers.py --quick --json
    python benchmarks/step_vs_peers.py --preset llama-10m --raw benchmarks/results
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.blocks import Block
from harness.claims import Claim, claim_of_times, document
from harness.ours import run_ours
from harness.session import (
    a_against_a,
    block_medians,
    interleaved,
    palindrome,
    require_same_work,
    worst_foreign_share,
)
from harness.theirs import run_peer
from harness.workload import ALLOCATORS, Workload
from peers.settings import CANDIDATES, DEFAULTS, INFORMATION

NAMES = {"huggingface": "transformers.Trainer", "lightning": "lightning.Trainer"}
PACKAGES = {"huggingface": "transformers", "lightning": "lightning"}
OURS, OURS_DEFAULT = "drivetrain", "drivetrain, its defaults"
KEEPS_MEMORY = "malloc that keeps memory"
SEQUENCES_PER_PASS = 8


@dataclass(frozen=True)
class Plan:
    """How much is run."""

    presets: list[str]
    allocators: list[str]
    steps: dict[str, int]
    warmup: int
    rounds: int
    pilot: bool
    patience_s: float

    def workload(self, preset: str, folder: Path) -> Workload:
        """One pass of the preset's own micro-batch a step: nothing hides what a step costs."""
        steps = self.warmup + self.steps.get(preset, 8) + 1
        return Workload(folder / preset, preset, SEQUENCES_PER_PASS, 1, steps)


FULL = Plan(
    presets=["llama-10m", "llama-50m"],
    allocators=list(ALLOCATORS),
    steps={"llama-10m": 16, "llama-50m": 6},
    warmup=4,
    rounds=1,
    pilot=True,
    patience_s=180.0,
)
QUICK = replace(
    FULL,
    presets=["llama-10m"],
    allocators=[KEEPS_MEMORY],
    steps={"llama-10m": 5},
    warmup=2,
    pilot=False,
    patience_s=2.0,
)


@dataclass(frozen=True)
class Best:
    """What the pilot chose: whether our blocks are compiled, and each peer's settings by label."""

    compiled: bool
    settings: dict[str, tuple[str, dict[str, Any]]]
    times: dict[str, float] = field(default_factory=dict)


# What the committed results found best; --quick has no time for a pilot.
KNOWN_BEST = Best(
    compiled=False,
    settings={peer: next(iter(candidates.items())) for peer, candidates in CANDIDATES.items()},
)


def find_best(work: Workload, plan: Plan) -> Best:
    """One short block of every candidate, on the allocator that keeps memory; the quickest counts."""
    sides: dict[str, Callable[[], Block]] = {
        f"ours, fusion.compile={value}": partial(
            run_ours, work, KEEPS_MEMORY, compiled=value, warmup=plan.warmup, patience_s=plan.patience_s
        )
        for value in (False, True)
    }
    for peer, candidates in CANDIDATES.items():
        for label, settings in candidates.items():
            sides[f"{peer}, {label}"] = _peer(work, plan, KEEPS_MEMORY, peer, label, settings)
    blocks = interleaved(list(sides), sides, f"{work.preset} pilot")
    times = {name: ran[0].median_s for name, ran in blocks.items()}
    settings_of = {}
    for peer, candidates in CANDIDATES.items():
        label = min(candidates, key=lambda label, peer=peer: times[f"{peer}, {label}"])  # type: ignore[misc]
        settings_of[peer] = (label, candidates[label])
    ours = {value: times[f"ours, fusion.compile={value}"] for value in (False, True)}
    return Best(compiled=ours[True] < ours[False], settings=settings_of, times=times)


def _peer(
    work: Workload, plan: Plan, allocator: str, peer: str, label: str, settings: dict[str, Any]
) -> Callable[[], Block]:
    return partial(
        run_peer, work, allocator, peer, settings, label=label, warmup=plan.warmup, patience_s=plan.patience_s
    )


def compare(work: Workload, plan: Plan, allocator: str, best: Best, *, quick: bool) -> dict[str, list[Block]]:
    """One session of ours against both peers; blocks by side."""
    ours = partial(run_ours, work, allocator, warmup=plan.warmup, patience_s=plan.patience_s)
    sides: dict[str, Callable[[], Block]] = {OURS: partial(ours, compiled=best.compiled)}
    for peer, (label, settings) in best.settings.items():
        if not quick:
            sides[f"{peer} default"] = _peer(work, plan, allocator, peer, "its defaults", DEFAULTS[peer])
        sides[f"{peer} best"] = _peer(work, plan, allocator, peer, label, settings)
    if not quick:
        if best.compiled:
            sides[OURS_DEFAULT] = partial(ours, compiled=False)
        for peer, rows in INFORMATION.items():
            for label, settings in rows.items():
                sides[f"{peer} information"] = _peer(work, plan, allocator, peer, label, settings)
    others = [name for name in sides if name != OURS]
    return interleaved(palindrome(OURS, others, plan.rounds), sides, f"{work.preset}, {allocator}")


def claims_of(
    preset: str, allocator: str, best: Best, blocks: dict[str, list[Block]], loss_at_random: float
) -> list[Claim]:
    """The claims of one session."""
    ours = blocks[OURS]
    noise = a_against_a(ours)
    conditions = (
        f"{allocator}; ours: fusion.compile={json.dumps(best.compiled)}, logging every step; A/A "
        f"{'unknown' if noise is None else format(noise, '.1%')}; "
    )
    claims = []
    for name, theirs in blocks.items():
        if name == OURS:
            continue
        peer, _, kind = name.partition(" ")
        if name == OURS_DEFAULT:
            claims.append(_own_default(preset, conditions, ours, theirs))
            continue
        same = require_same_work(ours[0], theirs[0])
        note = (
            f"{conditions}theirs: {theirs[0].side.partition(', ')[2]}; {same}; ln V = {loss_at_random:.3f}; others "
            f"took at most {worst_foreign_share([*ours, *theirs]):.1%} of the machine"
        )
        claims.append(
            claim_of_times(
                f"training step, {preset}, bf16, against {NAMES[peer]} at its {kind} settings ({allocator})"
                if kind != "information"
                else f"training step, {preset}, against {theirs[0].side.partition(', ')[2]} ({allocator})",
                NAMES[peer],
                version(PACKAGES[peer]),
                block_medians(ours),
                block_medians(theirs),
                target=0.0 if kind == "information" else 1.0,
                note=note,
            )
        )
    return claims


def _own_default(preset: str, conditions: str, ours: Sequence[Block], default: Sequence[Block]) -> Claim:
    return claim_of_times(
        f"training step, {preset}, bf16, our best settings against our defaults",
        "drivetrain, its defaults",
        version("drivetrain"),
        block_medians(ours),
        block_medians(default),
        target=0.0,
        note=f"{conditions}for information: what fusion.compile=true is worth",
    )


def run(plan: Plan, raw: Path | None, *, quick: bool) -> list[Claim]:
    """Everything the plan says; raw step times go to ``raw``, a folder."""
    claims: list[Claim] = []
    with tempfile.TemporaryDirectory(prefix="step-vs-peers-") as name:
        for preset in plan.presets:
            work = plan.workload(preset, Path(name).resolve())
            work.write()
            best = find_best(work, plan) if plan.pilot else KNOWN_BEST
            sessions = {}
            for allocator in plan.allocators:
                blocks = compare(work, plan, allocator, best, quick=quick)
                sessions[allocator] = {side: [asdict(block) for block in ran] for side, ran in blocks.items()}
                claims += claims_of(preset, allocator, best, blocks, work.loss_at_random)
                for claim in claims:
                    print(
                        f"{claim.ratio:.3f} [{claim.low:.3f}, {claim.high:.3f}] {claim.claim}",
                        file=sys.stderr,
                    )
            if raw is not None:
                _write_raw(raw / f"step_vs_peers-{preset}.json", best, sessions)
    return claims


def _write_raw(path: Path, best: Best, sessions: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document_ = {"schema": 1, "pilot_median_step_s": best.times, "sessions": sessions}
    path.write_text(json.dumps(document_, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="llama-10m against both peers, under a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--preset", action="append", help="instead of llama-10m and llama-50m; may be repeated"
    )
    parser.add_argument("--rounds", type=int, help="times the interleaved order is run")
    parser.add_argument("--raw", type=Path, metavar="FOLDER", help="write all step times there")
    options = parser.parse_args(arguments)
    plan = QUICK if options.quick else FULL
    if options.preset:
        plan = replace(plan, presets=options.preset)
    if options.rounds:
        plan = replace(plan, rounds=options.rounds)
    # A terminated benchmark ends its block's process too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    claims = run(plan, options.raw, quick=options.quick)
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
