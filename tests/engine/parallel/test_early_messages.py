"""Messages of a pipeline leave when they are there, and are on their way before they are needed."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from drivetrain.config import ModelConfig
from drivetrain.config.layout import Layout
from drivetrain.config.stages import Schedule, plan_stages
from drivetrain.engine.model.batch import Batch, whole_sequences
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.parallel.early_messages import EarlyStage, early
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline import Pipeline, decoder_of_rank
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.traffic import Traffic
from rank_processes import on_kept_ranks

CPU = torch.device("cpu")
MODEL = ModelConfig(
    num_layers=4, hidden_size=16, ffn_hidden_size=32, num_attention_heads=2, seq_length=8, vocab_size=32
)
RANKS, MICRO_BATCHES = 2, 4


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    return [
        whole_sequences(torch.randint(MODEL.vocab_size, (2, MODEL.seq_length), generator=generator))
        for _ in range(MICRO_BATCHES)
    ]


class Noted:
    """A message whose beginning and wait are noted."""

    def __init__(self, log: list[str], what: str, work: dist.Work) -> None:
        self._log, self._what, self._work = log, what, work

    def wait(self) -> None:
        self._log.append(f"wait {self._what}")
        self._work.wait()


def logged(schedule: Schedule, log: list[str]) -> type[EarlyStage]:
    class LoggedStage(EarlyStage):
        def _begun(self, operation: dist.P2POp) -> Any:
            kind = "send" if operation.op is dist.isend else "receive"
            number = sum(line.startswith(f"begin {kind}") for line in log)
            log.append(f"begin {kind} {number}")
            return Noted(log, f"{kind} {number}", super()._begun(operation))

        def forward_one_chunk(self, index: int, *arguments: Any, **settings: Any) -> Any:
            log.append(f"F{index}")
            return super().forward_one_chunk(index, *arguments, **settings)

        def backward_one_chunk(self, index: int, *arguments: Any, **settings: Any) -> Any:
            log.append(f"B{index}")
            return super().backward_one_chunk(index, *arguments, **settings)

    return LoggedStage


def logs_of(schedules: Sequence[Schedule]) -> dict[str, tuple[list[str], float, list[str]]]:
    """Per schedule: what a training step did, its loss, and what an evaluation did."""
    found = {}
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        mesh = Mesh.form(Layout(pp=RANKS), group.ranks.rank)
        for schedule in schedules:
            log: list[str] = []
            plan = plan_stages(MODEL.num_layers, RANKS, schedule, None, None)
            decoder = decoder_of_rank(MODEL, torch.float64, plan, mesh.index("pp"), CPU)
            initialize(decoder, 1)

            class Logged(Pipeline):
                early_stage_type = logged(schedule, log)

            pipeline = Logged(decoder, plan, schedule, mesh, CPU, Traffic())
            loss = pipeline.run(batches(), 100)
            training = log.copy()
            log.clear()
            pipeline.evaluate(batches())
            found[schedule] = training, loss.item(), log.copy()
    return found


@pytest.fixture(scope="module")
def logs() -> list[dict[str, tuple[list[str], float, list[str]]]]:
    return on_kept_ranks(logs_of, RANKS, ("gpipe", "1f1b"))


def position(log: list[str], line: str) -> int:
    assert log.count(line) == 1, (line, log)
    return log.index(line)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_pass_waits_for_a_send(schedule: str, logs: list[dict[str, Any]]) -> None:
    for rank in logs:
        for log in (rank[schedule][0], rank[schedule][2]):
            last_pass = max(index for index, line in enumerate(log) if line[0] in "FB")
            for number in range(sum(line.startswith("begin send") for line in log)):
                assert position(log, f"begin send {number}") < position(log, f"wait send {number}")
                assert position(log, f"wait send {number}") > last_pass


def test_a_send_begins_right_behind_the_pass_that_made_it(logs: list[dict[str, Any]]) -> None:
    first, second = (rank["1f1b"][0] for rank in logs)
    for number in range(MICRO_BATCHES):
        assert first[position(first, f"F{number}") + 1] == f"begin send {number}"
        assert second[position(second, f"B{number}") + 1] == f"begin send {number}"


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_receive_is_under_way_a_micro_batch_before_it_is_needed(
    schedule: str, logs: list[dict[str, Any]]
) -> None:
    first, second = (rank[schedule][0] for rank in logs)
    for number in range(1, MICRO_BATCHES):
        assert position(second, f"begin receive {number}") < position(second, f"F{number - 1}")
        assert position(second, f"wait receive {number}") < position(second, f"F{number}")
        assert position(first, f"begin receive {number}") < position(first, f"B{number - 1}")
        assert position(first, f"wait receive {number}") < position(first, f"B{number}")


def test_order_and_number_of_messages_are_the_schedule_s(logs: list[dict[str, Any]]) -> None:
    for rank in logs:
        for schedule in ("gpipe", "1f1b"):
            training, _, evaluation = rank[schedule]
            assert sum(line.startswith("begin") for line in training) == 2 * MICRO_BATCHES
            assert sum(line.startswith("wait") for line in training) == 2 * MICRO_BATCHES
            assert sum(line.startswith("begin") for line in evaluation) == MICRO_BATCHES
        passes = {name: [line for line in rank[name][0] if line[0] in "FB"] for name in ("gpipe", "1f1b")}
        assert passes["gpipe"] == [f"{kind}{number}" for kind in "FB" for number in range(MICRO_BATCHES)]
        assert sorted(passes["1f1b"]) == sorted(passes["gpipe"])
        assert rank["gpipe"][1] == pytest.approx(rank["1f1b"][1], rel=1e-12)


def test_messages_of_other_schedules_and_devices_are_torch_s() -> None:
    assert early("1f1b", CPU)
    assert not early("1f1b", torch.device("cuda"))
    assert not early("interleaved_1f1b", CPU)
