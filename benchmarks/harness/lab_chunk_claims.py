"""What is claimed of tensor parallelism in chunks: over two hosts, where the wire takes as long as the computation, and
on one, where there is no wire."""

import tempfile
from pathlib import Path
from statistics import median

from drivetrain.lab import format_rate
from harness import lab_tensor_parallel
from harness.claims import Claim, claim_of_ratios, claim_of_times
from harness.lab_figures import Sweep, draw, least_effect, sweep_text
from harness.lab_ranks import run_part
from harness.session import a_against_a

__all__ = ["chunks_claims"]

CHUNKS = {"full": [1, 2, 4, 8, 16, 32], "quick": [1, 4, 16], "tiny": [1, 2]}
TUNE_S = {"full": 300.0, "quick": 0.0, "tiny": 60.0}


def chunks_claims(script: Path, size: str) -> list[Claim]:
    """Tensor and sequence parallelism over two hosts, where communication takes as long as computation; and on one."""
    plain = run_part(script, "calibrate chunks", {"size": size}, hosts=2, ranks=1, rate="10gbit")
    rate = format_rate(max(1, round(8 * plain["bytes"] / plain["compute_s"] / 1e6)) * 1_000_000)
    settings = {"size": size, "chunks": CHUNKS[size], "tune_s": TUNE_S[size]}
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        tuned = {**settings, "tuned_file": f"{folder}/wire.toml"}
        found = run_part(script, "chunks", tuned, hosts=2, ranks=1, rate=rate)
        tuned["tuned_file"] = f"{folder}/loopback.toml"
        here = run_part(script, "chunks", tuned, hosts=1, ranks=2, rate=rate)
    best = lab_tensor_parallel.name_of(found["best"])
    times = found["times"]
    noise = a_against_a(times["plain"]) or 0.0
    conditions = (
        f"2 hosts of a rank with one thread, links of {rate}: {plain['bytes'] / 1e6:.1f} MB sent in a step, which "
        f"computes about {plain['compute_s']:.3f} s; plain against itself {noise:.1%}; others took "
        f"{median(found['others'][best]):.0%} of the machine"
    )
    sweep = Sweep(
        f"A step over the number of chunks, links of {rate}",
        "chunks",
        {"two hosts": found["sweep"], "one host, no wire": here["sweep"]},
        {},
    )
    claims = [
        claim_of_times(
            "tensor-parallel step with its collectives in chunks over the plain one",
            "ours with overlap.tp_chunks = 1",
            "",
            times[best],
            times["plain"],
            target=1.3,
            note=f"{best}; {conditions}",
        ),
        claim_of_ratios(
            "chunk sweep: least time at its ends over the least of all",
            "none",
            "",
            [sweep.interior("two hosts")],
            target=1.0 + least_effect(noise),
            note=f"{sweep_text(sweep)}; {draw('overlap-chunks', sweep, size)}; {conditions}",
        ),
        claim_of_ratios(
            "on one host, without a wire, the plain step over the best one in chunks: not above the noise",
            "ours with overlap.tp_chunks = 1",
            "",
            [min(seconds for chunks, seconds in here["sweep"] if chunks > 1) / here["sweep"][0][1]],
            target=1.0 - least_effect(noise),
            note=f"chunks bring nothing there; {sweep_text(sweep)}",
        ),
    ]
    if "tuned" in found:
        claims += [
            claim_of_times(
                "step with the chunks that ops tune finds, against the best of the sweep",
                f"best of the sweep, {best}",
                "",
                times[lab_tensor_parallel.TUNED],
                times[best],
                target=1.0 - least_effect(noise),
                note=f"found {found['tuned']}; {conditions}",
            ),
            claim_of_ratios(
                "on one host ops tune finds one piece for each product: share of products",
                "none",
                "",
                [max(1e-3, sum(count == 1 for count in here["tuned"].values()) / len(here["tuned"]))],
                target=1.0,
                note=f"found {here['tuned']}",
            ),
        ]
    return claims
