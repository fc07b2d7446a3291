"""Where steps are found, and which device time is theirs."""

import numpy as np
import pytest
from event_tables import Row, kernel, table_of

from drivetrain.trace.steps import cpu_windows, device_windows, find_steps, repeated_pattern
from drivetrain.trace.table import Category, EventTable


def step(number: int, start: int, duration: int, category: Category = Category.ANNOTATION) -> Row:
    return Row(category, f"ProfilerStep#{number}", start, duration)


def launched(start: int, correlation: int) -> Row:
    return Row(Category.RUNTIME, "cudaLaunchKernel", start, 1, correlation=correlation)


def lagging() -> EventTable:
    """Two steps on the host whose kernels run later: step 4's still while the host is in step 5."""
    return table_of(
        [
            step(4, 0, 100),
            step(5, 100, 100),
            launched(10, 1),
            launched(20, 2),
            launched(110, 3),
            kernel("a", 60, 50, correlation=1),
            kernel("a", 110, 40, correlation=2),
            kernel("b", 160, 90, correlation=3),
        ]
    )


def test_steps_are_the_host_ranges() -> None:
    found = find_steps(lagging())
    assert [mark.number for mark in found.marks] == [4, 5]
    assert cpu_windows(found).tolist() == [[0, 100], [100, 200]]
    assert found.origin == "profiler_step"


def test_device_work_belongs_to_the_step_that_launched_it() -> None:
    """The second kernel of step 4 runs while the host is in step 5; the last step lasts until its work is done."""
    events = lagging()
    assert device_windows(events, find_steps(events)).tolist() == [[60, 160], [160, 250]]


def test_the_last_step_is_kept_and_lasts_as_long_as_its_host_range() -> None:
    events = table_of([step(1, 0, 100), launched(10, 1), kernel("a", 20, 30, correlation=1)])
    assert device_windows(events, find_steps(events)).tolist() == [[20, 100]]


def test_the_profilers_copy_of_a_step_on_the_device_is_no_step() -> None:
    copy = Row(Category.DEVICE_ANNOTATION, "ProfilerStep#4", 50, 100, thread="7", stream=7, device=0)
    found = find_steps(table_of([step(4, 0, 100), copy]))
    assert [(mark.number, mark.start_ns) for mark in found.marks] == [(4, 0)]


def test_a_step_recorded_as_an_operator_is_a_step() -> None:
    assert [mark.number for mark in find_steps(table_of([step(3, 0, 9, Category.CPU_OP)])).marks] == [3]


def test_a_step_recorded_twice_is_one_step() -> None:
    found = find_steps(table_of([step(4, 0, 100), step(4, 10, 50)]))
    assert [(mark.start_ns, mark.end_ns) for mark in found.marks] == [(0, 100)]


def test_a_number_that_comes_again_later_is_another_step() -> None:
    """Two windows in one file, or a restarted job."""
    found = find_steps(table_of([step(4, 0, 100), step(4, 500, 100)]))
    assert cpu_windows(found).tolist() == [[0, 100], [500, 600]]


def test_the_first_recorded_step_is_flagged() -> None:
    health = find_steps(lagging()).health
    assert [finding.id for finding in health] == ["first_step"]
    assert "step 4" in health[0].message


def test_a_step_without_device_work_has_its_host_range() -> None:
    events = table_of(
        [step(1, 0, 100), step(2, 100, 100), launched(110, 1), kernel("a", 120, 5, correlation=1)]
    )
    assert device_windows(events, find_steps(events)).tolist() == [[0, 120], [120, 200]]


def test_windows_follow_each_other_even_where_clocks_disagree() -> None:
    """A device clock behind the host's: no step's work begins before the step, and no window is negative."""
    events = table_of(
        [
            step(1, 0, 100),
            step(2, 100, 100),
            launched(10, 1),
            launched(110, 2),
            kernel("a", 150, 10, correlation=1),
            kernel("a", 90, 10, correlation=2),
        ]
    )
    windows = device_windows(events, find_steps(events))
    assert (windows[:, 1] >= windows[:, 0]).all()
    assert windows[0, 1] == windows[1, 0]


def test_without_profiler_steps_updates_of_the_optimizer_mark_them() -> None:
    rows = [Row(Category.ANNOTATION, "Optimizer.step#AdamW.step", 80 + 100 * i, 10) for i in range(3)]
    rows += [Row(Category.ANNOTATION, "Optimizer.step#Wrapped.step", 81 + 100 * i, 8) for i in range(3)]
    rows += [Row(Category.CPU_OP, "aten::mm", 10 + 100 * i, 5) for i in range(4)]
    found = find_steps(table_of(rows))
    assert found.origin == "optimizer_step"
    assert cpu_windows(found).tolist() == [[10, 90], [90, 190], [190, 290]]
    assert [mark.number for mark in found.marks] == [0, 1, 2]
    assert [finding.id for finding in found.health] == ["steps_inferred"]
    assert find_steps(table_of(rows), infer=False).marks == ()


def training_kernels(steps: int, layers: int, pause: int) -> list[Row]:
    """Embedding, layers of three kernels, head; a pause before each step."""
    rows: list[Row] = []
    time = 0
    for _ in range(steps):
        time += pause
        for name in ("embed", *("norm", "mm", "act") * layers, "head", "loss"):
            rows.append(kernel(name, time, 10))
            time += 10
    return rows


def test_a_repeating_sequence_of_kernels_is_a_step_each() -> None:
    found = find_steps(table_of(training_kernels(steps=5, layers=12, pause=100)))
    assert found.origin == "pattern"
    assert len(found.marks) == 5
    assert {mark.end_ns - mark.start_ns for mark in found.marks[:-1]} == {39 * 10 + 100}
    assert found.marks[-1].end_ns - found.marks[-1].start_ns == 39 * 10


def test_layers_of_one_step_are_no_steps() -> None:
    assert find_steps(table_of(training_kernels(steps=1, layers=24, pause=0))).marks == ()


def test_a_sequence_without_repetition_has_no_period() -> None:
    assert repeated_pattern(np.arange(100, dtype=np.int32)) is None
    assert repeated_pattern(np.array([1, 2, 3] * 10, np.int32)) == 3
    assert repeated_pattern(np.empty(0, np.int32)) is None


def test_no_events_have_no_steps() -> None:
    assert find_steps(EventTable.empty()).marks == ()


@pytest.mark.parametrize("number", ["9" * 19, "1" + "0" * 20, "9" * 5000])
def test_a_step_number_beyond_64_bits_is_no_step(number: str) -> None:
    table = table_of(
        [
            Row(Category.ANNOTATION, f"ProfilerStep#{number}", 0, 100),
            Row(Category.ANNOTATION, "ProfilerStep#4", 100, 100),
        ]
    )
    assert [mark.number for mark in find_steps(table).marks] == [4]
