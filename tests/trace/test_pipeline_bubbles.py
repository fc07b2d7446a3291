"""The bubble of a pipeline: in closed form, against a sweep nanosecond by nanosecond, on traces of a real pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from event_tables import Row, kernel, trace_of_rows
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from drivetrain.measure.account import BUBBLE_CLASSES, Account
from drivetrain.trace.account import account_of
from drivetrain.trace.health import Finding
from drivetrain.trace.read import read_trace
from drivetrain.trace.table import Category, Trace

GEMM = "ampere_sgemm_128x64_nn"
OPTIMIZER = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel"
SEND_RECV = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"
UPDATE = "Optimizer.step#AdamW.step"
PIPELINE = "1|PIPELINE_MODEL_PARALLEL_GROUP"
DATA = Path(__file__).resolve().parent / "pipeline_data"


def job(world_size: int) -> dict[str, Any]:
    everyone = {"pg_name": "0", "pg_desc": "default_pg", "ranks": list(range(world_size))}
    stages = {"pg_name": "1", "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", "ranks": list(range(world_size))}
    return {"distributedInfo": {"backend": "nccl", "world_size": world_size, "pg_config": [everyone, stages]}}


class Stage:
    """Records of one stage: kernels where the schedule puts them, each launched early in its step."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.rows: list[Row] = []
        self.arguments: dict[int, dict[str, Any]] = {}
        self.launches = 0
        self.host_ns = 0

    def begin_step(self, number: int, start: int, duration: int) -> None:
        self.rows.append(Row(Category.ANNOTATION, f"ProfilerStep#{number}", start, duration))
        self.host_ns = start + 1

    def add(self, name: str, start: int, end: int, *, within: str = "", stream: int = 7, **more: Any) -> None:
        """A kernel, launched inside a range or operator of the host."""
        self.launches += 1
        if within:
            category = Category.CPU_OP if within == BACKWARD else Category.ANNOTATION
            self.rows.append(Row(category, within, self.host_ns, 2))
        launch = Row(Category.RUNTIME, "cudaLaunchKernel", self.host_ns + 1, 0, correlation=self.launches)
        # The thread also runs operators, as any that launches does.
        self.rows += [launch, Row(Category.CPU_OP, "aten::empty", self.host_ns + 3, 0)]
        self.host_ns += 5
        self.rows.append(kernel(name, start, end - start, stream=stream, correlation=self.launches, **more))

    def message(self, kind: str, peer: int, start: int, end: int) -> None:
        self.add(
            SEND_RECV,
            start,
            end,
            within=f"nccl:{kind} {self.rank}{'->' if kind == 'send' else '<-'}{peer}",
            stream=20 if kind == "send" else 21,
            group=PIPELINE,
            bytes=1024,
        )
        self.arguments[len(self.rows) - 1] = {"Dst Rank" if kind == "send" else "Src Rank": peer}

    def trace(self) -> Trace:
        made = trace_of_rows(
            self.rows, rank=self.rank, world_size=self.world_size, metadata=job(self.world_size)
        )

        def arguments(indices: Any) -> list[dict[str, Any]]:
            return [self.arguments.get(int(i), {}) for i in indices]

        return replace(made, argument_reader=arguments)


def one_forward_one_backward(stage: int, stages: int, batches: int) -> list[tuple[str, int]]:
    warm = min(stages - 1 - stage, batches)
    order = [("F", i) for i in range(warm)]
    for i in range(batches - warm):
        order += [("F", warm + i), ("B", i)]
    return order + [("B", i) for i in range(batches - warm, batches)]


def pipeline(
    stages: int,
    batches: int,
    forward: Sequence[int],
    backward: Sequence[int],
    *,
    steps: int = 2,
    update: int = 500,
) -> list[Trace]:
    """1F1B without cost of communication; after each step the norm of all gradients, then the update.

    Args:
        stages: ranks.
        batches: micro-batches a step.
        forward: ns of each stage's forward pass of one micro-batch.
        backward: ns of its backward pass.
        steps: steps recorded.
        update: ns of the update.
    """
    ranks = [Stage(rank, stages) for rank in range(stages)]
    start = 1000
    for number in range(steps):
        ends: dict[tuple[str, int, int], int] = {}
        work: list[tuple[int, str, int, int, int, int]] = []
        free = [start] * stages
        orders = [one_forward_one_backward(rank, stages, batches) for rank in range(stages)]
        while any(orders):
            for rank in range(stages):
                while orders[rank]:
                    pass_, batch = orders[rank][0]
                    source = rank - 1 if pass_ == "F" else rank + 1
                    outside = source in (-1, stages)
                    if not outside and (pass_, source, batch) not in ends:
                        break
                    orders[rank].pop(0)
                    ready = start if outside else ends[pass_, source, batch]
                    begins = max(free[rank], ready)
                    over = begins + (forward if pass_ == "F" else backward)[rank]
                    work.append((rank, pass_, source, free[rank], begins, over))
                    free[rank] = ends[pass_, rank, batch] = over
        done = max(free)
        for rank in ranks:
            rank.begin_step(number, start, done + update - start)
        for number_of, pass_, source, posted, begins, over in work:
            rank = ranks[number_of]
            target = rank.rank + 1 if pass_ == "F" else rank.rank - 1
            if source not in (-1, stages):
                rank.message("recv", source, posted, begins)
            rank.add(GEMM, begins, over, within="" if pass_ == "F" else BACKWARD)
            if target not in (-1, stages):
                rank.message("send", target, over, over)
        for rank in ranks:
            rank.add(ALL_REDUCE, free[rank.rank], done, stream=22, group=PIPELINE, bytes=4)
            rank.add(OPTIMIZER, done, done + update, within=UPDATE)
        start = done + update
    return [rank.trace() for rank in ranks]


def bubble(account: Account, rank: int, step: int) -> dict[str, int]:
    window = account.ranks[rank].steps[step].window
    return {name: window.classes.get(name, 0) for name in BUBBLE_CLASSES}


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 5), st.integers(0, 6), st.integers(500, 5000), st.integers(500, 5000))
@example(4, 4, 1000, 2000)
def test_equal_stages_have_the_bubble_of_the_closed_form(
    stages: int, more: int, forward: int, backward: int
) -> None:
    """(p-1)/(m+p-1) of a step without its update, half filling and half draining, whatever the stage."""
    batches = stages + more
    account = account_of(pipeline(stages, batches, [forward] * stages, [backward] * stages))
    for stage in range(stages):
        for step in range(2):
            found = bubble(account, stage, step)
            assert found == {
                "bubble.warmup": stage * forward + (stages - 1 - stage) * backward,
                "bubble.cooldown": (stages - 1 - stage) * forward + stage * backward,
                "bubble.imbalance": 0,
            }
            window = account.ranks[stage].steps[step].window
            whole_step = (batches + stages - 1) * (forward + backward)
            assert sum(found.values()) * (batches + stages - 1) == (stages - 1) * whole_step
            assert window.window_ns == whole_step + 500
            assert window.group_ns("communication") == 0
            assert window.exposed_communication_ns == sum(found.values()), "the figure keeps the waiting"


def test_a_slow_stage_in_the_middle_is_an_imbalance_of_the_others() -> None:
    """Four stages, stage 2 takes twice as long: in the steady phase the others wait for it."""
    forward, backward = [1000, 1000, 2000, 1000], [2000, 2000, 4000, 2000]
    account = account_of(pipeline(4, 12, forward, backward))
    imbalance = [bubble(account, stage, 1)["bubble.imbalance"] for stage in range(4)]
    assert imbalance[2] == 0
    # All but the last stage's steady phase has as many micro-batches as are not warm-up.
    assert all(imbalance[stage] > 6 * 3000 for stage in (0, 1, 3))
    for rank in account.ranks:
        for step in rank.steps:
            assert step.window.group_ns("bubble") + step.window.compute_ns == step.window.window_ns  # type: ignore[operator]


def test_one_stage_alone_claims_no_bubble() -> None:
    """Whether it waited or received, only the sender tells."""
    traces = pipeline(4, 4, [1000] * 4, [2000] * 4)
    account = account_of([traces[1]])
    window = account.ranks[0].steps[1].window
    assert window.group_ns("bubble") == 0
    assert window.classes["communication.pp.unsplit"] == 9000
    with_neighbour = account_of(traces[1:3])
    assert with_neighbour.ranks[0].steps[1].window.group_ns("bubble") > 0
    # The first stage is absent: what is received from it stays unsplit.
    assert with_neighbour.ranks[0].steps[1].window.classes["communication.pp.unsplit"] > 0


def test_a_withheld_communication_takes_the_bubble_with_it() -> None:
    finding = Finding("some", "warning", "", 1, ("communication_ns",))
    traces = [replace(trace, health=(finding,)) for trace in pipeline(2, 2, [1000] * 2, [2000] * 2)]
    window = account_of(traces).ranks[0].whole
    assert window.group_ns("bubble") == 0
    assert window.unexplained_ns == 2 * 3000


def test_without_backward_work_there_are_no_phases() -> None:
    """Device records alone: nothing tells forward from backward, so that waiting stays waiting."""
    traces = [
        replace(trace, events=trace.events.select(trace.events.category != Category.CPU_OP))
        for trace in pipeline(2, 3, [1000] * 2, [2000] * 2)
    ]
    window = account_of(traces).ranks[1].whole
    assert window.group_ns("bubble") == 0
    assert window.classes["communication.pp.wait"] == 2 * 3000


def test_idle_before_a_receive_is_the_bubble_while_nothing_was_sent() -> None:
    """Receives are posted 300 ns late: for so long the stage shows nothing, and there is nothing to receive."""
    traces = []
    for trace in pipeline(2, 2, [1000] * 2, [2000] * 2):
        late = trace.events.duration_ns.copy()
        starts = trace.events.start_ns.copy()
        receives = (trace.events.is_device_work()) & (late > 900) & (trace.events.stream == 2)
        assert trace.events.streams[2] == "21"
        starts[receives] += 300
        late[receives] -= 300
        order = np.argsort(starts, kind="stable")
        events = replace(trace.events, start_ns=starts, duration_ns=late).select(order)
        traces.append(replace(trace, events=events))
    account = account_of(traces)
    assert sum(bubble(account, 0, 1).values()) == 3000
    assert "idle" not in account.ranks[0].steps[1].window.classes
    # The last stage's step begins with its first record, so that the time before it is of the step before.
    assert sum(bubble(account, 1, 1).values()) == 2700


# ---- against a sweep --------------------------------------------------------------------------------------------

FAR = 300
"""Where two all-reduces put both ranks on one clock, behind everything else."""


@st.composite
def two_stages(draw: st.DrawFn) -> tuple[list[Row], list[Row]]:
    """Any kernels, messages and copies of two ranks, as many sends as receives."""
    there, back = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    sides = []
    for rank in range(2):
        stage = Stage(rank, 2)
        split = draw(st.integers(1, 60))
        stage.rows.append(Row(Category.ANNOTATION, "ProfilerStep#1", 0, split))
        stage.rows.append(Row(Category.ANNOTATION, "ProfilerStep#2", split, 1000))
        stage.host_ns = 400  # Launches and their ranges lie behind all that is compared.
        times = st.tuples(st.integers(0, 200), st.integers(0, 60))
        passes = st.tuples(st.integers(0, 200), st.integers(0, 20))
        for within in ["", BACKWARD, *draw(st.lists(st.sampled_from(["", BACKWARD, UPDATE]), max_size=3))]:
            start, length = draw(passes)
            name = OPTIMIZER if within == UPDATE else GEMM
            stage.add(name, start, start + length, within=within)
        for start, length in draw(st.lists(times, max_size=2)):
            stage.add("Memcpy HtoD", start, start + length, stream=9)
            stage.rows[-1] = replace(stage.rows[-1], category=Category.MEMCPY)
        sends, receives = (there, back) if rank == 0 else (back, there)
        for kind, count in (("send", sends), ("recv", receives)):
            for _ in range(count):
                start, length = draw(times)
                stage.message(kind, 1 - rank, start, start + length)
        for i in range(3):
            stage.add(ALL_REDUCE, FAR + 10 * i, FAR + 10 * i + 5, stream=22, group="0|default_pg", bytes=4)
        sides.append(stage.rows)
    return sides[0], sides[1]


def swept(trace: Trace, splits: Mapping[int, int], window: tuple[int, int]) -> dict[str, int]:
    """Classes of a window by looking at each nanosecond; `splits`: row → end of its waiting."""
    events = trace.events
    names = [events.names[name] for name in events.name]
    rows = range(len(events))
    spans = [range(int(events.start_ns[i]), int(events.end_ns[i])) for i in rows]
    device = [bool(flag) for flag in events.is_device_work()]
    launches = {
        int(events.correlation[i]): int(events.start_ns[i]) for i in rows if names[i] == "cudaLaunchKernel"
    }

    nodes = [spans[i] for i in rows if names[i] == BACKWARD]

    def is_backward(i: int) -> bool:
        at = launches[int(events.correlation[i])]
        return any(node.start <= at <= node.stop for node in nodes)

    compute = [i for i in rows if names[i] in (GEMM, OPTIMIZER)]
    passes = [i for i in compute if names[i] == GEMM]
    messages = [i for i in rows if names[i] == SEND_RECV]

    steps = [spans[i] for i in rows if names[i].startswith("ProfilerStep")]
    # Everything is launched in the second step, which begins on the device with the first record.
    border = max(steps[1].start, min(spans[i].start for i in rows if device[i]))
    steps = [range(steps[0].start, border), range(border, steps[1].stop)]

    def phase(instant: int) -> str | None:
        for step in steps:
            if instant not in step:
                continue
            inside = [i for i in passes if spans[i].start in step]
            back = [i for i in inside if is_backward(i)]
            ahead = [i for i in inside if i not in back]
            if not back or not ahead:
                return None
            last_back = min(max(spans[i].stop for i in back), step.stop)
            ahead = [i for i in ahead if spans[i].start < last_back]
            if not ahead:
                return None
            if instant < min(spans[i].start for i in back):
                return "bubble.warmup"
            if instant < max(spans[i].stop for i in ahead):
                return "bubble.imbalance"
            updates = [spans[i].start for i in compute if i not in passes and spans[i].start >= last_back]
            return "bubble.cooldown" if instant < min(updates, default=step.stop) else None
        return None

    def nothing(instant: int) -> bool:
        return not any(instant in spans[i] for i in rows if device[i])

    found: dict[str, int] = {}
    for t in range(*window):
        here = [i for i in rows if device[i] and t in spans[i]]
        label = "idle"
        if any(i in compute for i in here):
            label = "compute"
        elif any(names[i] == ALL_REDUCE for i in here) or any(i in messages and t >= splits[i] for i in here):
            label = "transfer"
        elif any(i in messages for i in here):
            label = phase(t) or "wait"
        elif here:
            label = "copy"
        elif any(
            t < min(spans[i].start, splits[i]) and all(nothing(u) for u in range(t, spans[i].start))
            for i in messages
            if events.streams[events.stream[i]] == "21" and t < spans[i].start
        ):
            label = phase(t) or "idle"
        found[label] = found.get(label, 0) + 1
    return found


def ends_of_waiting(traces: Sequence[Trace]) -> list[dict[int, int]]:
    """Row of each message → when its waiting ended, by the order of sends and receives in each step."""
    ends: list[dict[int, int]] = [{}, {}]

    def sequence(rank: int, stream: str) -> list[int]:
        events = traces[rank].events
        return [
            i
            for i in range(len(events))
            if events.names[events.name[i]] == SEND_RECV and events.streams[events.stream[i]] == stream
        ]

    for sender in range(2):
        receiver = 1 - sender
        pairs = zip(sequence(sender, "20"), sequence(receiver, "21"), strict=True)
        for sent, received in pairs:
            start = int(traces[sender].events.start_ns[sent])
            posted = int(traces[receiver].events.start_ns[received])
            over = int(traces[sender].events.end_ns[sent])
            ends[receiver][received] = start
            ends[sender][sent] = start if over <= posted else posted
    return ends


@settings(max_examples=60, deadline=None)
@given(two_stages())
def test_the_bubble_of_any_two_stages_equals_the_sweep(sides: tuple[list[Row], list[Row]]) -> None:
    traces = [
        trace_of_rows(rows, rank=rank, world_size=2, metadata=job(2)) for rank, rows in enumerate(sides)
    ]
    for trace in traces:
        assume(all(trace.events.duration_ns[trace.events.category == Category.ANNOTATION] > 0))
    account = account_of(traces, step_window="cpu")
    assert account.clock_residual_ns == 0
    # Every launch lies in the second step, so that all messages are of one step and match in their order.
    splits = ends_of_waiting(traces)
    for rank, trace in zip(account.ranks, traces, strict=True):
        for step in rank.steps:
            window = (max(step.start_ns, 0), min(step.end_ns, FAR))
            expected = swept(trace, splits[rank.rank], window)
            found: dict[str, int] = {}
            for name, value in step.window.classes.items():
                group = name.split(".")[0]
                word = {"communication": name.split(".")[-1], "bubble": name}.get(group, group)
                found[word] = found.get(word, 0) + value
            assert sum(step.window.classes.values()) + step.window.unexplained_ns == step.window.window_ns
            for word in ("compute", "copy", "wait", *BUBBLE_CLASSES):
                assert found.get(word, 0) == expected.get(word, 0), word


# ---- a real pipeline --------------------------------------------------------------------------------------------


def test_a_real_pipeline_of_two_stages_shows_its_bubble() -> None:
    """torch's 1F1B over gloo: a group without a name, peers by its two ranks, clocks by messages alone."""
    account = account_of(
        read_trace(file, cache=False) for file in sorted(DATA.glob("two_stages_rank*.json.gz"))
    )
    assert [rank.rank for rank in account.ranks] == [0, 1]
    assert not [finding for finding in account.health if finding.severity == "error"]
    assert account.clock_offsets_ns == {0: 0, 1: 0}, "one host, one clock"
    for rank in account.ranks:
        assert [step.step for step in rank.steps] == [2, 3]
        for step in rank.steps:
            window = step.window
            assert window.classes["bubble.warmup"] > 0
            waiting = window.group_ns("bubble") + window.group_ns("communication")
            assert waiting == window.exposed_communication_ns, "gloo's ranges begin without a gap"
            assert set(window.classes) & {"communication.pp.wait", "communication.pp.unsplit"} == set()
    pairs = {(verdict.ranks, verdict.occurrences) for verdict in account.verdicts}
    assert pairs == {((0, 1), 4), ((1, 0), 4)}, "the first recorded step is left out"
