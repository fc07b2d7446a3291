"""Runs side by side: five dimensions with ratios, and only what differs between configurations and machines.

Says when a comparison is not one: other data, another device, another number of tokens, another rule for
MFU. Whether a difference of loss is more than noise is not decided here (that is the gate's job).
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from drivetrain.archive.account_file import MeanStep, mean_step_of
from drivetrain.archive.dimensions import DIMENSIONS, Figure, RunFigures, figures_of
from drivetrain.archive.encoding import SCHEMA
from drivetrain.archive.reader import Run
from drivetrain.errors import DrivetrainError, RunError

__all__ = ["Comparison", "compare_runs", "ratio"]

# What differs between any two runs, or follows from the configuration, is no difference worth a line.
_IDENTITY = ("command", "working_directory", "git.untracked", "git.untracked_count", "git.reason")
_RULES = ("flops_rule", "token_rule", "peak_source")


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Runs and what tells them apart; every sequence is in the order of the runs.

    Attributes:
        runs: at least two; the first is the reference.
        statuses: derived status of each.
        figures: the five dimensions of each.
        configuration: leaf to its values, for leaves that differ.
        environment: dotted provenance key to its values, for keys that differ.
        fingerprints: of the data sets.
        accounts: mean step of the newest profiled window of each run; None where there is none.
        warnings: why (a part of) the comparison does not hold.
    """

    runs: tuple[Run, ...]
    statuses: tuple[str, ...]
    figures: tuple[RunFigures, ...]
    configuration: Mapping[str, tuple[Any, ...]]
    environment: Mapping[str, tuple[Any, ...]]
    fingerprints: tuple[str | None, ...]
    warnings: tuple[str, ...]
    accounts: tuple[MeanStep | None, ...] = ()

    def account_rows(self) -> Iterator[tuple[str, tuple[float | None, ...]]]:
        """Each class that any account holds with its ns in the mean step of each run, then the whole step."""
        known = [account for account in self.accounts if account is not None]
        for name in dict.fromkeys(name for account in known for name in account.classes):
            values = tuple(None if one is None else one.classes.get(name, 0.0) for one in self.accounts)
            if any(values):
                yield name, values
        if known:
            yield "step", tuple(None if one is None else one.window_ns for one in self.accounts)

    def rows(self) -> Iterator[tuple[Figure, tuple[float | None, ...], tuple[float | None, ...]]]:
        """Each figure with its values and their ratios to the first run's."""
        for figure in DIMENSIONS:
            values = tuple(one.values[figure.key] for one in self.figures)
            yield figure, values, tuple(ratio(value, values[0]) for value in values)

    def document(self) -> dict[str, Any]:
        """The comparison as JSON."""
        return {
            "schema": SCHEMA,
            "runs": [
                {
                    "run": str(run.path),
                    "id": run.id,
                    "name": run.name,
                    "status": status,
                    "source": figures.source,
                    "partial": figures.partial,
                    "tokens": figures.tokens,
                    "reasons": dict(figures.reasons),
                }
                for run, status, figures in zip(self.runs, self.statuses, self.figures, strict=True)
            ],
            "dimensions": [
                {
                    "dimension": figure.dimension,
                    "key": figure.key,
                    "unit": figure.unit,
                    "better": figure.better,
                    "values": list(values),
                    "ratios": list(ratios),
                }
                for figure, values, ratios in self.rows()
            ],
            "account_ns": {name: list(values) for name, values in self.account_rows()},
            "configuration": {leaf: list(values) for leaf, values in self.configuration.items()},
            "environment": {key: list(values) for key, values in self.environment.items()},
            "dataset": {
                "same": _same_dataset(self.fingerprints),
                "fingerprints": list(self.fingerprints),
            },
            "warnings": list(self.warnings),
        }


def ratio(value: float | None, reference: float | None) -> float | None:
    """``value / reference``; None where it has no meaning (unknown, not finite, or a reference of zero)."""
    if value is None or not reference or not math.isfinite(value) or not math.isfinite(reference):
        return None
    return value / reference


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compare ``runs`` with the first of them.

    Raises:
        RunError: fewer than two, or one of them is damaged.
    """
    if len(runs) < 2:
        raise RunError(
            "compare needs at least two runs, for example: drivetrain compare latest llama-10m-3f2a"
        )
    figures = tuple(figures_of(run) for run in runs)
    statuses = tuple(run.status() for run in runs)
    warnings: list[str] = []
    configuration = _configuration(runs, warnings)
    manifests = [dict(_flat(_environment_of(run))) for run in runs]
    keys = dict.fromkeys(key for manifest in manifests for key in manifest)
    environment = {key: tuple(manifest.get(key) for manifest in manifests) for key in keys}
    fingerprints = tuple(run.manifest["dataset"].get("fingerprint") for run in runs)
    warnings += _reservations(runs, statuses, figures, fingerprints)
    accounts = tuple(mean_step_of(run.path) for run in runs)
    tables = {account.name_table for account in accounts if account is not None and account.name_table}
    if len(tables) > 1:
        warnings.append(
            f"accounts are not comparable by class: other name tables ({', '.join(sorted(tables))})"
        )
    return Comparison(
        runs=tuple(runs),
        statuses=statuses,
        figures=figures,
        configuration=configuration,
        environment={key: values for key, values in environment.items() if not _all_equal(values)},
        fingerprints=fingerprints,
        warnings=tuple(warnings),
        accounts=accounts,
    )


def _all_equal(values: Sequence[Any]) -> bool:
    return all(value == values[0] for value in values)


def _same_dataset(fingerprints: Sequence[str | None]) -> bool | None:
    return None if None in fingerprints else _all_equal(fingerprints)


def _environment_of(run: Run) -> dict[str, Any]:
    return {
        **run.manifest["provenance"],
        "devices": run.manifest["devices"],
        "layout": run.manifest["layout"],
    }


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, item in value.items():
        path = f"{prefix}{key}"
        if path in _IDENTITY:
            continue
        if isinstance(item, Mapping):
            yield from _flat(item, f"{path}.")
        else:
            yield path, item


def _configuration(runs: Sequence[Run], warnings: list[str]) -> dict[str, tuple[Any, ...]]:
    from drivetrain.config import differing_leaves

    try:
        configs = [run.config() for run in runs]
    except DrivetrainError as error:
        # A configuration of another version: its figures can still be compared.
        warnings.append(f"configurations are not compared: {error}")
        return {}
    leaves: dict[str, None] = {}
    for config in configs[1:]:
        leaves |= dict.fromkeys(differing_leaves(configs[0], config))

    def value(config: Any, leaf: str) -> Any:
        for part in leaf.split("."):
            config = getattr(config, part)
        return config

    return {leaf: tuple(value(config, leaf) for config in configs) for leaf in leaves}


def _reservations(
    runs: Sequence[Run],
    statuses: Sequence[str],
    figures: Sequence[RunFigures],
    fingerprints: Sequence[str | None],
) -> Iterator[str]:
    for run, status, figure in zip(runs, statuses, figures, strict=True):
        if any(event["kind"] == "data_accepted" for event in run.events()):
            yield f"{run.path.name} went on with other data than it was started with"
        if figure.partial:
            origin = "the logged steps" if figure.source == "metrics" else "the summary of what it did"
            yield f"{run.path.name} is {status}: its figures are partial, from {origin}"
    if _same_dataset(fingerprints) is None:
        yield "not comparable in convergence: a run has no dataset fingerprint"
    elif not _all_equal(fingerprints):
        yield "not comparable in convergence: the runs were trained on different data"
    devices = [_device(run) for run in runs]
    if not _all_equal(devices):
        yield f"not comparable in speed: different devices ({', '.join(dict.fromkeys(devices))})"
    tokens = [figure.tokens for figure in figures]
    if None in tokens:
        yield "not comparable in convergence: the number of tokens of a run is not known"
    elif not _all_equal(tokens):
        amounts = ", ".join(f"{count:,}" for count in tokens)
        yield f"not comparable in convergence: the runs saw different numbers of tokens ({amounts})"
    rules = [(run.summary() or {}).get("mfu_rule") or {} for run in runs]
    for rule in _RULES:
        stated = {str(each[rule]) for each in rules if each.get(rule) is not None}
        if len(stated) > 1:
            yield f"MFU is not comparable: different {rule} ({'; '.join(sorted(stated))})"


def _device(run: Run) -> str:
    devices = run.manifest["devices"]
    return f"{devices.get('count')} x {devices.get('name') or devices.get('type')}"
