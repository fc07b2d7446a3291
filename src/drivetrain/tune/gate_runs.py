"""The gate over runs: it finds the runs a tier needs, has the missing ones made, and decides by the tier's rule."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from drivetrain.archive.reader import Run, open_run
from drivetrain.config import RunConfig, data_seed, load_config, tokens_per_step
from drivetrain.config.serialise import differing_leaves
from drivetrain.errors import DrivetrainError, RunError
from drivetrain.tune.gate import Evidence, Tier, Verdict, refusal, with_leak_probe
from drivetrain.tune.gate_change import change_of, tier_of_change
from drivetrain.tune.gate_exact import LEAST_STEPS as EXACT_LEAST
from drivetrain.tune.gate_exact import exact_gate
from drivetrain.tune.gate_files import read_evidence
from drivetrain.tune.gate_plan import Need, Pool, code_of, differing_code, this_code
from drivetrain.tune.gate_roundoff import LEAST_PERTURBATIONS, round_off_gate
from drivetrain.tune.gate_roundoff import LEAST_STEPS as ROUNDOFF_LEAST
from drivetrain.tune.gate_statistical import LOOKS, statistical_gate
from drivetrain.tune.short_run import as_override, short_run
from drivetrain.tune.trainer import Trainer

__all__ = ["GateSettings", "gate_of_runs", "run_gate"]

_LEAST_STATISTICAL_STEPS = 5
"""So that the last 20% of the tokens is a step."""


@dataclass(frozen=True)
class GateSettings:
    """How much the gate spends.

    Attributes:
        exact_steps, roundoff_steps, statistical_steps: steps of the runs it makes; of a statistical candidate of
            another batch, as many as give equal tokens.
        perturbations: perturbed baselines that make the envelope.
        looks: declared numbers of pairs of the statistical tier.
        eval_iters: global batches of held-out text of the baseline, statistical tier only.
        world_size: processes of each run.
        timeout_s: longest time a run may take; None: as long as it makes progress.
    """

    exact_steps: int = 20
    roundoff_steps: int = 100
    statistical_steps: int = 200
    perturbations: int = 3
    looks: tuple[int, ...] = LOOKS
    eval_iters: int = 8
    world_size: int = 1
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Raise DrivetrainError where no answer but ``inconclusive`` could come of it."""
        least = {
            "exact_steps": EXACT_LEAST,
            "roundoff_steps": ROUNDOFF_LEAST,
            "statistical_steps": _LEAST_STATISTICAL_STEPS,
            "perturbations": LEAST_PERTURBATIONS,
            "eval_iters": 1,
        }
        for name, limit in least.items():
            if getattr(self, name) < limit:
                raise DrivetrainError(
                    f"the gate's {name} = {getattr(self, name)} decides nothing; at least {limit}"
                )
        looks = self.looks
        if not looks or looks[0] < 2 or any(one >= two for one, two in pairwise(looks)):
            raise DrivetrainError(f"the gate's looks = {looks} must increase, from at least 2 pairs on")


class _Stop(Exception):
    """The gate is decided by a run that could not be made."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.why)
        self.verdict = verdict


@dataclass
class _Bench:
    """Gives the evidence of each run that is needed: found, made, or noted as missing.

    A run is evidence of one side only: where both have the same configuration, a run compared with itself says nothing.

    Attributes:
        no_training: why this code cannot make companions; None: it can, where there is a trainer.
    """

    tier: Tier
    pool: Pool
    trainer: Trainer | None
    changed: Collection[str]
    timeout_s: float | None
    progress: Callable[[str], None]
    missing: dict[str, str]
    side_of_run: dict[Path, str]
    no_training: str | None = None

    def get(self, need: Need) -> Evidence | None:
        """None: it is missing, and no trainer is there to make it; :attr:`missing` has the command."""
        side = "candidate" if need.role.startswith("candidate") else "baseline"
        run = self.pool.find(
            need, without=[path for path, owner in self.side_of_run.items() if owner != side]
        )
        if run is None:
            if self.trainer is None or self.no_training is not None:
                self.missing[need.role] = need.command()
                return None
            run = self._make(need, self.trainer)
        self.side_of_run[run.path] = side
        return read_evidence(run, changed=() if self.tier == "exact" else self.changed)

    def _make(self, need: Need, trainer: Trainer) -> Run:
        self.progress(f"gate, {self.tier}: training the {need.role}")
        attempt = trainer.train(
            need.source,
            need.overrides,
            options=need.options(),
            world_size=need.world_size,
            timeout_s=self.timeout_s,
        )
        if attempt.outcome == "interrupted":
            raise KeyboardInterrupt
        if attempt.outcome not in ("finished", "diverged") or attempt.run is None:
            answer: Literal["fail", "not comparable"] = (
                "fail" if need.role.startswith("candidate") else "not comparable"
            )
            why = f"the {need.role} ended as {attempt.outcome}: {attempt.message}"
            raise _Stop(Verdict(self.tier, answer, why))
        run = open_run(attempt.run)
        self.pool.add(run)
        return run


@dataclass(frozen=True)
class _Side:
    """Baseline or candidate: where its configuration is, and what is laid over it in every run of the gate."""

    source: Path
    overrides: tuple[str, ...]
    seed: int
    world_size: int

    def need(
        self,
        role: str,
        *more: str,
        probe: bool = False,
        perturb_ulp: int | None = None,
    ) -> Need:
        return Need(role, self.source, (*self.overrides, *more), probe, perturb_ulp, self.world_size)

    def of_seed(self, role: str, seed: int, *, probe: bool = False) -> Need:
        """With other initial weights, where it is not its own seed."""
        return self.need(role, *(() if seed == self.seed else (f"run.seed={seed}",)), probe=probe)


def run_gate(
    baseline: Path,
    candidate: Path,
    tier: Tier,
    *,
    trainer: Trainer,
    folder: Path,
    settings: GateSettings = GateSettings(),
    world_sizes: tuple[int, int] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Train what the tier needs of two configurations, and decide.

    Args:
        baseline, candidate: TOML files.
        tier: what the change claims of the numbers; a bundle of changes is statistical, unless it claims less.
        folder: where its runs go. Runs there that came to an end with the same resolved configuration, options, code
            and environment are taken as they are, so that an interrupted gate goes on where it was.
        world_sizes: processes of the baseline's runs and of the candidate's, where the layout is what changes; None:
            both have those of ``settings``.
        progress: told before each run.

    Raises:
        DrivetrainError: a configuration that cannot be read.
        KeyboardInterrupt: a run was interrupted; what was finished stays.
    """
    configs = load_config(str(baseline)).config, load_config(str(candidate)).config
    steps, eval_iters = _lengths(tier, configs, settings)
    sizes = world_sizes or (settings.world_size, settings.world_size)
    changed = set(differing_leaves(*configs))
    if sizes[0] != sizes[1]:
        # Fewer processes share the same cores: where nobody says how many threads they have, that follows.
        changed |= {"run.num_threads", "parallelism.data_parallel_size"}
    sides = [
        _Side(
            source,
            (
                *short_run(config, count),
                *([f"training.eval_iters={evaluations}"] if tier == "statistical" else []),
                *(["run.deterministic=true"] if tier == "exact" else []),
                f"data.seed={data_seed(configs[0])}",
                as_override("run.runs_dir", str(folder)),
                "run.name=gate",
            ),
            config.run.seed,
            size,
        )
        for source, config, count, evaluations, size in zip(
            (baseline, candidate), configs, steps, eval_iters, sizes, strict=True
        )
    ]
    bench = _Bench(
        tier=tier,
        pool=Pool(folders=[folder], code=this_code()),
        trainer=trainer,
        changed=changed,
        timeout_s=settings.timeout_s,
        progress=progress,
        missing={},
        side_of_run={},
    )
    return _decide(bench, sides[0], sides[1], settings)


def _lengths(
    tier: Tier, configs: tuple[RunConfig, RunConfig], settings: GateSettings
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Steps and evaluation batches of both sides: equal tokens in the statistical tier, equal steps elsewhere."""
    if tier != "statistical":
        steps = settings.exact_steps if tier == "exact" else settings.roundoff_steps
        return (steps, steps), (0, 0)
    sizes = [tokens_per_step(config) for config in configs]
    total = settings.statistical_steps * sizes[0]
    # Held-out text is read in global batches: a common multiple, so that both sides are judged on the same text.
    common = math.lcm(*sizes)
    rounds = -(-settings.eval_iters * sizes[0] // common)
    return (
        (settings.statistical_steps, -(-total // sizes[1])),
        (rounds * common // sizes[0], rounds * common // sizes[1]),
    )


def gate_of_runs(
    baseline: Run,
    candidate: Run,
    *,
    tier: Tier | None = None,
    trainer: Trainer | None = None,
    settings: GateSettings = GateSettings(),
    progress: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Judge two runs as they are, with companions (perturbed baselines, other seeds) from the folders they lie in.

    Args:
        tier: declared; None: by what the change claims in the catalogue.
        trainer: makes missing companions, beside the run they belong to; None: they are named, and without them the
            answer is ``inconclusive``. Companions are of the code of both runs, so there are none where the two are
            of different code, and none are made where this code is another.
    """
    try:
        change = change_of(baseline, candidate)
        configs = baseline.config(), candidate.config()
        chosen, reason = (tier, "declared") if tier is not None else tier_of_change(change, configs)
        changed = () if chosen == "exact" else tuple(change)
        pair = [read_evidence(run, changed=changed) for run in (baseline, candidate)]
    except RunError as error:
        return Verdict(tier, "not comparable", str(error))
    refused = refusal(chosen, *pair)
    if refused is None:
        refused = _without_companions(chosen, pair[0], pair[1], settings)
    if refused is None:
        codes = [code_of(run.manifest) for run in (baseline, candidate)]
        same = codes[0] == codes[1]
        folders = dict.fromkeys([baseline.path.parent, candidate.path.parent])
        bench = _Bench(
            tier=chosen,
            pool=Pool(
                first=[baseline, candidate],
                folders=folders if same else (),
                code=codes[0] if same else None,
            ),
            trainer=trainer,
            changed=changed,
            timeout_s=settings.timeout_s,
            progress=progress,
            missing={},
            side_of_run={baseline.path: "baseline", candidate.path: "candidate"},
            no_training=_why_no_training(codes[0], codes[1]),
        )
        order = pair[0].data_seed
        refused = _decide(
            bench, _side_of(baseline, chosen, order), _side_of(candidate, chosen, order), settings
        )
    return Verdict(
        refused.tier, refused.verdict, refused.why, {**refused.numbers, "change": change, "tier_rule": reason}
    )


def _without_companions(
    tier: Tier, baseline: Evidence, candidate: Evidence, settings: GateSettings
) -> Verdict | None:
    """What two runs decide by themselves; None where companions are needed."""
    early, least = None, 0
    if tier == "exact":
        least = settings.exact_steps
        if baseline.deterministic and candidate.deterministic:
            early = exact_gate(baseline, candidate, least_steps=least)
    elif tier == "round-off":
        least = ROUNDOFF_LEAST
        early = round_off_gate(baseline, candidate, [], perturbations=settings.perturbations)
    if early is not None and early.verdict in ("fail", "not comparable"):
        return early
    steps = min(len(run.points) for run in (baseline, candidate))
    if steps >= least:
        return None
    # Companions are as long as the runs they belong to.
    why = f"the runs have {steps} steps in common, at least {least} are needed: train longer ones"
    return Verdict(tier, "inconclusive", why, {"steps": steps})


def _why_no_training(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> str | None:
    """Why a run made by this code is no companion of two runs of these codes; None where it is."""
    difference = differing_code(baseline, candidate)
    if difference is not None:
        return (
            f"the two runs are of different code ({difference}), and no run is a companion of both; train both again "
            "with one code"
        )
    difference = differing_code(baseline, this_code())
    if difference is not None:
        return f"the runs are of other code than this ({difference}, theirs first)"
    return None


def _side_of(run: Run, tier: Tier, data_order: int) -> _Side:
    config = run.config()
    overrides = [as_override("run.runs_dir", str(run.path.parent)), as_override("run.name", run.name)]
    if tier == "exact" and not config.run.deterministic:
        overrides.append("run.deterministic=true")
    if tier == "statistical" and config.data.seed is None:
        overrides.append(f"data.seed={data_order}")
    size = int(run.manifest["layout"].get("world_size") or 1)
    return _Side(run.path / "config.toml", tuple(overrides), config.run.seed, size)


def _decide(bench: _Bench, baseline: _Side, candidate: _Side, settings: GateSettings) -> Verdict:
    try:
        if bench.tier == "exact":
            verdict = _exact(bench, baseline, candidate, settings)
        elif bench.tier == "round-off":
            verdict = _round_off(bench, baseline, candidate, settings)
        else:
            verdict = _statistical(bench, baseline, candidate, settings)
    except _Stop as stop:
        return stop.verdict
    if verdict.verdict == "inconclusive" and bench.missing:
        commands = "; ".join(f"{role}: {command}" for role, command in bench.missing.items())
        numbers = {**verdict.numbers, "missing": dict(bench.missing)}
        if bench.no_training is None:
            why = f"runs are missing, --run-missing makes them, or: {commands}"
        elif bench.pool.code is not None:
            why = f"runs are missing that cannot be made here: {bench.no_training}; with theirs: {commands}"
        else:
            # No command makes what would be accepted.
            del numbers["missing"]
            why = f"runs are missing that cannot be made: {', '.join(bench.missing)}; {bench.no_training}"
        why = f"{verdict.why}; {why}" if verdict.why else why
        return Verdict(bench.tier, "inconclusive", why, numbers)
    return verdict


def _missing(bench: _Bench) -> Verdict:
    return Verdict(bench.tier, "inconclusive", "")


def _exact(bench: _Bench, baseline: _Side, candidate: _Side, settings: GateSettings) -> Verdict:
    base = bench.get(baseline.need("baseline", probe=True))
    ours = bench.get(candidate.need("candidate", probe=True))
    if base is None or ours is None:
        return _missing(bench)
    return exact_gate(base, ours, least_steps=settings.exact_steps)


def _round_off(bench: _Bench, baseline: _Side, candidate: _Side, settings: GateSettings) -> Verdict:
    base = bench.get(baseline.need("baseline", probe=True))
    ours = bench.get(candidate.need("candidate", probe=True))
    if base is not None and ours is not None:
        # What needs no envelope is decided before one is made.
        early = round_off_gate(base, ours, [], perturbations=settings.perturbations)
        if early.verdict != "inconclusive":
            return early
    need = baseline.need("perturbed baseline", probe=True)
    seeds = bench.pool.perturbations(need)
    unused = (seed for seed in range(1, 10**9) if seed not in set(seeds))
    while len(seeds) < settings.perturbations:
        seeds.append(next(unused))
    perturbed = [
        bench.get(baseline.need(f"perturbed baseline {number}", probe=True, perturb_ulp=seed))
        for number, seed in enumerate(seeds, 1)
    ]
    there = [run for run in perturbed if run is not None]
    if base is None or ours is None:
        return _missing(bench)
    return round_off_gate(base, ours, there, perturbations=settings.perturbations)


def _statistical(bench: _Bench, baseline: _Side, candidate: _Side, settings: GateSettings) -> Verdict:
    seeds = _seeds(bench, baseline, candidate, settings.looks[-1])
    pairs: list[tuple[Evidence, Evidence]] = []
    verdict = _missing(bench)
    for look in settings.looks:
        complete = True
        for number in range(len(pairs), look):
            seed = seeds[number]
            base = bench.get(baseline.of_seed(f"baseline of seed {seed}", seed, probe=number == 0))
            ours = bench.get(candidate.of_seed(f"candidate of seed {seed}", seed, probe=number == 0))
            if base is None or ours is None:
                complete = False
            elif complete:
                unclean = _unclean(base, ours) if number == 0 else None
                if unclean is not None:
                    return unclean
                pairs.append((base, ours))
        more = _more_baselines(bench, baseline, seeds[: len(pairs)])
        if not complete:
            return statistical_gate(pairs, looks=settings.looks, more_baselines=more) if pairs else verdict
        verdict = statistical_gate(pairs, looks=settings.looks, more_baselines=more)
        if verdict.verdict != "inconclusive" or "look" not in verdict.numbers:
            return verdict
    return verdict


def _unclean(baseline: Evidence, candidate: Evidence) -> Verdict | None:
    """Why no further pair can make the first one pass: how it ended, or its leak probe; None where it is clean."""
    found = refusal("statistical", baseline, candidate)
    if found is None:
        passing = Verdict("statistical", "pass", "no losses were compared yet")
        found = with_leak_probe(passing, (baseline, candidate))
    return None if found.passed else found


def _more_baselines(bench: _Bench, baseline: _Side, used: Sequence[int]) -> list[Evidence]:
    """Runs of the baseline with seeds that are in no pair: they are there, and tell how far seeds scatter."""
    found = []
    for seed in sorted(bench.pool.seeds(baseline.need("")) - set(used)):
        run = bench.pool.find(baseline.of_seed("baseline", seed))
        if run is not None:
            found.append(read_evidence(run, changed=bench.changed))
    return found


def _seeds(bench: _Bench, baseline: _Side, candidate: _Side, count: int) -> Sequence[int]:
    """The baseline's own seed, then those that both sides have runs of, then the next ones."""
    have = bench.pool.seeds(baseline.need("")) & bench.pool.seeds(candidate.need(""))
    found = dict.fromkeys((baseline.seed, *sorted(have)))
    following = baseline.seed
    while len(found) < count:
        following += 1
        found[following] = None
    return list(found)[:count]
