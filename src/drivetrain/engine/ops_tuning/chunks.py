"""How many chunks are best for each product of a tensor-parallel layer: timed on all ranks, on the link that is there.

Every rank of the run takes part. Each round calls a product with every number of chunks, another first each time,
forward and backward, and its time is that of the slowest rank, so that all ranks have the same figures. One piece,
which is the plain way, is always among the candidates and is what the others have to beat for certain: on a loopback
communication is work for the same cores, and nothing is hidden.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from drivetrain.config import RunConfig
from drivetrain.engine.devices import Device
from drivetrain.engine.model.linear import Linear
from drivetrain.engine.ops._operator_code import module_of, operator_code
from drivetrain.engine.ops._tuned_environment import differences, environment_here
from drivetrain.engine.ops.tuned_file import Candidate, Entry
from drivetrain.engine.ops_tuning.choice import LEAST_GAIN, decide, least_and_spread
from drivetrain.engine.ops_tuning.session import Outcome, Report
from drivetrain.engine.ops_tuning.timing import LEAST_ROUNDS, MOST_ROUNDS
from drivetrain.engine.ops_tuning.writing import held_entries, merge_tuned, read_tuned
from drivetrain.engine.parallel.chunk_calls import OPERATOR, ChunkCall, chunk_calls, link_text
from drivetrain.engine.parallel.collectives import Group, copied, gathered
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.engine.parallel.tensor_parallel import RowParallelLinear
from drivetrain.engine.parallel.tensor_parallel_overlap import ColumnParallelLinears
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.precision import compute_dtype
from drivetrain.errors import DrivetrainError

__all__ = ["CANDIDATES", "tune_chunks"]

CANDIDATES = (1, 2, 4, 8, 16, 32)
"""The simplest first."""
_PATIENCE_S = 30.0
"""No new round after so many seconds."""
_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""How far outputs and gradients may be from those of one piece: root mean square, over that of what they are."""

_Step = Callable[[], Sequence[Tensor]]


def tune_chunks(
    config: RunConfig,
    group: ProcessGroup,
    mesh: Mesh,
    device: Device,
    path: Path,
    *,
    budget_s: float,
    fresh: bool,
    progress: Callable[[str], None],
    candidates: Sequence[int] = CANDIDATES,
    rounds: int = LEAST_ROUNDS,
) -> Report:
    """Tune the products of a layer of ``config``; rank 0 writes the file after each. Collective over all ranks.

    Args:
        group: all ranks of the run; their threads are set.
        path: the tuned file; what it holds of others stays.
        fresh: measure again what the file has already.
        progress: told of each product, on rank 0.

    Raises:
        DrivetrainError: the file is damaged, or was made in another environment; on every rank.
    """
    began = time.monotonic()
    assert candidates[0] == 1, "one piece is always a candidate"
    ranks = mesh.ranks("tp")
    process_group = mesh.group("tp")
    assert process_group is not None, "a rank alone sends nothing"
    wire = Group("tp", process_group, len(ranks), mesh.index("tp"), Traffic())
    link = link_text(device.type, ranks, group.ranks.local_world_size)
    dtype = compute_dtype(config.precision)
    environment = environment_here(device)
    report = Report(path, environment)
    held = {} if fresh else _held(path, environment, group)
    # A file of another environment is replaced, and one of this keeps what others have put there.
    base: dict[tuple[str, int], Entry] | None = {} if fresh and _is_foreign(path, environment) else None
    for call in chunk_calls(config):
        text = call.text(config.precision.params_dtype, device.type, wire.size, link)
        about = (OPERATOR, text, call.tokens, call.calls_per_step)
        known = held.get((text, call.tokens))
        if known is not None:
            progress(f"{call.product}: {known.backend}, tuned before")
            report.outcomes.append(Outcome(*about, "kept", known))
            continue
        if group.maximum(time.monotonic() - began) >= budget_s:
            report.outcomes.append(Outcome(*about, "not reached"))
            continue
        progress(f"{call.product}: {text}; {call.tokens} tokens")
        counts = [count for count in candidates if count <= call.rows(wire.size)]
        entry = _tuned(call, text, counts, wire, group, device, dtype, rounds)
        progress(f"{call.product}: {entry.backend} ({entry.reason})")
        report.outcomes.append(Outcome(*about, "tuned", entry))
        if group.is_main:
            merge_tuned(path, environment, {entry.name: entry}, base=base, keep=_is_of_this_code)
            base = None
    return report


def _is_of_this_code(entry: Entry) -> bool:
    return entry.code == operator_code(module_of(entry.operator))


def _is_foreign(path: Path, environment: Mapping[str, str]) -> bool:
    read = read_tuned(path)
    return read is not None and bool(differences(read[0], environment))


def _held(path: Path, environment: Mapping[str, str], group: ProcessGroup) -> dict[tuple[str, int], Entry]:
    """What rank 0's file holds of chunks; the other ranks may have no such file."""
    failure, held = "", ""
    if group.is_main:
        try:
            kept = [one for one in held_entries(path, environment).values() if one.operator == OPERATOR]
        except DrivetrainError as error:
            failure = str(error)
        else:
            held = json.dumps([one.model_dump(mode="json") for one in kept if _is_of_this_code(one)])
    failure, held = group.gather_texts(failure)[0], group.gather_texts(held)[0]
    if failure:
        raise DrivetrainError(failure)
    entries = [Entry.model_validate_json(json.dumps(one)) for one in json.loads(held)]
    return {one.name: one for one in entries}


def _tuned(
    call: ChunkCall,
    text: str,
    counts: Sequence[int],
    wire: Group,
    group: ProcessGroup,
    device: Device,
    dtype: torch.dtype,
    rounds: int,
) -> Entry:
    steps = _steps(call, counts, wire, device, dtype)
    wrong = {
        count: why for count in counts[1:] if (why := _disagreement(steps, count, group, dtype)) is not None
    }
    seconds = _timed([count for count in counts if count not in wrong], steps, group, device, rounds)
    found = []
    for count in counts:
        if count in wrong:
            found.append(Candidate(backend=str(count), rejected=wrong[count]))
            continue
        least, spread = least_and_spread(seconds[count])
        found.append(Candidate(backend=str(count), seconds=least, spread=spread))
    decision = decide(found)
    assert decision is not None, "one piece was timed"
    return Entry(
        operator=OPERATOR,
        call=text,
        tokens=call.tokens,
        code=operator_code(module_of(OPERATOR)),
        backend=decision.backend,
        reason=decision.reason,
        calls_per_step=call.calls_per_step,
        candidate=tuple(found),
    )


def _steps(
    call: ChunkCall, counts: Sequence[int], wire: Group, device: Device, dtype: torch.dtype
) -> dict[int, _Step]:
    """Forward and backward by number of chunks, all on the same numbers; each returns outputs and gradients."""
    generator = torch.Generator().manual_seed(wire.index)

    def numbers(*shape: int, of_all: bool = False) -> Tensor:
        source = torch.Generator().manual_seed(1_000) if of_all else generator
        return torch.randn(*shape, generator=source).to(device.torch_device)

    linears = [_linear(numbers(outputs, call.inputs)) for outputs in call.outputs]
    share = call.tokens // wire.size
    rows = share if call.kind == "gathered" else call.tokens
    # What every rank holds alike is alike.
    x = numbers(rows, call.inputs, of_all=call.kind == "copied").to(dtype).requires_grad_()
    sent = share if call.kind == "scattered" else call.tokens
    gradients = [numbers(sent, outputs, of_all=call.kind == "summed").to(dtype) for outputs in call.outputs]
    weights = [linear.weight for linear in linears]

    def step(forward: Callable[[], Sequence[Tensor]]) -> _Step:
        def run() -> Sequence[Tensor]:
            outputs = forward()
            found = torch.autograd.grad(outputs, [x, *weights], gradients)
            return [*(one.detach() for one in outputs), *found]

        return run

    return {count: step(_forward(call, linears, x, wire, count)) for count in counts}


def _linear(weight: Tensor) -> Linear:
    """With a master weight in fp32, as in a run."""
    linear = Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight)
    return linear


def _forward(
    call: ChunkCall, linears: Sequence[Linear], x: Tensor, wire: Group, count: int
) -> Callable[[], Sequence[Tensor]]:
    if call.kind in ("summed", "scattered"):
        row_parallel = RowParallelLinear(
            linears[0], wire, sequence_parallel=call.kind == "scattered", chunks=count
        )
        return lambda: [row_parallel(x)]
    if count == 1:
        enter = gathered if call.kind == "gathered" else copied

        def plain() -> Sequence[Tensor]:
            entered = enter(x, wire)
            return [linear(entered) for linear in linears]

        return plain
    chunked = ColumnParallelLinears(linears, None, wire, count, sequence_parallel=call.kind == "gathered")
    return lambda: chunked(x)


def _disagreement(
    steps: Mapping[int, _Step], count: int, group: ProcessGroup, dtype: torch.dtype
) -> str | None:
    """Why ``count`` chunks are not to be chosen; None where they compute what one piece does. On all ranks alike."""
    worst = 0.0
    for one, other in zip(steps[count](), steps[1](), strict=True):
        size = float(other.float().square().mean().sqrt()) or 1.0
        difference = float((one.float() - other.float()).square().mean().sqrt()) / size
        worst = max(worst, difference if difference == difference else float("inf"))
    worst = group.maximum(worst)
    allowed = _ALLOWED[dtype]
    return None if worst <= allowed else f"it differs from one piece by {worst:.2e}, allowed {allowed:.0e}"


def _timed(
    counts: Sequence[int], steps: Mapping[int, _Step], group: ProcessGroup, device: Device, rounds: int
) -> dict[int, list[float]]:
    """Seconds of the slowest rank in each round."""
    seconds: dict[int, list[float]] = {count: [] for count in counts}
    began = time.monotonic()
    for number in range(MOST_ROUNDS):
        if number >= rounds:
            agree = all(least_and_spread(one)[1] < LEAST_GAIN for one in seconds.values())
            if agree or group.maximum(time.monotonic() - began) > _PATIENCE_S:
                break
        first = number % len(counts)
        order = [*counts[first:], *counts[:first]]
        for count in order if number % 2 == 0 else reversed(order):
            group.barrier()
            seconds[count].append(group.maximum(_seconds(steps[count], device)))
    return seconds


def _seconds(step: _Step, device: Device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    results = step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    taken = time.perf_counter() - start
    del results
    return taken
