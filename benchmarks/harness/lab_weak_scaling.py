"""Weak scaling: each rank has as many tokens as the one rank it is compared with.

Two hosts of a core each. From one rank to two each keeps a core of its own, and what is lost is communication that does
not hide, and what two cores take from each other (memory, clock). Four ranks share the two cores: their computation
takes twice as long whatever the wire does, so a step of four is held against the computation of four, side by side, and
the plain ratio is given for information.
"""

from pathlib import Path
from statistics import median
from typing import Any

from harness.claims import Claim, claim_of_times
from harness.lab_data_parallel import COMPUTE, MODELS, ROWS, Sides
from harness.lab_ranks import Pace, Turns, run_part
from harness.session import a_against_a

__all__ = ["MODEL", "weak", "weak_claims"]

MODEL = {"full": "quick", "quick": "quick", "tiny": "tiny"}
"""The size of the model. The larger one would take a quarter of an hour."""
PACES = {
    "full": Pace(steps=4, rounds=4, patience_s=10.0, attempts=2),
    "quick": Pace(steps=3, rounds=1, patience_s=0.5, attempts=1),
    "tiny": Pace(steps=2, rounds=1, patience_s=0.0, attempts=1),
}
FOUR = {
    "full": Pace(steps=3, rounds=2, patience_s=10.0, attempts=2),
    "quick": PACES["quick"],
    "tiny": PACES["tiny"],
}
BUCKET_MB = {"full": 4.0, "quick": 4.0, "tiny": 0.01}
ONE, ALL = "one rank", "all ranks"


def weak(group: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """In turns: rank 0 alone while the others do nothing, all ranks without communication, all ranks with it."""
    size, per_host = settings["size"], group.ranks.local_world_size
    sides = Sides(group, MODEL[size])
    alone = sides.ours(0.0, alone=True)
    several_hosts = 1 < per_host < group.size
    pace = (FOUR if several_hosts else PACES)[size]
    steps = {
        ONE: alone if group.is_main else lambda: None,
        COMPUTE: alone,
        ALL: sides.ours(BUCKET_MB[size], in_levels=several_hosts),
    }
    turns = Turns(group, pace, steps)
    turns.run()
    return {"times": turns.times, "others": turns.others, "bytes": sides.gradient_bytes}


def weak_claims(script: Path, size: str, rate: str) -> list[Claim]:
    """One rank to two, and to four.

    Args:
        rate: of the links: an all-reduce between the two hosts takes a given share of a rank's computation.
    """
    two = run_part(script, "weak", {"size": size}, hosts=2, ranks=1, rate=rate)
    four = run_part(script, "weak", {"size": size}, hosts=2, ranks=2, rate=rate)
    tokens = ROWS[MODEL[size]] * MODELS[MODEL[size]]["seq_length"]
    return [
        claim_of_times(
            "weak scaling from one rank to two: a step of one over a step of both",
            "ours on one rank",
            "",
            two["times"][ALL],
            two["times"][ONE],
            target=0.8,
            note=(
                "a core for each rank; hiding 85% of what takes 0.7 of the computation leaves 0.9, the rest is what "
                f"two busy cores take from each other; {_conditions(two, tokens, rate, 1)}"
            ),
        ),
        claim_of_times(
            "two ranks: their computation alone over their step",
            "ours without communication",
            "",
            two["times"][ALL],
            two["times"][COMPUTE],
            target=0.85,
            note=_conditions(two, tokens, rate, 1),
        ),
        claim_of_times(
            "four ranks on two cores: their computation alone over their step",
            "ours without communication",
            "",
            four["times"][ALL],
            four["times"][COMPUTE],
            target=0.85,
            note=f"two ranks share a core and collectives go in levels; {_conditions(four, tokens, rate, 2)}",
        ),
        claim_of_times(
            "weak scaling from one rank to four on two cores: a step of one over a step of all",
            "ours on one rank",
            "",
            four["times"][ALL],
            four["times"][ONE],
            target=0.0,
            note=(
                "for information: there are two cores, so that 0.5 is all that computation leaves; "
                f"{_conditions(four, tokens, rate, 2)}"
            ),
        ),
    ]


def _conditions(found: dict[str, Any], tokens: int, rate: str, ranks: int) -> str:
    times = found["times"]
    noise = a_against_a(times[ALL]) or 0.0
    return (
        f"{tokens} tokens a rank, 2 hosts of {ranks} rank{'s' if ranks > 1 else ''} with one thread, links of {rate}, "
        f"{found['bytes'] / 1e6:.0f} MB of gradients; one rank {median(times[ONE]):.3f} s, computation of all "
        f"{median(times[COMPUTE]):.3f} s, step of all {median(times[ALL]):.3f} s; {len(times[ALL])} turns a side, a "
        f"step against itself {noise:.1%}; others took {median(found['others'][ALL]):.0%} of the machine"
    )
