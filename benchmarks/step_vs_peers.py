"""Time of a training step against ``transformers.Trainer`` and ``lightning.Trainer``.

Both sides train the same Llama (a preset's shape) from the same weights on the same rows: bf16 compute, fp32
masters, AdamW, gradients clipped to 1.0, two threads. Ours is the ``drivetrain train`` command with its log
line, metrics and heartbeat at every step; theirs are their own training loops. Sides alternate every few
steps. First a pilot finds the best settings of each side.

    python benchmarks/step_vs_peers.py --quick --json
    python benchmarks/step_vs_peers.py --preset llama-10m --raw benchmarks/results
"""

import argparse
import json
import math
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.claims import Claim, claim_of_times, document
from harness.lanes import Side
from harness.ours import our_side
from harness.session import (
    Pace,
    Ran,
    a_against_a,
    medians,
    palindrome,
    quiet_only,
    require_same_work,
    run_session,
)
from harness.theirs import peer_side
from harness.workload import ALLOCATORS, Workload
from peers.settings import CANDIDATES, DEFAULTS, INFORMATION, KNOWN_BEST

NAMES = {"huggingface": "transformers.Trainer", "lightning": "lightning.Trainer"}
PACKAGES = {"huggingface": "transformers", "lightning": "lightning"}
KEEPS_MEMORY = "malloc that keeps memory"
OUR_CANDIDATES: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "compiled": ("fusion.compile=true",),
    "all operators": ("fusion.level=all",),
    "all operators, compiled": ("fusion.level=all", "fusion.compile=true"),
}
OURS, OWN_DEFAULT, DEFAULT, BEST = "ours", "our defaults", "default", "best"
FULL = {
    "llama-10m": Pace(warmup=5, steps=4, rounds=3, attempts=5, patience_s=120.0),
    "llama-50m": Pace(warmup=4, steps=2, rounds=2, attempts=4, patience_s=120.0),
}
OTHER = FULL["llama-10m"]
PILOT = Pace(warmup=5, steps=4, rounds=2, attempts=4, patience_s=120.0)
QUICK = Pace(warmup=2, steps=2, rounds=1, attempts=1, patience_s=1.0)
MOST_STEPS = 2000


@dataclass(frozen=True)
class Best:
    """The best settings: ours, and each peer's, with its label."""

    ours: tuple[str, ...]
    settings: Mapping[str, tuple[str, dict[str, Any]]]


def find_best(work: Workload, folder: Path, pilot: Pace) -> tuple[Best, dict[str, float]]:
    """Time every candidate on the malloc that keeps memory, one after the other; the quickest count."""
    times: dict[str, float] = {}

    def timed(side: Side) -> float:
        place = folder / f"pilot-{len(times)}"
        ran = run_session({"it": side}, ["it"] * pilot.rounds, place, pilot)["it"]
        times[side.name] = min(medians(ran))
        return times[side.name]

    ours = {
        candidate: timed(our_side(work, KEEPS_MEMORY, candidate)) for candidate in OUR_CANDIDATES.values()
    }
    settings = {}
    for peer, candidates in CANDIDATES.items():
        found = {
            label: timed(peer_side(work, KEEPS_MEMORY, peer, label, candidate))
            for label, candidate in candidates.items()
        }
        label = min(found, key=found.__getitem__)
        settings[peer] = (label, candidates[label])
    return Best(min(ours, key=ours.__getitem__), settings), times


def sides_of(work: Workload, allocator: str, peer: str, best: Best) -> dict[str, Side]:
    """Ours and one peer's, with its defaults and lines for information."""
    label, settings = best.settings[peer]
    sides = {
        OURS: our_side(work, allocator, best.ours),
        BEST: peer_side(work, allocator, peer, label, settings),
    }
    sides[DEFAULT] = peer_side(work, allocator, peer, "its defaults", DEFAULTS[peer])
    for label, settings in INFORMATION.get(peer, {}).items():
        sides[label] = peer_side(work, allocator, peer, label, settings)
    if best.ours and peer == next(iter(NAMES)):
        sides[OWN_DEFAULT] = our_side(work, allocator)
    return sides


def claims_of(work: Workload, allocator: str, peer: str, best: Best, ran: Mapping[str, Ran]) -> list[Claim]:
    """The claims of one session."""
    ours = medians(ran[OURS])
    noise = a_against_a(ours)
    random_loss = math.log(work.config().model.vocab_size)
    claims = []
    for key, side in ran.items():
        if key == OURS:
            continue
        blocks = [*quiet_only(ran[OURS].blocks), *quiet_only(side.blocks)]
        claimed = key in (BEST, DEFAULT)
        own = key == OWN_DEFAULT
        against = {BEST: f"{NAMES[peer]} at its best settings", DEFAULT: f"{NAMES[peer]} at its defaults"}
        claims.append(
            claim_of_times(
                f"training step, {work.preset}, {allocator}: ours against {against.get(key, side.name)}",
                "drivetrain" if own else NAMES[peer],
                version("drivetrain" if own else PACKAGES[peer]),
                ours,
                medians(side),
                target=1.0 if claimed else 0.0,
                note=(
                    f"ours: {' '.join(best.ours) or 'defaults'}, logging every step; theirs: {side.name}; "
                    f"A/A {'unknown' if noise is None else format(noise, '.1%')}; "
                    f"{require_same_work(ran[OURS].done, side.done, side.name)}; ln V {random_loss:.3f}; others took "
                    f"at most {max(block.foreign_share for block in blocks):.1%} of the machine"
                ),
            )
        )
    return claims


def run(presets: Mapping[str, Pace], allocators: Sequence[str], raw: Path | None) -> list[Claim]:
    """Pilot and sessions of ``presets``; raw step times go to the folder ``raw``."""
    claims: list[Claim] = []
    for preset, pace in presets.items():
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="step-vs-peers-") as name:
            folder = Path(name).resolve()
            work = Workload(folder / "work", preset, 8, 1, MOST_STEPS)
            work.write()
            best, times = find_best(work, folder, replace(PILOT, patience_s=pace.patience_s))
            print(f"{preset}: best {best}", file=sys.stderr)
            sessions: dict[str, Any] = {}
            for allocator in allocators:
                for peer in NAMES:
                    key = f"{allocator}, {peer}"
                    print(f"{preset}, {key}", file=sys.stderr)
                    sides = sides_of(work, allocator, peer, best)
                    order = palindrome(OURS, [side for side in sides if side != OURS], pace.rounds)
                    ran = run_session(sides, order, folder / key.replace(" ", "-"), pace)
                    sessions[key] = {side: asdict(one) for side, one in ran.items()}
                    claims += claims_of(work, allocator, peer, best, ran)
                    _show(claims)
        if raw is not None:
            _write_raw(raw / f"step_vs_peers-{preset}.json", times, sessions, time.monotonic() - start)
    return claims


def run_quick() -> list[Claim]:
    """llama-10m at two sequences a step against both peers' known best settings, in one session of a few steps each."""
    best = Best((), KNOWN_BEST)
    claims = []
    with tempfile.TemporaryDirectory(prefix="step-vs-peers-") as name:
        folder = Path(name).resolve()
        work = Workload(folder / "work", "llama-10m", 2, 1, 100)
        work.write()
        sides = {OURS: our_side(work, KEEPS_MEMORY, best.ours)}
        for peer, (label, settings) in best.settings.items():
            sides[peer] = peer_side(work, KEEPS_MEMORY, peer, label, settings)
        order = palindrome(OURS, list(best.settings), QUICK.rounds)
        ran = run_session(sides, order, folder / "session", QUICK)
        for peer in best.settings:
            claims += claims_of(work, KEEPS_MEMORY, peer, best, {OURS: ran[OURS], BEST: ran[peer]})
    _show(claims)
    return claims


def _show(claims: Sequence[Claim]) -> None:
    for claim in claims:
        print(
            f"{claim.ratio:.3f} [{claim.low:.3f}, {claim.high:.3f}] {claim.claim}",
            file=sys.stderr,
            flush=True,
        )


def _write_raw(path: Path, pilot: Mapping[str, float], sessions: Mapping[str, Any], seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = {"schema": 1, "seconds": seconds, "pilot_step_s": pilot, "sessions": sessions}
    path.write_text(json.dumps(body) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="llama-10m, two sequences a step, known best settings"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--preset", action="append", help="instead of llama-10m and llama-50m; may be repeated"
    )
    parser.add_argument("--allocator", action="append", choices=list(ALLOCATORS), help="instead of both")
    parser.add_argument("--rounds", type=int, help="times the interleaved order is run")
    parser.add_argument(
        "--patience", type=float, help="longest wait for a quiet machine before a block, seconds"
    )
    parser.add_argument("--raw", type=Path, metavar="FOLDER", help="write all step times there")
    options = parser.parse_args(arguments)
    # A terminated benchmark ends its lanes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.quick:
        claims = run_quick()
    else:
        changes = {"rounds": options.rounds, "patience_s": options.patience}
        changes = {name: value for name, value in changes.items() if value is not None}
        presets = {
            preset: replace(FULL.get(preset, OTHER), **changes) for preset in options.preset or list(FULL)
        }
        claims = run(presets, options.allocator or list(ALLOCATORS), options.raw)
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
