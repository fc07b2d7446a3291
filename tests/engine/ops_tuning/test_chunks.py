"""Chunks are tuned on all ranks: the slowest decides, one piece is always there, and all ranks choose alike."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch

from drivetrain.config import RunConfig, load_config
from drivetrain.config.layout import layout_of
from drivetrain.engine.devices import select_device
from drivetrain.engine.ops.tuned_file import Entry, TunedFile, environment_here
from drivetrain.engine.ops_tuning import chunks as module
from drivetrain.engine.ops_tuning.chunks import tune_chunks
from drivetrain.engine.ops_tuning.writing import write_tuned
from drivetrain.engine.parallel import chunked_products
from drivetrain.engine.parallel.chunk_calls import OPERATOR
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.errors import DrivetrainError
from rank_processes import on_kept_ranks
from runs_on_the_spot import Tiny

PRODUCTS = ["qkv", "output", "gate_up", "down"]
TINY = (
    "parallelism.tensor_model_parallel_size=2",
    "training.micro_batch_size=1",
    "model.seq_length=8",
    "model.num_layers=1",
    "run.device=cpu",
)


def config_of(*overrides: str) -> RunConfig:
    return load_config("llama-2m", [*TINY, *overrides]).config


def tuned(
    path: str,
    overrides: tuple[str, ...] = (),
    *,
    fresh: bool = False,
    budget_s: float = 600.0,
    wrong: bool = False,
) -> list[tuple[str, str, dict[str, str | None]]] | str:
    """Status, choice and candidates with why they were rejected, of each product."""
    config = config_of(*overrides)
    broken = patch.object(
        chunked_products.RowChunks, "own", lambda self, index: slice(0, self.rows // self.count)
    )
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(layout_of(config, 2), group.ranks.rank, timeout=timedelta(minutes=1))
        device = select_device(config.run)
        with patch.object(module, "MOST_ROUNDS", 7):
            if wrong:
                broken.start()
            try:
                report = tune_chunks(
                    config,
                    group,
                    mesh,
                    device,
                    Path(path),
                    budget_s=budget_s,
                    fresh=fresh,
                    progress=lambda _: None,
                    candidates=(1, 2, 16),
                )
            except DrivetrainError as error:
                return str(error)
            finally:
                if wrong:
                    broken.stop()
    return [
        (
            one.status,
            "" if one.entry is None else one.entry.backend,
            {} if one.entry is None else {c.backend: c.rejected for c in one.entry.candidate},
        )
        for one in report.outcomes
    ]


@pytest.mark.parametrize("sequence_parallel", ["false", "true"])
def test_all_ranks_choose_alike_and_rank_0_writes_it(tmp_path: Path, sequence_parallel: str) -> None:
    path = tmp_path / "ops.tuned.toml"
    overrides = (f"parallelism.sequence_parallel={sequence_parallel}",)
    first, second = on_kept_ranks(tuned, 2, str(path), overrides)
    assert first == second
    # Of eight rows, or four, sixteen chunks cannot be made.
    assert [(status, list(candidates)) for status, _, candidates in first] == [("tuned", ["1", "2"])] * 4
    assert all(not rejected for _, _, candidates in first for rejected in candidates.values())
    file = TunedFile.read(path, environment=environment_here(select_device(config_of().run), 1))
    assert file.problems == ()
    assert [entry.operator for entry in file.entries] == [OPERATOR] * 4
    assert all("2 ranks, gloo over lo on one machine" in entry.call for entry in file.entries)
    again = on_kept_ranks(tuned, 2, str(path), overrides)
    assert [status for status, _, _ in again[1]] == ["kept"] * 4
    assert [choice for _, choice, _ in again[1]] == [choice for _, choice, _ in first]


def test_what_the_budget_does_not_reach_is_said_and_not_written(tmp_path: Path) -> None:
    path = tmp_path / "ops.tuned.toml"

    found = on_kept_ranks(out_of_time, 2, str(path))
    assert found == [[("not reached", "", {})] * 4] * 2
    assert not path.exists()


def out_of_time(path: str) -> Any:
    return tuned(path, budget_s=0.0)


def wrongly(path: str) -> Any:
    return tuned(path, wrong=True)


def anew(path: str) -> Any:
    return tuned(path, fresh=True)


def test_chunks_that_compute_something_else_are_rejected(tmp_path: Path) -> None:
    """Chunks of the first rows alone, which is what is left where the number of rows is not divisible."""
    first, second = on_kept_ranks(wrongly, 2, str(tmp_path / "ops.tuned.toml"))
    assert first == second
    for _, choice, candidates in first:
        assert choice == "1"
        assert "it differs from one piece" in str(candidates["2"])


def test_a_file_of_another_machine_is_refused_on_all_ranks_and_replaced_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "ops.tuned.toml"
    write_tuned(path, {"device": "another"}, [other_operator()])
    for found in on_kept_ranks(tuned, 2, str(path)):
        assert "tuned in another environment" in found
    on_kept_ranks(anew, 2, str(path))
    file = TunedFile.read(path, environment=environment_here(select_device(config_of().run), 1))
    assert {entry.operator for entry in file.entries} == {OPERATOR}
    assert len(file.entries) == 4


def other_operator() -> Entry:
    from drivetrain.engine.ops._operator_code import module_of, operator_code

    code = operator_code(module_of("glu"))
    return Entry(operator="glu", call="glu on cpu", tokens=3, code=code, backend="eager", calls_per_step=1)


def test_what_the_file_has_of_operators_stays(tmp_path: Path) -> None:
    path = tmp_path / "ops.tuned.toml"
    here = environment_here(select_device(config_of().run), 1)
    write_tuned(path, here, [other_operator()])
    on_kept_ranks(tuned, 2, str(path))
    assert sorted(entry.operator for entry in TunedFile.read(path, environment=here).entries) == [
        "glu",
        *[OPERATOR] * 4,
    ]


def decided_by(pretended: Mapping[int, Mapping[int, float]]) -> dict[int, list[float]]:
    """Seconds by number of chunks, where each rank pretends to have taken its own."""
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        own = pretended[group.ranks.rank]
        steps = {count: (lambda count=count: count) for count in own}  # type: ignore[misc]
        with patch.object(module, "_seconds", lambda step, device: own[step()]):
            device = select_device(config_of().run)
            return module._timed(list(own), cast(Any, steps), group, device, 7)


def test_the_time_of_a_round_is_that_of_the_slowest_rank() -> None:
    pretended = {0: {1: 1.0, 2: 0.5, 4: 0.1}, 1: {1: 1.0, 2: 0.6, 4: 3.0}}
    for found in on_kept_ranks(decided_by, 2, pretended):
        assert found == {1: [1.0] * 7, 2: [0.6] * 7, 4: [3.0] * 7}


def test_rounds_begin_with_another_number_each_time() -> None:
    order: list[int] = []

    class Alone:
        def barrier(self) -> None: ...

        def maximum(self, value: float) -> float:
            return value

    steps = {count: (lambda count=count: order.append(count) or [torch.ones(1)]) for count in (1, 2, 4)}  # type: ignore[misc, func-returns-value]
    with patch.object(module, "MOST_ROUNDS", 7):
        module._timed([1, 2, 4], cast(Any, steps), cast(Any, Alone()), select_device(config_of().run), 7)
    rounds = [order[first : first + 3] for first in range(0, 21, 3)]
    assert all(sorted(one) == [1, 2, 4] for one in rounds)
    assert {one[0] for one in rounds} == {1, 2, 4}


@pytest.mark.exhaustive
def test_the_command_tunes_on_its_own_ranks_and_a_run_reads_what_it_found(tiny: Tiny) -> None:
    path = tiny.folder / "ops.tuned.toml"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def drivetrain(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "drivetrain", *arguments, "--json"]
        done = subprocess.run(
            command,
            cwd=tiny.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    layout = ("parallelism.tensor_model_parallel_size=2", "training.micro_batch_size=1")
    report = drivetrain("ops", "tune", str(tiny.file), *layout, "--output", str(path), "--budget", "600s")
    assert [one["status"] for one in report["calls"]] == ["tuned"] * 4
    assert all(one["candidates"][0]["backend"] == "1" for one in report["calls"])
    summary = drivetrain(
        "train", str(tiny.file), *layout, "overlap.tp_chunks=tuned", f"fusion.tuned_file={path}"
    )
    (record,) = [one for one in summary["optimisations"] if one["name"] == "tp_chunks"]
    assert record["requested"]
    assert record["active"] == any(one["backend"] != "1" for one in report["calls"])
    if not record["active"]:
        assert "one piece is fastest" in record["reason"]
