"""Recompute as a trade, and what offload of the optimizer costs: tokens/s and live bytes under a memory limit.

``--part recompute``: a limit in which a plain step fits a batch of 4 sequences and not of 5. A: plain at 4. B: what C
recomputes, at 4. C: a budget at the largest batch that fits. D: whole layers recomputed at C's batch. E: a budget at a
batch a quarter larger than A's. Batch and micro-batch are one and the same, so that a larger one pays launches and
update for more tokens. Whether C is worth it is measured, in one session in which all take turns; it may well lose on a
CPU, where products of few rows are as fast as of many.

``--part offload``: shares of the optimizer's state in host memory: bytes that leave the device, bytes over the link,
seconds that the computation waits, and what a step takes. On a CPU the device's memory is the host's: nothing is saved,
and the price is that of the copies.

Each part is bounded to about eight minutes. Raw step times go to ``--raw``.

    python benchmarks/memory.py --json
    python benchmarks/memory.py --part offload
    python benchmarks/memory.py --quick
"""

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from drivetrain.archive.reader import Run, open_run
from drivetrain.catalogue import StepEstimate
from drivetrain.config import RunConfig, load_config
from drivetrain.errors import ConfigurationError
from drivetrain.measure.parameters import parameter_count
from harness.claims import Claim, claim_of_ratios, claim_of_times, document
from harness.ours import our_side
from harness.session import Pace, Ran, a_against_a, medians, run_session
from harness.workload import Workload

KEEPS_MEMORY = "malloc that keeps memory"
PARTS = ("recompute", "offload")
PLAIN_BATCH = 4
LARGEST_BATCH = 16
LEAST_EFFECT = 1.01
"""Below it a difference counts for nothing."""
AGREEMENT = 0.03
"""That predicted and counted bytes may differ by."""
FRACTIONS = (0.0, 0.25, 0.5, 1.0)
STATE_BYTES = 16
"""Of one fp32 element over the link in a step: two moments, there and back."""
FULL = Pace(warmup=5, steps=8, rounds=3, attempts=2, patience_s=5.0)
QUICK = Pace(warmup=2, steps=2, rounds=1, attempts=1, patience_s=0.5)
STEPS = 2000
PEER = "drivetrain, nothing recomputed"


@dataclass(frozen=True)
class Row:
    """One configuration of the session.

    Attributes:
        name: in the table.
        batch: sequences of a step, which is one micro-batch.
        settings: on top of the workload.
        needs: predicted.
    """

    name: str
    batch: int
    settings: tuple[str, ...]
    needs: StepEstimate


def work_of(folder: Path, preset: str, batch: int) -> Workload:
    """A step of one micro-batch."""
    return Workload(folder, preset, batch, 1, STEPS)


def config_of(preset: str, batch: int, settings: Sequence[str]) -> RunConfig:
    """As the lane has it."""
    return load_config(preset, [*work_of(Path(), preset, batch).overrides(), *settings]).config


def needs_of(preset: str, batch: int, settings: Sequence[str]) -> StepEstimate:
    """What a step needs, by the engine's code over tensors without memory.

    Raises:
        ConfigurationError: no recomputation makes it fit its budget.
    """
    from drivetrain.engine.memory.step_estimate import estimate_step

    return estimate_step(config_of(preset, batch, settings), 1)


def say(text: str) -> None:
    """Progress."""
    print(text, file=sys.stderr, flush=True)


def lanes_of(preset: str, largest: int) -> tuple[list[Row], int]:
    """A to E, and the limit that they run under."""
    plain = {batch: needs_of(preset, batch, ()) for batch in (PLAIN_BATCH, PLAIN_BATCH + 1)}
    # The prediction may be a little less than what is counted; halfway to the next batch is room for that.
    limit_bytes = (plain[PLAIN_BATCH].peak_bytes + plain[PLAIN_BATCH + 1].peak_bytes) // 2
    limit = f"memory.device_memory_limit_bytes={limit_bytes}"
    budget = (limit, "memory.recompute_granularity=budget")
    fits: dict[int, StepEstimate] = {}
    for batch in range(PLAIN_BATCH + 1, largest + 1):
        try:
            fits[batch] = needs_of(preset, batch, budget)
        except ConfigurationError as error:
            say(f"a batch of {batch}: {error}")
            break
        say(f"a batch of {batch} fits {limit_bytes:,} bytes with {fits[batch].recomputed}")
    if not fits:
        sys.exit(f"under {limit_bytes:,} bytes no recomputation makes room for a batch of {PLAIN_BATCH + 1}")
    most, quarter = max(fits), PLAIN_BATCH + max(1, PLAIN_BATCH // 4)
    same = same_plan(preset, most, budget, limit_bytes)
    whole = (limit, "memory.recompute_granularity=full")
    lanes = [
        Row("A plain", PLAIN_BATCH, (limit,), plain[PLAIN_BATCH]),
        Row("B recompute, same batch", PLAIN_BATCH, same, needs_of(preset, PLAIN_BATCH, same)),
        Row("C recompute, larger batch", most, budget, fits[most]),
        Row("D full, batch of C", most, whole, needs_of(preset, most, whole)),
    ]
    if quarter != most:
        lanes.append(Row("E recompute, batch + 1/4", quarter, budget, fits[quarter]))
    # Whole layers are not the least memory: with few of them what one has alive at once outweighs what it gave back.
    return [
        lane for lane in lanes if lane.needs.peak_bytes <= limit_bytes or say_too_large(lane)
    ], limit_bytes


def say_too_large(lane: Row) -> bool:
    """Tell that a lane does not fit, and leave it out."""
    say(f"{lane.name}: needs {lane.needs.peak_bytes:,} bytes and is left out")
    return False


def same_plan(preset: str, batch: int, budget: Sequence[str], limit_bytes: int) -> tuple[str, ...]:
    """Settings by which the plain batch recomputes what the batch of C does: a budget of what that comes to there."""
    from drivetrain.engine.memory.recompute_budget import plan_of_run
    from drivetrain.engine.memory.recompute_measure import peak_of_step

    plan = plan_of_run(config_of(preset, batch, budget), 1, 0, limit_bytes).plan
    peak_bytes = peak_of_step(config_of(preset, PLAIN_BATCH, budget), 1, 0, plan)
    return (*budget, f"memory.budget_bytes={peak_bytes}")


def refuse_larger_plain(preset: str, limit_bytes: int) -> str:
    """The message with which one sequence more ends; stops the script where it does not."""
    batch = PLAIN_BATCH + 1
    with tempfile.TemporaryDirectory(prefix="memory-limit-") as name:
        overrides = work_of(Path(name), preset, batch).overrides()
        command = [sys.executable, "-m", "drivetrain", "train", preset, *overrides]
        done = subprocess.run(
            [*command, f"memory.device_memory_limit_bytes={limit_bytes}", "training.train_iters=1"],
            cwd=name,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    lines = [line for line in done.stderr.splitlines() if "device_memory_limit_bytes" in line]
    if done.returncode == 0 or not lines:
        sys.exit(f"a plain batch of {batch} was to end out of memory, and did not:\n{done.stderr[-2000:]}")
    return lines[-1].strip()


def session(
    preset: str, lanes: Sequence[Row], folder: Path, pace: Pace
) -> tuple[dict[str, Ran], dict[str, Run]]:
    """All lanes in turn and in reverse; what they did, and their runs."""
    sides = {
        lane.name: replace(
            our_side(work_of(folder / "work", preset, lane.batch), KEEPS_MEMORY, lane.settings),
            name=lane.name,
        )
        for lane in lanes
    }
    order = [*sides, *reversed(sides)] * pace.rounds
    ran = run_session(sides, order, folder / "session", pace)
    runs = {
        name: open_run(next((folder / "session" / str(number) / "runs").glob("*")))
        for number, name in enumerate(sides)
    }
    return ran, runs


def counted_bytes(run: Run) -> int:
    """Live bytes at the peak that a run under a limit counted."""
    (count,) = [event for event in run.events() if event.get("what") == "memory_count"]
    return int(count["peak_bytes"])


def per_token(lane: Row, ran: Ran, length: int) -> list[float]:
    """Seconds a token of each block that counts."""
    return [seconds / (lane.batch * length) for seconds in medians(ran)]


def recompute_part(preset: str, pace: Pace, largest: int, raw: Path | None) -> list[Claim]:
    """The trade."""
    lanes, limit_bytes = lanes_of(preset, largest)
    refused = refuse_larger_plain(preset, limit_bytes)
    say(f"plain with a batch of {PLAIN_BATCH + 1}: {refused}")
    with tempfile.TemporaryDirectory(prefix="memory-recompute-") as name:
        ran, runs = session(preset, lanes, Path(name).resolve(), pace)
        counted = {lane.name: counted_bytes(runs[lane.name]) for lane in lanes}
    length = config_of(preset, 1, ()).model.seq_length
    seconds = {lane.name: per_token(lane, ran[lane.name], length) for lane in lanes}
    write_raw(raw, "recompute", preset, ran)
    plain = lanes[0]
    noise = a_against_a(seconds[plain.name])
    table(
        ["", "batch", "tokens/s", "ms a step", "predicted", "counted", "recomputed"],
        [
            [
                lane.name,
                str(lane.batch),
                f"{1 / median(seconds[lane.name]):,.0f}",
                f"{median(seconds[lane.name]) * lane.batch * length * 1e3:.1f}",
                f"{lane.needs.peak_bytes:,}",
                f"{counted[lane.name]:,}",
                lane.needs.recomputed or "nothing",
            ]
            for lane in lanes
        ],
    )
    claims = []
    for lane in lanes[1:]:
        claimed = lane.name.startswith("C ")
        claims.append(
            claim_of_times(
                f"tokens/s under {limit_bytes:,} bytes, {preset}, batch of {lane.batch}: {lane.name} against plain "
                f"with {plain.batch}, its largest batch",
                PEER,
                "this revision",
                seconds[lane.name],
                seconds[plain.name],
                target=LEAST_EFFECT if claimed else 0.0,
                note=(
                    f"seconds a token; {1 / median(seconds[lane.name]):,.0f} against "
                    f"{1 / median(seconds[plain.name]):,.0f} tokens/s; recomputed: "
                    f"{lane.needs.recomputed or 'nothing'}; {counted[lane.name]:,} live bytes counted at the peak, "
                    f"{counted[plain.name]:,} plain; A/A "
                    f"{'unknown' if noise is None else format(noise, '.1%')}; one sequence more, plain: {refused}; "
                    f"others took at most {max(one.foreign_share for one in ran[lane.name].blocks):.1%} of the machine"
                ),
            )
        )
    worst = max(abs(lane.needs.peak_bytes / counted[lane.name] - 1) for lane in lanes)
    claims.append(
        claim_of_ratios(
            f"live bytes at the peak, {preset}: {AGREEMENT:.0%} over the largest deviation of predicted from counted",
            "none",
            "",
            [AGREEMENT / max(worst, 1e-6)],
            target=1.0,
            note=f"{len(lanes)} configurations; largest deviation {worst:.3%}; counted: each storage once, one step",
        )
    )
    return claims


def offload_part(preset: str, pace: Pace, fractions: Sequence[float], raw: Path | None) -> list[Claim]:
    """The price of the last bytes."""
    nothing = StepEstimate(0, 0, "")
    lanes = [
        Row(
            f"offloaded {fraction:.0%}",
            PLAIN_BATCH,
            (f"memory.optimizer_offload_fraction={fraction}",) if fraction else (),
            nothing,
        )
        for fraction in fractions
    ]
    with tempfile.TemporaryDirectory(prefix="memory-offload-") as name:
        ran, runs = session(preset, lanes, Path(name).resolve(), pace)
        moved = {lane.name: offloaded(runs[lane.name], "moved_bytes", pace.warmup) for lane in lanes}
        waited = {lane.name: offloaded(runs[lane.name], "exposed_s", pace.warmup) for lane in lanes}
    write_raw(raw, "offload", preset, ran)
    seconds = {lane.name: medians(ran[lane.name]) for lane in lanes}
    plain = lanes[0]
    noise = a_against_a(seconds[plain.name])
    base = median(seconds[plain.name])
    rows, claims = [], []
    elements = parameter_count(config_of(preset, 1, ()).model).total
    for fraction, lane in zip(fractions, lanes, strict=True):
        # What travels there and back each step lives on the host between steps.
        left = moved[lane.name] / 2
        more = median(seconds[lane.name]) - base
        price = f"{more / left * 1e9:.3g}" if left else "-"
        rows.append(
            [
                lane.name,
                f"{left:,.0f}",
                f"{moved[lane.name]:,.0f}",
                f"{waited[lane.name] * 1e3:.2f}",
                f"{median(seconds[lane.name]) * 1e3:.1f}",
                price,
            ]
        )
        if lane is plain:
            continue
        claims.append(
            claim_of_times(
                f"step with {fraction:.0%} of the optimizer's state in host memory, {preset}, against none",
                "drivetrain, nothing offloaded",
                "this revision",
                seconds[lane.name],
                seconds[plain.name],
                target=0.0,
                note=(
                    f"{left:,.0f} bytes live on the host, {moved[lane.name]:,.0f} travel a step, "
                    f"{waited[lane.name] * 1e3:.2f} ms of it waited for; {price} s a step and GB off the device; on a "
                    f"CPU no memory is saved; A/A {'unknown' if noise is None else format(noise, '.1%')}"
                ),
            )
        )
        claims.append(
            claim_of_ratios(
                f"bytes over the link, {preset}, {fraction:.0%} offloaded: {STATE_BYTES} an element of that share, "
                "over what travelled",
                "none",
                "",
                [STATE_BYTES * elements * fraction / moved[lane.name]],
                target=1.0,
                note="counted by the run; whole parameters, as many as fit into the share",
            )
        )
    table(["", "bytes on the host", "bytes a step", "waited, ms", "ms a step", "s a step and GB"], rows)
    return claims


def offloaded(run: Run, what: str, warmup: int) -> float:
    """Median of a metric over the steps after warm-up; 0 where nothing is offloaded."""
    values = [line[f"offload/{what}"] for line in run.metrics()[warmup:] if f"offload/{what}" in line]
    return float(median(values)) if values else 0.0


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns to stderr."""
    widths = [max(len(row[place]) for row in (headings, *rows)) for place in range(len(headings))]
    for row in (headings, *rows):
        say("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))


def write_raw(folder: Path | None, part: str, preset: str, ran: Mapping[str, Ran]) -> None:
    """All step times of a session."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    body = {"schema": 1, "preset": preset, "sides": {name: asdict(one) for name, one in ran.items()}}
    (folder / f"memory-{part}.json").write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps, and batches to one sequence more")
    parser.add_argument("--part", choices=PARTS, action="append", help="this part; may be repeated")
    parser.add_argument("--preset", default="llama-2m")
    parser.add_argument("--raw", type=Path, metavar="FOLDER", help="write all step times there")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    pace = QUICK if options.quick else FULL
    claims: list[Claim] = []
    for part in options.part or PARTS:
        began = time.monotonic()
        if part == "recompute":
            largest = PLAIN_BATCH + 1 if options.quick else LARGEST_BATCH
            claims += recompute_part(options.preset, pace, largest, options.raw)
        else:
            fractions = (0.0, 1.0) if options.quick else FRACTIONS
            claims += offload_part(options.preset, pace, fractions, options.raw)
        say(f"part {part}: {time.monotonic() - began:.0f} s")
    for claim in claims:
        say(f"{claim.ratio:.3f} [{claim.low:.3f}, {claim.high:.3f}] {claim.claim}: {claim.note}")
    if options.json:
        print(document(claims))


if __name__ == "__main__":
    main()
