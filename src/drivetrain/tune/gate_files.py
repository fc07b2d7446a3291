"""Runs on disk as the gate's evidence."""

import json
import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drivetrain.archive.encoding import read_document
from drivetrain.archive.reader import Run
from drivetrain.config import RunConfig, data_seed
from drivetrain.errors import RunError
from drivetrain.tune.gate import End, Evidence, Leak, Point

__all__ = ["ENVIRONMENT_OF_LEAF", "epsilon_of", "read_evidence", "read_gradients"]

_EPSILON = {"fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10, "fp8": 2.0**-3}
"""Distance from 1 to the next number of the compute dtype (fp8: e4m3)."""

ENVIRONMENT_OF_LEAF: Mapping[str, str] = {
    "precision.params_dtype": "dtype",
    "run.num_threads": "threads",
    "run.device": "device",
    "parallelism.data_parallel_size": "world size",
    "parallelism.tensor_model_parallel_size": "world size",
    "parallelism.pipeline_model_parallel_size": "world size",
}
"""Leaves that are part of the environment's fingerprint: where one of them is the change, it is no reason to refuse."""


def read_evidence(run: Run, *, changed: Collection[str] = ()) -> Evidence:
    """What the gate knows of ``run``.

    Args:
        changed: leaves that the change under test is allowed to change in the environment.

    Raises:
        RunError: a damaged run, or one that did not log each step.
    """
    config = run.config()
    end, reason = _end(run)
    if config.monitor.log_interval != 1:
        raise RunError(
            f"{run.path.name} logged every {config.monitor.log_interval} steps; the gate compares each step: train "
            "with monitor.log_interval=1"
        )
    points = tuple(
        Point(int(line["progress/tokens"]), line["train/loss"], _number(line["train/grad_norm"]))
        for line in run.metrics()
    )
    held_out = _held_out(run, int(run.metrics()[-1]["step"])) if points else None
    gradients = run.path / "probe" / "gradients.safetensors"
    environment = _environment(run, config)
    for leaf in changed:
        environment.pop(ENVIRONMENT_OF_LEAF.get(leaf, ""), None)
    return Evidence(
        name=run.path.name,
        end=end,
        reason=reason,
        points=points,
        environment=environment,
        dataset=_dataset(run),
        seed=config.run.seed,
        data_seed=data_seed(config),
        deterministic=config.run.deterministic,
        epsilon=epsilon_of(config),
        leak=_leak(run.path / "probe" / "leak.json"),
        gradients=(lambda: read_gradients(gradients)) if gradients.is_file() else None,
        held_out=None if held_out is None else held_out.get("loss"),
        held_out_tokens=None if held_out is None else held_out.get("tokens"),
    )


def _dataset(run: Run) -> str | None:
    """Of the documents that training saw; of the corpus, where the run does not say what a transform made of it."""
    dataset = run.manifest["dataset"]
    found: str | None = dataset.get("identity") or dataset.get("fingerprint")
    return found


def epsilon_of(config: RunConfig) -> float:
    """Distance from 1 to the next number of the compute dtype."""
    return _EPSILON[config.precision.params_dtype]


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _end(run: Run) -> tuple[End, str]:
    status = run.status()
    reason = str((run.end() or {}).get("reason") or "")
    if status == "finished":
        return "finished", ""
    if status == "failed":
        diverged = (run.summary() or {}).get("status") == "diverged"
        return ("diverged" if diverged else "failed"), reason
    return "unfinished", f"it is {status}"


def _environment(run: Run, config: RunConfig) -> dict[str, str]:
    provenance = run.manifest["provenance"]
    packages = provenance.get("packages") or {}
    starts = [event for event in run.events() if event["kind"] in ("start", "resume")]
    return {
        "torch": str(packages.get("torch")),
        "python": str((provenance.get("python") or {}).get("version")),
        "drivetrain": str(packages.get("drivetrain")),
        "device": str(run.manifest["devices"].get("name") or run.manifest["devices"].get("type")),
        "threads": str(starts[-1].get("threads")) if starts else "unknown",
        "world size": str(run.manifest["layout"].get("world_size")),
        "dtype": config.precision.params_dtype,
    }


def _leak(path: Path) -> Leak | None:
    try:
        document = read_document(path)
    except FileNotFoundError:
        return None
    if not {"verdict", "why"} <= document.keys():
        raise RunError(f"{path} is damaged: a verdict and a reason are expected")
    return Leak(str(document["verdict"]), str(document["why"]))


def _held_out(run: Run, last_step: int) -> Mapping[str, Any] | None:
    """The evaluation after the last step."""
    found = [
        event for event in run.events() if event["kind"] == "evaluation" and event.get("step") == last_step
    ]
    return found[-1] if found else None


def read_gradients(path: Path) -> dict[str, NDArray[np.float32]]:
    """The fp32 tensors of a safetensors file by name, mapped, not read: without torch.

    The format: 8 bytes little-endian length of a JSON header ``{name: {dtype, shape, data_offsets}}``, then the data.

    Raises:
        RunError: the file is damaged or holds another dtype.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)
        found = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "F32":
                raise RunError(f"{path}: {name} is {entry['dtype']}, gradients are fp32")
            first, last = entry["data_offsets"]
            found[name] = data[first:last].view(np.float32).reshape(entry["shape"])
    except RunError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise RunError(f"{path} is damaged: {error}; train the run again with --probe") from error
    return found
