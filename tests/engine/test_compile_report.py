"""Graph breaks, recompilations and code left eager are counted, with the line of Python and the reason."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.config import load_config
from drivetrain.config.fusion import LEVELS
from drivetrain.config.model import ModelConfig
from drivetrain.engine.compilation import CompilationWatch
from drivetrain.engine.compile_report import (
    CompileReport,
    GraphBreak,
    LeftEager,
    Recompilation,
    graph_break_of,
    place_of,
    recompilation_of,
)
from drivetrain.engine.devices import select_device
from drivetrain.engine.model.batch import whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.optimisations.compile import IMPLEMENTATION
from drivetrain.engine.optimisations.implementation import Building, Status

pytestmark = [
    # Raised by the compiler itself while it imports and traces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

BREAKS = logging.getLogger("torch._dynamo.symbolic_convert.__graph_breaks")
HERE = Path(__file__).name
MODEL = ModelConfig(
    num_layers=3, hidden_size=16, num_attention_heads=4, num_query_groups=2, seq_length=8, vocab_size=50
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Callable[..., torch.Tensor], **options: object) -> Callable[..., torch.Tensor]:
    return torch.compile(function, backend="eager", **options)


def decoder() -> Decoder:
    made = Decoder(MODEL, torch.float32)
    initialize(made, 0)
    made.compile_blocks(backend="eager")
    return made


def tokens(rows: int) -> torch.Tensor:
    return torch.randint(MODEL.vocab_size, (rows, MODEL.seq_length))


def lines_of(function: Callable[..., object], *texts: str) -> list[int]:
    """The numbers of the lines of this file, from the function's first on, that hold the texts."""
    code = function.__code__
    source = Path(code.co_filename).read_text().splitlines()
    return [
        next(number for number in range(code.co_firstlineno, len(source) + 1) if text in source[number - 1])
        for text in texts
    ]


def speaks(x: torch.Tensor) -> torch.Tensor:
    x = x + 1
    sys.stdout.flush()
    x = x * 2
    if x.sum() > 0:
        x = x + 3
    return x


def test_a_break_has_its_line_and_its_reason() -> None:
    with CompilationWatch() as watch:
        compiled(speaks)(torch.ones(3))
        assert watch.look()
    flush, branch = lines_of(speaks, "flush()", "if x.sum()")
    places = {Path(one.place).name: one for one in watch.report.breaks}
    assert set(places) == {f"{HERE}:{flush}", f"{HERE}:{branch}"}
    assert places[f"{HERE}:{branch}"].why.startswith("Data-dependent branching: ")
    assert "\n" not in places[f"{HERE}:{flush}"].why
    assert not any(one.intended for one in places.values())
    assert not watch.report.recompilations
    (complaint,) = watch.report.complaints()
    assert complaint.startswith("graphs break at 2 places that nobody meant them to: ")
    assert f"{HERE}:{flush}" in complaint


def test_the_break_at_attention_is_intended_and_nothing_to_complain_of() -> None:
    model = decoder()
    with CompilationWatch() as watch:
        for _ in range(2):
            model.loss_sum(whole_sequences(tokens(2))).backward()
            watch.look()
    (one,) = watch.report.breaks
    assert one.intended
    assert one.place.startswith("drivetrain/engine/model/decoder.py:")
    assert "function attend" in one.why or "attend>" in one.why
    assert " at 0x" not in one.why
    assert watch.report.graphs == 2
    assert watch.report.complaints() == []
    document = watch.report.to_document()
    assert [entry["intended"] for entry in document["graph_breaks"]] == [True]
    assert document["graph_breaks"][0]["count"] == 1


def test_operators_inside_compiled_blocks_neither_break_graphs_nor_compile_again() -> None:
    """Looking for a C++ compiler while tracing broke the graph at each call, and the choices kept were guards."""
    made = Decoder(MODEL, torch.float32)
    initialize(made, 0)
    made.use_operators(Selection(requested=dict.fromkeys(LEVELS["all"], "auto")))
    made.compile_blocks(backend="eager")
    with CompilationWatch() as watch:
        for _ in range(3):
            made.loss_sum(whole_sequences(tokens(2))).backward()
            watch.look()
    inside = [one for one in watch.report.breaks if not one.intended]
    assert inside == []
    assert watch.report.complaints() == []


def test_a_short_last_batch_compiles_again_and_its_sizes_are_named() -> None:
    model = decoder()
    with CompilationWatch() as watch:
        model.loss_sum(whole_sequences(tokens(4))).backward()
        watch.look()
        assert not watch.report.recompilations
        model.loss_sum(whole_sequences(tokens(1))).backward()
        assert watch.look()
    sizes = {one.sizes for one in watch.report.recompilations}
    assert {(old, new) for _, old, new in filter(None, sizes)} == {(32, 8)}
    assert all(one.function == "forward" for one in watch.report.recompilations)
    (complaint,) = watch.report.complaints()
    assert complaint.startswith(
        "code was compiled again 2 times: forward at drivetrain/engine/model/decoder.py:"
    )
    assert "was 32 and became 8" in complaint


def test_an_evaluation_without_gradients_needs_code_of_its_own() -> None:
    model = decoder()
    batch = whole_sequences(tokens(2))
    with CompilationWatch() as watch:
        model.loss_sum(batch).backward()
        with torch.no_grad():
            model.loss_sum(batch)
        watch.look()
    assert len(watch.report.recompilations) == 2
    assert all(one.expected for one in watch.report.recompilations)
    assert watch.report.complaints() == []


def in_a_loop(x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + 1
        sys.stdout.flush()
    return x


def test_code_that_could_not_be_compiled_at_all_is_named() -> None:
    with CompilationWatch() as watch:
        compiled(in_a_loop)(torch.ones(3))
        watch.look()
    (line,) = lines_of(in_a_loop, "flush()")
    (left,) = watch.report.left_eager
    assert (left.function, Path(left.place).name) == ("in_a_loop", f"{HERE}:{line}")
    assert any("torch.compile gave up on 1 piece of code" in text for text in watch.report.complaints())


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_code_past_the_limit_of_recompilations_is_left_eager() -> None:
    function = compiled(scaled, dynamic=False)
    with CompilationWatch() as watch:
        for size in range(2, 14):
            function(torch.ones(size))
            watch.look()
    report = watch.report
    assert len(report.recompilations) == torch._dynamo.config.recompile_limit - 1
    assert {one.function for one in report.left_eager} == {"scaled"}
    assert "limit" in next(iter(report.left_eager)).why


def test_looking_again_finds_nothing_where_nothing_was_compiled() -> None:
    function = compiled(scaled)
    with CompilationWatch() as watch:
        function(torch.ones(3))
        watch.look()
        function(torch.ones(3))
        assert not watch.look()


def test_what_was_compiled_before_the_watch_is_not_its() -> None:
    compiled(speaks)(torch.ones(3))
    compiled(in_a_loop)(torch.ones(3))
    with CompilationWatch() as watch:
        compiled(scaled)(torch.ones(3))
        watch.look()
    assert watch.report.to_document() == CompileReport(graphs=1).to_document()


def test_more_compilations_than_torch_remembers_are_said_to_be_incomplete() -> None:
    utilities = torch._dynamo.utils
    utilities.set_compilation_metrics_limit(3)
    function = compiled(scaled, dynamic=False)
    try:
        with CompilationWatch() as watch:
            for size in (2, 3):
                function(torch.ones(size))
                watch.look()
            assert not watch.report.incomplete
            assert len(watch.report.recompilations) == 1
            for size in range(4, 8):
                function(torch.ones(size))
            watch.look()
    finally:
        utilities.set_compilation_metrics_limit(utilities.DEFAULT_COMPILATION_METRICS_LIMIT)
    assert watch.report.incomplete
    assert any("may be missing" in text for text in watch.report.complaints())


def test_that_the_first_look_sees_as_many_as_torch_remembers_is_said_too() -> None:
    utilities = torch._dynamo.utils
    utilities.set_compilation_metrics_limit(0)
    utilities.set_compilation_metrics_limit(3)
    function = compiled(scaled, dynamic=False)
    try:
        with CompilationWatch() as watch:
            for size in range(2, 7):
                function(torch.ones(size))
            watch.look()
    finally:
        utilities.set_compilation_metrics_limit(utilities.DEFAULT_COMPILATION_METRICS_LIMIT)
    assert watch.report.incomplete


@pytest.fixture
def what_torch_prints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the log that go on to the loggers above it, one of which prints them."""
    printed: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            printed.append(record.getMessage())

    assert BREAKS.parent is not None
    monkeypatch.setattr(BREAKS.parent, "handlers", [Listener(logging.DEBUG)])
    monkeypatch.setattr(BREAKS, "propagate", True)
    BREAKS.setLevel(logging.NOTSET)
    return printed


def test_the_log_is_left_as_it_was_and_prints_nothing(what_torch_prints: list[str]) -> None:
    with CompilationWatch() as watch:
        compiled(speaks)(torch.ones(3))
        watch.look()
    assert (BREAKS.level, BREAKS.propagate, BREAKS.handlers) == (logging.NOTSET, True, [])
    assert what_torch_prints == []
    assert len(watch.report.breaks) == 2


def test_who_asked_for_the_log_still_gets_it(what_torch_prints: list[str]) -> None:
    BREAKS.setLevel(logging.DEBUG)
    with CompilationWatch() as watch:
        compiled(speaks)(torch.ones(3))
        watch.look()
    assert len(what_torch_prints) == len(watch.report.breaks) == 2
    assert BREAKS.level == logging.DEBUG
    BREAKS.setLevel(logging.NOTSET)


def test_what_was_not_meant_is_the_reason_in_the_record_of_the_run() -> None:
    config = load_config("llama-2m", ["fusion.compile=true", "run.device=cpu"]).config
    building = Building(config=config, device=select_device(config.run), num_ranks=1)
    at_end = IMPLEMENTATION.at_end
    assert at_end is not None
    with CompilationWatch() as watch:
        building.compilation = watch
        decoder().loss_sum(whole_sequences(tokens(2))).backward()
        assert at_end(building) == Status(active=True)
        compiled(speaks)(torch.ones(3))
        status = at_end(building)
    assert status.active
    assert status.reason is not None
    assert status.reason.startswith("graphs break at 2 places that nobody meant them to: ")


# ---- words ------------------------------------------------------------------------------------------------------


def test_a_function_that_is_passed_over_is_placed_by_its_traceback() -> None:
    message = (
        "Graph break: torch.compile cannot properly resume from this graph break, which results in a skip.\n"
        "The graph break occurred in the following user code:\n"
        '  File "/project/model.py", line 3, in forward\n'
        '  File "/project/model.py", line 9, in inner\n'
        "Traceback (most recent call last):\n"
        '  File "/torch/convert_frame.py", line 700, in convert\n'
    )
    assert graph_break_of(message).place == "/project/model.py:9"


def test_a_size_is_read_from_a_reason_and_another_guard_has_none() -> None:
    size = recompilation_of(
        "torch_dynamo_resume_in_forward_at_61",
        "/home/me/model.py",
        61,
        "1/0: tensor 'x_TD' size mismatch at index 0. expected 24, actual 9",
    )
    assert (size.function, size.place) == ("forward", "/home/me/model.py:61")
    assert size.sizes == ("x_TD[0]", 24, 9)
    other = recompilation_of("forward", "/home/me/model.py", 3, "0/1: GLOBAL_STATE changed: grad_mode ")
    assert (other.why, other.sizes, other.expected) == ("GLOBAL_STATE changed: grad_mode", None, True)


def test_a_place_in_an_installed_package_begins_with_its_name() -> None:
    assert place_of("/opt/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", 7) == (
        "torch/nn/modules/module.py:7"
    )


def test_disabled_code_of_others_is_not_intended() -> None:
    message = (
        "Graph break in user code at /home/me/model.py:12\n"
        "Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):\n\n"
        "Skip calling `torch.compiler.disable()`d function\n"
        "  Explanation: Skip calling function `<function f at 0x7f17fa512160>` since it was wrapped\n"
    )
    assert graph_break_of(message) == GraphBreak(
        "/home/me/model.py:12",
        "Skip calling `torch.compiler.disable()`d function: Skip calling function `<function f>` since it was wrapped",
        intended=False,
    )


@given(st.text())
def test_any_words_make_a_break_of_one_line(message: str) -> None:
    found = graph_break_of(message)
    assert found.why
    assert len(found.why.splitlines()) == 1


@given(st.text(), st.text())
def test_any_reason_makes_a_recompilation_of_one_line(function: str, reason: str) -> None:
    found = recompilation_of(function, "model.py", 1, reason)
    assert len(found.why.splitlines()) <= 1


def test_more_than_three_are_counted_not_listed() -> None:
    report = CompileReport()
    for line in range(5):
        report.breaks[GraphBreak(f"m.py:{line}", "why", intended=False)] += 1
    report.left_eager[LeftEager("f", "m.py:9", "why")] += 2
    report.recompilations[Recompilation("f", "m.py:1", "a guard", expected=False)] += 1
    breaks, again, left = report.complaints()
    assert breaks.endswith("m.py:2 (why) and 2 more")
    assert again == "code was compiled again 1 time: f at m.py:1 (a guard)"
    assert left == "torch.compile gave up on 2 pieces of code, which ran eagerly: f at m.py:9 (why)"
