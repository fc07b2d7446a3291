"""Communication under computation on a real wire: hosts in namespaces of this machine, behind links of a chosen rate.

Needs root (see docs/lab.md). Two hosts have a core each; ranks wait for the wire while the cores compute, so that what
hides is measured and not assumed. Links are made as fast as it takes for communication to last 0.65 of the computation.

* ``data``: our gradient buckets against torch's DistributedDataParallel, each at its best size of a sweep that is
  drawn, against everything after backward, and the share of communication that is hidden.
* ``share``: communication's share of a step, from 28% with nothing hidden.
* ``levels``: two hosts of two ranks behind slow links, collectives in levels against flat ones.
* ``wire``: bytes that leave a host with gradients in bf16 on the wire.
* ``chunks``: tensor and sequence parallelism with the collectives of a layer in 1 to 32 chunks, drawn; and on one host.
* ``account``: what a run says of its own waits against the account of the same, profiled steps.
* ``weak``: one rank against two, and four, with as many tokens each.

The claims of a part are printed on stderr when it is done; with ``--json`` the document has what was finished, even
where a later part fails (exit code 1).

    python benchmarks/overlap.py --json
    python benchmarks/overlap.py --quick --part data
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from drivetrain.errors import DrivetrainError
from drivetrain.lab import format_rate, missing
from harness import lab_data_parallel, lab_tensor_parallel
from harness.claims import Claim, claim_of_ratios, claim_of_times, document
from harness.lab_account import exposed_by_both
from harness.lab_chunk_claims import chunks_claims
from harness.lab_data_parallel import COMPUTE, OFF, WIRE
from harness.lab_figures import Sweep, draw, least_effect, sweep_text
from harness.lab_ranks import as_rank, hidden_share, run_part
from harness.lab_weak_scaling import MODEL, weak, weak_claims
from harness.session import a_against_a

SCRIPT = Path(__file__).resolve()
BUCKETS = {
    "full": [0.5, 1.0, 2.0, 4.0, 8.0, 25.0, 50.0, 200.0],
    "quick": [1.0, 4.0, 200.0],
    "tiny": [0.01, 200.0],
}
WIRE_OVER_COMPUTE = 0.65
SHARE_BEFORE = 0.28
CORES = os.cpu_count()
LADDER_TRIALS = {"full": 4, "quick": 0, "tiny": 1}

RANK_PARTS: Mapping[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "calibrate": lab_data_parallel.calibrate,
    "data": lab_data_parallel.compare,
    "share": lab_data_parallel.shares,
    "levels": lab_data_parallel.levels,
    "wire": lab_data_parallel.wire_dtypes,
    "calibrate chunks": lab_tensor_parallel.calibrate_chunks,
    "chunks": lab_tensor_parallel.sweep_chunks,
    "weak": weak,
}


def rate_for(size: str, wire_over_compute: float) -> str:
    """The rate at which an all-reduce of all gradients between two hosts takes this much of a step's computation."""
    found = run_part(SCRIPT, "calibrate", {"size": size}, hosts=2, ranks=1, rate="10gbit")
    # Of two ranks each sends all bytes once; headers are 5% of what passes.
    rate = 1.05 * 8 * found["bytes"] / (wire_over_compute * found["compute_s"])
    return format_rate(max(1, round(rate / 1e6)) * 1_000_000)


def data_claims(size: str) -> list[Claim]:
    """Two hosts of a rank each."""
    rate = rate_for(size, WIRE_OVER_COMPUTE)
    settings = {"size": size, "buckets": BUCKETS[size], "trials": LADDER_TRIALS[size]}
    found = run_part(SCRIPT, "data", settings, hosts=2, ranks=1, rate=rate)
    times, best, version = found["times"], found["best"], found["torch"]
    ours, theirs = f"ours {best['ours']:g} MB", f"DDP {best['DDP']:g} MB"
    compute, wire = times[COMPUTE], times[WIRE]
    noise = a_against_a(times[ours]) or 0.0
    conditions = (
        f"2 hosts of a rank with one thread, links of {rate}; computation {median(compute):.3f} s, wire alone "
        f"{median(wire):.3f} s ({median(wire) / median(compute):.2f} of it), {found['bytes'] / 1e6:.0f} MB of "
        f"gradients; {len(compute)} turns a side, ours against itself {noise:.1%}; others took "
        f"{median(found['others'][ours]):.0%} of the machine"
    )
    hidden = hidden_share(compute, wire, times[ours])
    their_hidden = hidden_share(compute, wire, times[theirs])
    claims = [
        claim_of_ratios(
            "share of communication under computation, our buckets at their best size",
            "none",
            "",
            _positive(hidden),
            target=0.85,
            note=f"{ours}; DDP at its best ({theirs}) hides {median(their_hidden):.0%}; {conditions}",
        ),
        claim_of_times(
            "step at the best bucket size of each",
            "torch DistributedDataParallel",
            version,
            times[ours],
            times[theirs],
            target=1.0,
            note=f"{ours} against {theirs} with gradient_as_bucket_view and static_graph; {conditions}",
        ),
        claim_of_times(
            "step over the same with all communication after backward",
            "ours with overlap off",
            "",
            times[ours],
            times[OFF],
            target=1.4,
            note=f"{ours} against overlap.bucket_size_mb = 0; {conditions}",
        ),
    ]
    sweep = Sweep(
        f"A step over the size of its buckets, links of {rate}",
        "bucket size in MB",
        {who: [(size_mb, seconds) for size_mb, seconds in found["sweep"][who]] for who in ("ours", "DDP")},
        {"computation alone": median(compute), "all communication after backward": median(times[OFF])},
    )
    where = draw("overlap-buckets", sweep, size)
    claims.append(
        claim_of_ratios(
            "bucket sweep: least time at its ends over the least of all",
            "none",
            "",
            [sweep.interior("ours")],
            target=1.0 + least_effect(noise),
            note=f"{sweep_text(sweep)}; {where}; {conditions}",
        )
    )
    if "ladder" in found:
        ladder = found["ladder"]
        name = f"ladder {ladder['size']:g} MB"
        claims.append(
            claim_of_times(
                "step with the bucket size that the ladder's search finds, against the best of the sweep",
                f"best of the sweep, {best['ours']:g} MB",
                "",
                times[name],
                times[ours],
                target=1.0 - least_effect(noise),
                note=f"found {ladder['size']:g} MB; tried (log of the gain over 25 MB) {ladder['tried']}; {conditions}",
            )
        )
    return claims


def share_claims(size: str) -> list[Claim]:
    """How far communication's share of a step goes down."""
    rate = rate_for(size, SHARE_BEFORE / (1 - SHARE_BEFORE))
    rows: dict[str, dict[str, Any]] = {
        "all after backward": {"bucket_mb": 0.0},
        "buckets of 25 MB": {"bucket_mb": 25.0},
        "buckets of 4 MB": {"bucket_mb": 4.0},
        "buckets of 2 MB": {"bucket_mb": 2.0},
        "sharded reduce (ZeRO 2), buckets of 4 MB": {"bucket_mb": 4.0, "zero_stage": 2},
        "the same, gather under the next forward": {
            "bucket_mb": 4.0,
            "zero_stage": 2,
            "overlap_param_gather": True,
        },
    }
    found = run_part(SCRIPT, "share", {"size": size, "rows": rows}, hosts=2, ranks=1, rate=rate)
    share, sent = found["share"], found["sent"]
    table = "; ".join(f"{name}: {share[name]:.1%}, {sent[name] / 1e6:.1f} MB sent" for name in rows)
    best = min(share, key=lambda name: share[name])
    conditions = (
        f"links of {rate}, 2 hosts of a rank with one thread; share = 1 - computation / step: {table}"
    )
    print(
        "\n".join(f"  {name:<44} {share[name]:6.1%}  {sent[name] / 1e6:6.1f} MB" for name in rows),
        file=sys.stderr,
    )
    return [
        claim_of_ratios(
            "communication's share of a step with nothing hidden",
            "none",
            "",
            [max(share["all after backward"], 1e-3)],
            target=0.0,
            note=f"for information, to be about {SHARE_BEFORE:.0%}; {conditions}",
        ),
        claim_of_ratios(
            "communication's share of a step at most 12%: 12% over what is left",
            "none",
            "",
            [0.12 / max(share[best], 1e-3)],
            target=1.0,
            note=f"{best}; {conditions}",
        ),
    ]


def levels_claims(size: str) -> list[Claim]:
    """Two hosts of two ranks, more than there are cores: only the wire may decide; links are slow, batches small."""
    rate = "200mbit"
    settings = {"size": "tiny" if size == "tiny" else "quick", "rows": 1, "bucket_mb": 4.0}
    found = run_part(SCRIPT, "levels", settings, hosts=2, ranks=2, rate=rate)
    times, sent = found["times"], found["sent"]
    conditions = (
        f"2 hosts of 2 ranks on {CORES} cores, links of {rate}; buckets of 4 MB, {found['bytes'] / 1e6:.0f} MB of "
        f"gradients; computation alone {median(times[COMPUTE]):.2f} s; sent by a host in a step: flat "
        f"{sent['flat'] / 1e6:.1f} MB, in levels {sent['levels'] / 1e6:.1f} MB; others took "
        f"{median(found['others']['levels']):.0%} of the machine"
    )
    return [
        claim_of_times(
            "step with collectives in levels over flat ones",
            "ours with overlap.hierarchical_collectives off",
            "",
            times["levels"],
            times["flat"],
            target=1.3,
            note=conditions,
        ),
        claim_of_ratios(
            "bytes that leave a host in a step, flat over in levels",
            "ours with overlap.hierarchical_collectives off",
            "",
            [sent["flat"] / sent["levels"]],
            target=1.45,
            note=f"1.5 by the formulas, headers and the loop's own messages aside; {conditions}",
        ),
    ]


def wire_claims(size: str) -> list[Claim]:
    """bf16 on the wire between two hosts."""
    rate = rate_for(size, 2 * WIRE_OVER_COMPUTE)
    found = run_part(SCRIPT, "wire", {"size": size, "bucket_mb": 4.0}, hosts=2, ranks=1, rate=rate)
    times, sent = found["times"], {name: median(counts) for name, counts in found["sent"].items()}
    conditions = (
        f"2 hosts of a rank, links of {rate}, buckets of 4 MB; sent by a host in a step: "
        f"fp32 {sent['fp32'] / 1e6:.2f} MB, bf16 {sent['bf16'] / 1e6:.2f} MB, of {found['bytes'] / 1e6:.2f} MB "
        "of fp32 gradients"
    )
    return [
        claim_of_ratios(
            "bytes that leave a host in a step, gradients in fp32 over bf16",
            "ours with precision.grad_reduce_dtype = fp32",
            "",
            [sent["fp32"] / sent["bf16"]],
            target=1.95,
            note=f"payloads are halved exactly, which tests count; here with headers; {conditions}",
        ),
        claim_of_times(
            "step with gradients in bf16 on the wire, where the wire decides",
            "ours with precision.grad_reduce_dtype = fp32",
            "",
            times["bf16"],
            times["fp32"],
            target=0.0,
            note=f"for information; {conditions}",
        ),
    ]


def account_claims(size: str) -> list[Claim]:
    """What a run says of its own waits, against the account of the profiled steps."""
    rate = "200mbit" if size == "full" else "100mbit"
    preset = "llama-10m" if size == "full" else "llama-2m"
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        both = exposed_by_both(
            Path(folder), rate, [preset, "parallelism.data_parallel_size=2", "overlap.bucket_size_mb=2"]
        )
    points = 100 * abs(both.engine - both.account)
    return [
        claim_of_ratios(
            "the engine's own exposed share within 2 points of the account's: 2 over the difference",
            "drivetrain account",
            "",
            [2.0 / max(points, 0.01)],
            target=1.0,
            note=(
                f"{preset} on 2 hosts, links of {rate}: the run says {both.engine:.2%}, the account of the same steps "
                f"{both.account:.2%}"
                + (
                    ""
                    if both.overlap is None
                    else f", with {both.overlap:.0%} of communication under computation"
                )
            ),
        )
    ]


PARTS: Mapping[str, Callable[[str], list[Claim]]] = {
    "data": data_claims,
    "share": share_claims,
    "levels": levels_claims,
    "wire": wire_claims,
    "chunks": lambda size: chunks_claims(SCRIPT, size),
    "account": account_claims,
    "weak": lambda size: weak_claims(SCRIPT, size, rate_for(MODEL[size], WIRE_OVER_COMPUTE)),
}


def _positive(shares: Sequence[float]) -> list[float]:
    """A claim's figures are above zero; nothing hidden is nothing."""
    return [max(share, 1e-3) for share in shares]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small model, few turns: about a minute")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="this part; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="only shows that every part runs")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.rank_of is not None:
        as_rank(options.rank_of, RANK_PARTS)
        return
    reason = missing()
    if reason is not None:
        sys.exit(reason)
    size = "tiny" if options.tiny else "quick" if options.quick else "full"
    claims: list[Claim] = []
    try:
        for part in options.part or (["data"] if options.quick else list(PARTS)):
            done = PARTS[part](size)
            claims += done
            _show(done)
    except DrivetrainError as error:
        sys.exit(f"error in part {part}: {error}")
    finally:
        # A part that fails takes the others' hours with it otherwise.
        if options.json:
            print(document(claims), flush=True)


def _show(claims: Sequence[Claim]) -> None:
    for claim in claims:
        print(
            f"{claim.ratio:.3f} [{claim.low:.3f}, {claim.high:.3f}] target {claim.target:g} {claim.claim} | "
            f"{claim.note}",
            file=sys.stderr,
            flush=True,
        )


if __name__ == "__main__":
    main()
