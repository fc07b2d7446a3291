"""Workload of all operator calls of a preset: as tuned, against one backend wherever it can serve.

The benchmark tunes the preset first, in its own process and environment, into a file of its own; what it times is the
calls of one micro-batch, forward and backward, each with the backend that the file names. Torch is imported when a
workload is built.
"""

import functools
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.sides import Sides

if TYPE_CHECKING:
    from drivetrain.engine.ops_tuning.recording import RecordedCall
    from drivetrain.engine.ops_tuning.session import Settings

__all__ = ["PEERS", "PRESET", "TunedCalls", "preset_workloads", "tuned_against", "tuned_calls"]

PRESET = "llama-10m"
PEERS = ("inductor", "eager")
BUDGET_S = 1200.0
# Evaluation is a few calls in hundreds of steps: it would double what is tuned and change nothing of the figure.
OVERRIDES = ("training.eval_iters=0", "run.device=cpu", "run.num_threads=1")


@dataclass(frozen=True)
class TunedCalls:
    """The calls of a micro-batch.

    Attributes:
        calls: with how often each is made, and the backend that the tuner chose.
    """

    calls: Sequence[tuple["RecordedCall", int, str]]

    def in_words(self) -> str:
        """How many calls each backend serves."""
        counts: dict[str, int] = {}
        for _, times, backend in self.calls:
            counts[backend] = counts.get(backend, 0) + times
        return ", ".join(f"{count} by {name}" for name, count in sorted(counts.items()))


def preset_workloads() -> dict[str, Callable[[], Sides]]:
    """By key, what builds the two sides of a workload."""
    return {f"preset {peer}": lambda peer=peer: tuned_against(peer, _tuned_preset()) for peer in PEERS}  # type: ignore[misc]


@functools.cache
def _tuned_preset() -> TunedCalls:
    from drivetrain.engine.ops_tuning.session import Settings

    return tuned_calls(PRESET, OVERRIDES, Settings(budget_s=BUDGET_S))


def tuned_calls(preset: str, overrides: Sequence[str], settings: "Settings") -> TunedCalls:
    """Tune a preset, and take from the file who serves each of its calls.

    Raises:
        RuntimeError: the budget did not reach all calls, or no backend of one is right.
    """
    from drivetrain.config import load_config
    from drivetrain.config.derive import microbatches_per_rank
    from drivetrain.engine.devices import select_device, thread_count
    from drivetrain.engine.ops.selection import Selection
    from drivetrain.engine.ops.tuned_file import TunedFile, environment_here
    from drivetrain.engine.ops_tuning.recording import packings_of, recorded_as_served
    from drivetrain.engine.ops_tuning.session import tune_configuration

    config = load_config(preset, list(overrides)).config
    device = select_device(config.run)
    with tempfile.TemporaryDirectory(prefix="operators-tuned-") as folder:
        path = Path(folder) / "ops.tuned.toml"
        report = tune_configuration(config, settings, path, progress=_say)
        left = [one for one in report.outcomes if one.status not in ("tuned", "kept")]
        if left:
            raise RuntimeError(f"{preset} was not tuned: {left[0].status} {left[0].call} {left[0].reason}")
        here = environment_here(device, thread_count(config.run, settings.local_processes))
        tuned = TunedFile.read(path, environment=here)
    assert not tuned.problems, tuned.problems

    def chosen(call: "RecordedCall") -> str:
        backend = tuned.backend_for(call.signature)
        assert backend is not None, f"{call.signature} was not tuned"
        choice = Selection(requested={call.operator.name: backend}).choose(call.operator, call.signature)
        return choice.backend.name

    micro_batches = microbatches_per_rank(config, 1)
    calls = recorded_as_served(config, device.type, packings_of(config), chosen)
    return TunedCalls(
        [(call, max(1, round(call.calls_per_step / micro_batches)), chosen(call)) for call in calls]
    )


def tuned_against(peer: str, tuned: TunedCalls, preset: str = PRESET) -> Sides:
    """All calls as tuned, and with the backend ``peer`` wherever it can serve, else eager."""
    from drivetrain.engine.ops_tuning.calling import arguments_on

    given = [arguments_on(call.signature, seed=0) for call, _, _ in tuned.calls]

    def side(choose: Callable[["RecordedCall", str], str]) -> Callable[[], list[Any]]:
        from drivetrain.engine.ops_tuning.calling import forward_and_backward
        from drivetrain.engine.ops_tuning.inputs import main_dtype

        made = [
            (
                forward_and_backward(call.operator, choose(call, backend), arguments),
                times,
                main_dtype(call.signature),
            )
            for (call, times, backend), arguments in zip(tuned.calls, given, strict=True)
        ]

        def once() -> list[Any]:
            results: list[Any] = []
            for call, times, dtype in made:
                for _ in range(times):
                    found = call()
                # Sums that are kept in fp32 differ as the products do that went into them.
                results += [one.to(dtype) for one in found.values() if one.is_floating_point()]
            return results

        return once

    def theirs(call: "RecordedCall", _: str) -> str:
        backend = call.operator.backend(peer)
        return peer if backend is not None and backend.supports(call.signature) is None else "eager"

    count = sum(times for _, times, _ in tuned.calls)
    return Sides(
        name=f"all {count} operator calls of a micro-batch of {preset}",
        ours=side(lambda _, backend: backend),
        theirs=side(theirs),
        target=1.0,
        no_slower=True,
        note=f"forward and backward; as tuned: {tuned.in_words()}",
        peer=f"{peer} wherever it can serve, else eager",
    )


def _say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)
