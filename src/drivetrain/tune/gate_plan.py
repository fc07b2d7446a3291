"""The runs that the gate needs, the ones there are, and the commands for the rest."""

import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.archive.listing import list_runs
from drivetrain.archive.origin import IDENTITY_LEAVES, RunOrigin
from drivetrain.archive.provenance import collect
from drivetrain.archive.reader import Run
from drivetrain.config import RunConfig, data_seed, leaf_values, load_config
from drivetrain.errors import DrivetrainError

__all__ = ["Need", "Pool", "code_of", "differing_code", "this_code"]


@dataclass(frozen=True)
class Need:
    """One run: a configuration with overrides, and what it must have been started with.

    Attributes:
        role: ``baseline``, ``candidate``, ``perturbed baseline 1``, ...
        source: file of the configuration.
        overrides: on top of it.
        probe: ``--probe``.
        perturb_ulp: seed of ``--perturb-ulp``; None: weights as they are.
        world_size: processes.
    """

    role: str
    source: Path
    overrides: tuple[str, ...]
    probe: bool = False
    perturb_ulp: int | None = None
    world_size: int = 1

    def config(self) -> RunConfig:
        """Resolved. Raises ConfigurationError where it is illegal."""
        return load_config(str(self.source), self.overrides).config

    def options(self) -> list[str]:
        """Of ``drivetrain train``."""
        options = ["--probe"] if self.probe else []
        return options if self.perturb_ulp is None else [*options, "--perturb-ulp", str(self.perturb_ulp)]

    def command(self) -> str:
        """The command line that makes it."""
        words = ["drivetrain", "train", str(self.source), *self.overrides, *self.options()]
        if self.world_size > 1:
            words += ["--nproc", str(self.world_size)]
        return shlex.join(words)


def code_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What decides a run's numbers beside its configuration: versions, processor, and the code itself.

    Of the code it is the commit and the difference from it; modules that git does not track are not seen.
    """
    provenance = manifest["provenance"]
    git = provenance.get("git") or {}
    return {
        "packages": provenance.get("packages"),
        "python": provenance.get("python"),
        "cpu": provenance.get("cpu"),
        "commit": git.get("commit"),
        "diff": git.get("diff_sha256"),
    }


def this_code() -> dict[str, Any]:
    """:func:`code_of` of a run that this process would start now."""
    return code_of({"provenance": collect([], Path(__file__).parent)})


def differing_code(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """In what two :func:`code_of` differ, in words; None where they are equal."""
    differing = [key for key in one if one[key] != other.get(key)]
    if not differing:
        return None
    words = {"diff": "uncommitted changes", "cpu": "processor", "python": "Python"}
    commits = " and ".join(str(code["commit"])[:9] for code in (one, other))
    return ", ".join(f"commit {commits}" if key == "commit" else words.get(key, key) for key in differing)


@dataclass(frozen=True)
class _Entry:
    run: Run
    leaves: Mapping[str, Any]
    origin: RunOrigin
    world_size: int


@dataclass
class Pool:
    """Runs that may serve as evidence.

    Args:
        first: preferred to others, in this order.
        folders: whose runs are looked at.
        code: where given, only runs of this code and environment count.
    """

    first: Sequence[Run] = ()
    folders: Iterable[Path] = ()
    code: Mapping[str, Any] | None = None
    _entries: list[_Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        seen = set()
        others = [run for folder in self.folders for run in list_runs(folder, on_fault=lambda _: None)]
        for run in (*self.first, *others):
            if run.path.resolve() not in seen:
                seen.add(run.path.resolve())
                self.add(run)

    def add(self, run: Run) -> None:
        """One more; a run whose configuration this version cannot read is nobody's companion."""
        try:
            config = run.config()
        except DrivetrainError:
            return
        size = int(run.manifest["layout"].get("world_size") or 1)
        self._entries.append(_Entry(run, _leaves(config), RunOrigin.from_manifest(run.manifest), size))

    def find(self, need: Need, *, without: Collection[Path] = ()) -> Run | None:
        """A run that is exactly that, and came to an end that says something: finished, or diverged.

        Args:
            without: paths of runs that are not meant.
        """
        return next(
            (
                entry.run
                for entry in self._like(need)
                if entry.run.path not in without and entry.origin.perturb_ulp == need.perturb_ulp
            ),
            None,
        )

    def perturbations(self, need: Need) -> list[int]:
        """Seeds by which runs like ``need`` were perturbed."""
        found = (entry.origin.perturb_ulp for entry in self._like(need))
        return sorted({seed for seed in found if seed is not None})

    def seeds(self, need: Need) -> set[int]:
        """``run.seed`` of runs that are ``need`` but for it."""
        return {
            entry.leaves["run.seed"]
            for entry in self._like(need, any_seed=True)
            if entry.origin.perturb_ulp is None
        }

    def _like(self, need: Need, *, any_seed: bool = False) -> Iterator[_Entry]:
        """Usable runs of the configuration, world size and probe of ``need``, perturbed or not.

        Args:
            any_seed: whatever their ``run.seed``.
        """
        free: dict[str, Any] = {"run.seed": None} if any_seed else {}
        wanted = _leaves(need.config()) | free
        for entry in self._entries:
            if (
                {**entry.leaves, **free} == wanted
                and entry.world_size == need.world_size
                and (entry.origin.probe or not need.probe)
                and self._usable(entry.run)
            ):
                yield entry

    def _usable(self, run: Run) -> bool:
        if self.code is not None and code_of(run.manifest) != self.code:
            return False
        status = run.status()
        return status == "finished" or (
            status == "failed" and (run.summary() or {}).get("status") == "diverged"
        )


def _leaves(config: RunConfig) -> dict[str, Any]:
    """Every leaf but the identity, the data order by its effective seed."""
    values = {leaf.path: value for leaf, value in leaf_values(config) if leaf.path not in IDENTITY_LEAVES}
    return values | {"data.seed": data_seed(config)}
