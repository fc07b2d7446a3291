"""The account of a run without a device: operators are the compute, ranges of the loop the causes."""

from pathlib import Path

import pytest
from event_tables import Row, trace_of_rows

from drivetrain.measure.account import Window
from drivetrain.trace.account import account_of
from drivetrain.trace.name_table import NameTable
from drivetrain.trace.table import Category


def operator(name: str, start: int, duration: int, thread: str = "main") -> Row:
    return Row(Category.CPU_OP, name, start, duration, thread=thread)


def span(name: str, start: int, duration: int, thread: str = "main") -> Row:
    return Row(Category.ANNOTATION, name, start, duration, thread=thread)


def step_of(*rows: Row) -> Window:
    """The account of one step from 0 to 100 ns."""
    account = account_of([trace_of_rows([span("ProfilerStep#3", 0, 100), *rows])])
    assert account.ranks[0].view == "host"
    assert account.ranks[0].steps[0].window == account.ranks[0].whole
    return account.ranks[0].whole


def test_operators_that_do_the_work_are_the_compute() -> None:
    """A call of ``linear`` is not; ``addmm`` is, although it copies its bias by another operator."""
    found = step_of(
        operator("aten::linear", 0, 60),
        operator("aten::addmm", 10, 40),
        operator("aten::copy_", 12, 3),
        operator("aten::gelu", 70, 10),
    )
    assert dict(found.classes) == {
        "compute.matmul": 40,
        "compute.activation": 10,
        "host.launch": 20,
        "idle": 30,
    }
    assert (found.busy_ns, found.compute_ns) == (50, 50)


@pytest.mark.parametrize(
    "name", ["_LinearCrossEntropySum", "_LinearCrossEntropySumBackward", "FusedCrossEntropyLoss"]
)
def test_what_a_loss_of_ones_own_does_is_loss_but_for_its_matrix_products(name: str) -> None:
    """A softmax alone looks like attention; inside a loss it is the loss."""
    found = step_of(
        operator(name, 0, 80),
        operator("aten::mm", 0, 30),
        operator("aten::_softmax", 30, 20),
        operator("aten::mul", 50, 20),
    )
    assert dict(found.classes) == {
        "compute.matmul": 30,
        "compute.loss": 40,
        "host.launch": 10,
        "idle": 20,
    }


def test_operators_of_any_namespace_count() -> None:
    found = step_of(operator("mylib::fused_everything", 0, 30), operator("fsdp::chunk_cat", 40, 10))
    assert found.compute_ns == 40


def test_handing_over_a_collective_is_no_compute() -> None:
    found = step_of(operator("c10d::allreduce_", 0, 10), operator("c10d::barrier", 20, 30))
    assert found.compute_ns == 0
    assert found.classes["host.launch"] == 40


def test_gloo_is_communication_and_exposed_where_nothing_computes() -> None:
    found = step_of(
        operator("aten::mm", 0, 30),
        span("gloo:all_reduce", 20, 40, thread="gloo 1"),
        span("gloo:all_reduce", 50, 20, thread="gloo 2"),
        operator("aten::add_", 25, 2, thread="gloo 1"),
    )
    assert (found.communication_ns, found.overlapped_communication_ns) == (50, 10)
    assert found.classes["communication.unknown.unsplit"] == 40
    assert found.compute_ns == 30, "what a collective adds up on its own thread is no compute of the model"


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("drivetrain/fetch", "data.loader"),
        ("drivetrain/h2d", "copy.h2d"),
        ("drivetrain/sync", "host.sync"),
        ("drivetrain/checkpoint", "maintenance.checkpoint"),
        ("drivetrain/evaluation", "maintenance.evaluation"),
        ("drivetrain/log", "host.python"),
        ("drivetrain/forward", "host.python"),
        ("drivetrain/backward", "host.python"),
        ("drivetrain/optimizer", "host.python"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "data.loader"),
        ("[pl][profile]_TrainingEpochLoop.train_dataloader_next", "data.loader"),
        ("## wait_for_batch ##", "data.loader"),
        ("OutputGraph.call_user_compiler (dynamo_timed)", "maintenance.compile"),
    ],
)
def test_known_ranges_are_causes(name: str, cause: str) -> None:
    """A sleep of 30 ns inside the range, after 10 ns of work that is not its own."""
    found = step_of(span(name, 10, 40), operator("aten::mm", 0, 20))
    assert found.classes[cause] == (40 if cause.startswith(("data", "maintenance")) else 30) - (
        10 if cause.startswith(("data", "maintenance")) else 0
    )
    assert found.classes["compute.matmul"] == 20


def test_causes_of_ones_own_are_told_by_a_rules_file(tmp_path: Path) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text('side = "cause"\n[[rule]]\nclass = "data.loader"\npattern = "^my_queue/pop$"\n')
    trace = trace_of_rows(
        [span("ProfilerStep#3", 0, 100), span("my_queue/pop", 0, 60), operator("aten::mm", 60, 40)]
    )
    ours, theirs = account_of([trace]), account_of([trace], rules=NameTable.load(user_file=rules))
    assert dict(ours.ranks[0].whole.classes) == {"compute.matmul": 40, "host.python": 60}
    assert dict(theirs.ranks[0].whole.classes) == {"compute.matmul": 40, "data.loader": 60}
    assert theirs.name_table != ours.name_table


def test_operators_of_the_loader_are_loading() -> None:
    """Stacking samples is a batch's price, not the model's work."""
    found = step_of(span("drivetrain/fetch", 0, 50), operator("aten::stack", 10, 30))
    assert found.classes["data.loader"] == 50
    assert found.compute_ns == 0


def test_operators_of_a_thread_that_only_loads_are_no_compute() -> None:
    found = step_of(operator("aten::stack", 0, 90, thread="prefetch"), operator("aten::mm", 0, 10))
    assert dict(found.classes) == {"compute.matmul": 10, "idle": 90}


def test_the_rest_of_a_compiled_graphs_call_is_other_compute() -> None:
    found = step_of(span("## Call CompiledFxGraph fabc ##", 0, 50), operator("aten::mm", 10, 20))
    assert dict(found.classes) == {"compute.matmul": 20, "compute.other": 30, "idle": 50}


def test_a_trace_without_steps_has_one_window_of_all_that_was_recorded() -> None:
    account = account_of([trace_of_rows([operator("aten::mm", 10, 20), operator("aten::add", 60, 5)])])
    assert account.ranks[0].whole.window_ns == 55
    assert account.ranks[0].steps == ()
    assert any(finding.id == "host_view" for finding in account.health)
