"""What the convergence gate rejects and what it lets through, on real runs of llama-2m.

Harm is injected in code, by wrapping, under the class of the move it imitates: 8 kinds x 5 seeds. Identical code with
another seed is judged by the statistical tier: 40 attempts. Real round-off changes are judged for information. Finished
runs are kept in ``--folder``, so that an interrupted session goes on where it was; delete it to start anew.

    python benchmarks/gate_power.py --json
    python benchmarks/gate_power.py --quick --json
"""

import argparse
import collections
import json
import random
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from drivetrain.tune.gate import Evidence, Verdict
from drivetrain.tune.gate_exact import exact_gate
from drivetrain.tune.gate_roundoff import round_off_gate
from drivetrain.tune.gate_statistical import LOOKS, statistical_gate
from harness.claims import Claim, document, wilson
from harness.gate_harms import HARMS, Harm
from harness.gate_trainer import Job, Runs

WANTED_SHARE = 0.9
"""36 of 40."""
REJECTIONS = ("fail", "suspicious", "inconclusive")
"""Runs that cannot be compared were not judged, so they are no rejection."""
ROUND_OFF_CONTROLS = {"unfused AdamW": ("optimizer.fused=false",), "torch.compile": ("fusion.compile=true",)}
DATA_ORDER = 77


@dataclass(frozen=True)
class Plan:
    """How much is done.

    Attributes:
        harms: names of them.
        seeds: of each harm.
        controls: seeds of each real round-off change.
        same_code: attempts with identical code and another seed.
        pool: baseline runs that these draw from.
        exact_steps, roundoff_steps, statistical_steps: steps of a run.
    """

    harms: Sequence[str]
    seeds: int
    controls: int
    same_code: int
    pool: int
    exact_steps: int = 20
    roundoff_steps: int = 60
    statistical_steps: int = 100


FULL = Plan(harms=list(HARMS), seeds=5, controls=5, same_code=40, pool=32)
QUICK = Plan(
    harms=["gradients summed", "leaking mask", "stale data order"],
    seeds=1,
    controls=0,
    same_code=0,
    pool=0,
    roundoff_steps=20,
)


@dataclass(frozen=True)
class Attempt:
    """One question to the gate, and its answer."""

    what: str
    number: int
    tier: str
    verdict: str
    why: str


class Session:
    """The attempts of a plan over one folder of runs."""

    def __init__(self, runs: Runs, plan: Plan) -> None:
        self.runs = runs
        self.plan = plan
        self.attempts: list[Attempt] = []

    def run(self) -> None:
        """Everything that the plan holds; cheap things first."""
        for number in range(1, self.plan.seeds + 1):
            for name in self.plan.harms:
                self._note(name, number, self._harmed(HARMS[name], number))
        for number in range(1, self.plan.controls + 1):
            for name, overrides in ROUND_OFF_CONTROLS.items():
                self._note(name, number, self._round_off(number, Harm("round-off"), overrides))
        draw = random.Random(0)
        for number in range(1, self.plan.same_code + 1):
            seeds = draw.sample(range(1, self.plan.pool + 1), 2 * LOOKS[-1])
            self._note("identical code", number, self._same_code(seeds))

    def _note(self, what: str, number: int, verdict: Verdict) -> None:
        attempt = Attempt(what, number, str(verdict.tier), verdict.verdict, verdict.why)
        self.attempts.append(attempt)
        print(
            f"{what} {number}: {attempt.verdict} ({attempt.tier}): {attempt.why}", file=sys.stderr, flush=True
        )
        path = self.runs.folder / "attempts.json"
        path.write_text(json.dumps([asdict(one) for one in self.attempts], indent=1) + "\n", encoding="utf-8")

    def _harmed(self, harm: Harm, number: int) -> Verdict:
        if harm.tier == "exact":
            job = self._job(f"exact-{number}", number, self.plan.exact_steps, "run.deterministic=true")
            return exact_gate(self.runs.get(job), self.runs.get(harm.applied(job)))
        if harm.tier == "round-off":
            return self._round_off(number, harm, ())
        return self._statistical(
            lambda seed: self._of_seed(seed),
            lambda seed: harm.applied(self._of_seed(seed)),
            # Three fresh seeds for each attempt's first look; further looks draw from the others.
            [1 + (LOOKS[0] * (number - 1) + index) % 16 for index in range(LOOKS[-1])],
        )

    def _round_off(self, number: int, harm: Harm, overrides: Sequence[str]) -> Verdict:
        plain = self._job(f"roundoff-{number}", number, self.plan.roundoff_steps)
        base = replace(harm.setting(plain), probe=True)
        perturbed = [replace(base, name=f"{base.name}-ulp{seed}", perturb_ulp=seed) for seed in range(1, 4)]
        if overrides:
            word = "-".join(overrides).replace("=", "-").replace(".", "-")
            ours = replace(base, name=f"{base.name}-{word}", overrides=(*base.overrides, *overrides))
        else:
            ours = harm.applied(base)
        return round_off_gate(
            self.runs.get(base), self.runs.get(ours), [self.runs.get(job) for job in perturbed]
        )

    def _same_code(self, seeds: Sequence[int]) -> Verdict:
        half = LOOKS[-1]
        partner = dict(zip(seeds[:half], seeds[half:], strict=True))
        # The deviation over seeds is known from the runs of the pool that are no candidate here.
        others = [seed for seed in range(1, self.plan.pool + 1) if seed not in seeds]
        return self._statistical(
            self._of_seed, lambda seed: self._of_seed(partner[seed]), list(seeds[:half]), others
        )

    def _statistical(
        self,
        baseline: Callable[[int], Job],
        candidate: Callable[[int], Job],
        seeds: Sequence[int],
        others: Sequence[int] = (),
    ) -> Verdict:
        more = [self.runs.get(baseline(seed)) for seed in others]
        pairs: list[tuple[Evidence, Evidence]] = []
        verdict = statistical_gate(pairs)
        for look in LOOKS:
            for seed in seeds[len(pairs) : look]:
                pairs.append((self.runs.get(baseline(seed)), self.runs.get(candidate(seed))))
            verdict = statistical_gate(pairs, more_baselines=more)
            if verdict.verdict != "inconclusive":
                break
        return verdict

    def _of_seed(self, seed: int) -> Job:
        job = self._job(f"statistical-{seed}", seed, self.plan.statistical_steps, "training.eval_iters=8")
        return replace(job, overrides=(*job.overrides, f"data.seed={DATA_ORDER}"))

    def _job(self, name: str, seed: int, steps: int, *more: str) -> Job:
        return Job(name, (f"run.seed={seed}", f"training.train_iters={steps}", *more))


def claim(text: str, attempts: Sequence[Attempt], passes: bool, *, target: float, note: str) -> Claim:
    """The share of attempts that went as wanted, over the share that is wanted."""
    wanted = ("pass",) if passes else REJECTIONS
    went = sum(attempt.verdict in wanted for attempt in attempts)
    low, high = wilson(went, len(attempts))
    answers = collections.Counter((attempt.what, attempt.verdict) for attempt in attempts)
    told = "; ".join(f"{what}: {count} {verdict}" for (what, verdict), count in sorted(answers.items()))
    return Claim(
        f"{text}: {went} of {len(attempts)}, over {WANTED_SHARE:.0%}",
        "none",
        "",
        [],
        [],
        went / len(attempts) / WANTED_SHARE,
        low / WANTED_SHARE,
        high / WANTED_SHARE,
        target,
        f"{told}. {note}",
    )


def claims_of(session: Session) -> list[Claim]:
    """Harm rejected, identical code passed, real round-off passed (for information)."""
    plan, note = session.plan, session.runs.note()
    by_kind: dict[str, list[Attempt]] = {"harm": [], "control": [], "same": []}
    for attempt in session.attempts:
        kind = (
            "harm" if attempt.what in HARMS else "control" if attempt.what in ROUND_OFF_CONTROLS else "same"
        )
        by_kind[kind].append(attempt)
    found = [claim("harm that the gate rejects", by_kind["harm"], False, target=1.0, note=note)]
    if by_kind["same"]:
        shared = (
            f"Each attempt draws {2 * LOOKS[-1]} of one pool of {plan.pool} runs, so attempts share runs. "
        )
        found.append(
            claim(
                "identical code with another seed that the gate passes, statistical tier",
                by_kind["same"],
                True,
                target=1.0,
                note=shared + note,
            )
        )
    if by_kind["control"]:
        found.append(
            claim(
                "real round-off changes that the gate passes", by_kind["control"], True, target=0.0, note=note
            )
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="three kinds of harm, one seed, 20 steps")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(__file__).resolve().parent.parent / "runs" / "gate-power",
        help="where its runs are kept (default: runs/gate-power)",
    )
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    plan = QUICK if options.quick else FULL
    session = Session(Runs(options.folder / "quick" if options.quick else options.folder), plan)
    session.run()
    if options.json:
        print(document(claims_of(session)))


if __name__ == "__main__":
    main()
