"""``overlap.tp_symmetric_memory``: refused, said to be without effect, or in effect with the number of its calls."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from drivetrain.archive.reader import open_run
from drivetrain.catalogue import entry
from drivetrain.catalogue.rules import all_rules
from drivetrain.cli.evidence import with_evidence
from drivetrain.config import LaunchFacts, RunConfig, load_config, violations
from drivetrain.engine import capabilities
from drivetrain.engine.capabilities import Capability, capability
from drivetrain.engine.creation import create_run
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.devices import Device, select_device
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from drivetrain.engine.optimisations.tp_symmetric_memory import IMPLEMENTATION
from drivetrain.engine.parallel import symmetric_memory
from drivetrain.engine.parallel.fused_calls import FusedCalls
from drivetrain.engine.parallel.symmetric_memory import meet, why_not_in_this_build
from drivetrain.errors import EnvironmentFault
from drivetrain.measure.optimisation import Count, Observation
from rank_processes import on_ranks
from runs_on_the_spot import Tiny
from symmetric_fallbacks import fallbacks_on_a_cpu

FIELD, NAME = "overlap.tp_symmetric_memory", "tp_symmetric_memory"
TP, SEQUENCE = "parallelism.tensor_model_parallel_size", "parallelism.sequence_parallel"
ASKED = (f"{TP}=2", f"{SEQUENCE}=true", f"{FIELD}=true")
TWO = LaunchFacts(world_size=2)


def config_of(*overrides: str) -> RunConfig:
    return load_config("llama-2m", overrides).config


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ((f"{TP}=2", f"{FIELD}=true"), "nothing is gathered or scattered"),
        ((f"{FIELD}=true",), "has no ranks that gather or scatter"),
    ],
)
def test_without_sequence_parallel_ranks_it_is_refused(overrides: tuple[str, ...], says: str) -> None:
    rule = "tp-symmetric-memory-needs-sequence-parallelism"
    (broken,) = [one for one in violations(config_of(*overrides), TWO, all_rules()) if one.rule == rule]
    assert says in broken.message
    assert f"{FIELD} = false; {TP} = 2 with {SEQUENCE} = true" in broken.message


@pytest.mark.parametrize(
    "other",
    [
        "overlap.tp_chunks=4",
        "overlap.async_tensor_model_parallel_allreduce=true",
        "memory.recompute_granularity=full",
    ],
)
def test_what_overlaps_the_same_collectives_otherwise_is_refused_beside_it(other: str) -> None:
    (broken,) = violations(config_of(*ASKED, other), TWO, all_rules())
    assert "exclude each other" in broken.message


def test_on_a_cpu_it_is_without_effect_and_says_why() -> None:
    config = config_of(*ASKED, "run.device=cpu")
    assert violations(config, TWO, all_rules()) == []
    why = entry(NAME).applies(config, TWO)
    assert why is not None
    assert "for CUDA tensors" in why
    assert entry(NAME).on(config_of(*ASKED[:2]), TWO) is None, (
        "nor is it proposed where the device is not known"
    )


def test_devices_of_several_machines_share_no_memory() -> None:
    config = config_of(*ASKED, "run.device=cuda")
    assert entry(NAME).applies(config, LaunchFacts(world_size=2, local_world_size=2)) is None
    why = entry(NAME).applies(config, LaunchFacts(world_size=2, local_world_size=1))
    assert why is not None
    assert "devices of several machines share no memory" in why


def test_switching_it_on_takes_away_what_it_excludes() -> None:
    config = config_of(*ASKED[:2], "run.device=cuda", "overlap.tp_chunks=4")
    assert entry(NAME).on(config, TWO) == {FIELD: True, "overlap.tp_chunks": "1"}


def building() -> Building:
    config = config_of(*ASKED)
    return Building(config=config, device=select_device(config.run), num_ranks=2)


def test_a_device_that_the_operators_do_not_serve_is_a_finding() -> None:
    optimisations = Optimisations(built := building())
    optimisations.prepare("choices")
    assert built.fused_calls is None
    (finding,) = [text for text in optimisations.findings() if NAME in text]
    assert finding == (
        f"{FIELD} = true is not in effect: torch's fused operators over it are for CUDA tensors, not for those of a cpu"
    )


def on_cuda(monkeypatch: pytest.MonkeyPatch, devices: int, peers: bool = True) -> Capability:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: peers)
    return capability("symmetric_memory", Device("cuda", "a GPU", torch.device("cuda", 0), devices))


def test_devices_that_cannot_read_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_cuda(monkeypatch, 2).available
    apart = on_cuda(monkeypatch, 2, peers=False)
    assert (apart.available, apart.reason) == (False, "devices 0 and 1 cannot read each other's memory")
    assert "shows when they meet" in on_cuda(monkeypatch, 1).detail


def test_a_build_whose_operators_take_other_arguments_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_in_this_build() is None
    monkeypatch.setitem(symmetric_memory._ARGUMENTS, "fused_all_gather_matmul", ["Tensor"])
    why = why_not_in_this_build()
    assert why is not None
    assert "takes other arguments: Tensor, List[Tensor], int, str, bool" in why
    monkeypatch.setattr(symmetric_memory, "_ARGUMENTS", {"fused_nothing": []})
    assert "has no operator symm_mem::fused_nothing" in str(why_not_in_this_build())
    assert not on_cuda(monkeypatch, 2).available


def test_ranks_that_cannot_share_memory_end_the_run_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _symmetric_memory as theirs

    def refuse(name: str, min_size: int) -> None:
        raise RuntimeError("CUDASymmetricMemory requires P2P access\nand more")

    monkeypatch.setattr(theirs, "get_symm_mem_workspace", refuse)
    monkeypatch.setattr(symmetric_memory.dist, "get_process_group_ranks", lambda group: [4, 5])
    group = cast(Any, SimpleNamespace(group_name="tp"))
    meet(group, torch.device("cpu"))
    with pytest.raises(
        EnvironmentFault, match=r"ranks 4, 5 cannot share memory \(CUDASymmetricMemory requires P2P"
    ):
        meet(group, torch.device("cuda"))


def test_versions_that_want_groups_to_be_announced_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import _symmetric_memory as theirs

    announced: list[str] = []
    monkeypatch.setattr(theirs, "enable_symm_mem_for_group", announced.append)
    meet(cast(Any, SimpleNamespace(group_name="tp")), torch.device("cpu"))
    assert announced == ["tp"]


def test_a_step_with_another_number_of_calls_is_no_longer_in_effect() -> None:
    calls = FusedCalls(blocks=2)
    calls.gathers = 5  # of an evaluation before the step
    calls.begin_step()
    calls.gathers, calls.scatters = 5 + 24, 24
    assert calls.end_step(3) == 48
    built = building()
    built.fused_calls = calls
    assert IMPLEMENTATION.at_end is not None
    assert IMPLEMENTATION.at_end(built).active
    calls.begin_step()
    calls.gathers += 23
    calls.scatters += 24
    calls.end_step(3)
    found = IMPLEMENTATION.at_end(built)
    assert not found.active
    assert found.reason == (
        "a step made 23 fused gathers and 24 fused scatters, where 2 blocks and 3 micro-batches make 24 of each"
    )


def fused(gathers: int, scatters: int, **more: Count) -> Observation:
    ranges = {
        "drivetrain/tp_symmetric/all_gather": Count(gathers, 10),
        "drivetrain/tp_symmetric/reduce_scatter": Count(scatters, 10),
        **more,
    }
    return Observation(2, ranges={name: count for name, count in ranges.items() if count.calls})


@pytest.mark.parametrize(
    ("gathers", "scatters", "kind"),
    [(24, 24, "shown"), (24, 23, "absent"), (0, 24, "absent"), (48, 48, "absent")],
)
def test_evidence_counts_the_calls_of_the_window(gathers: int, scatters: int, kind: str) -> None:
    config = config_of(*ASKED, "model.num_layers=3")
    seen = fused(gathers, scatters, **{"drivetrain/forward": Count(2, 10)})
    assert entry(NAME).evidence(config, seen, None).kind == kind


@pytest.mark.parametrize(("each", "kind"), [(48, "shown"), (47, "absent"), (0, "absent")])
def test_evidence_in_a_pipeline_is_of_whole_micro_batches(each: int, kind: str) -> None:
    config = config_of(*ASKED, "parallelism.pipeline_model_parallel_size=2", "model.num_layers=4")
    seen = fused(each, each, **{"drivetrain/pipeline": Count(2, 10)})
    assert entry(NAME).evidence(config, seen, None).kind == kind


def _rank(path: str) -> str:
    from drivetrain.engine.parallel.process_group import Ranks
    from drivetrain.engine.worker import work

    capabilities._PROBES["symmetric_memory"] = lambda _: Capability(
        "symmetric_memory", True, None, "fallbacks"
    )
    with fallbacks_on_a_cpu():
        return work(Path(path), Ranks.from_environment(dict(os.environ))).outcome.status


@pytest.mark.long
def test_a_run_counts_its_fused_calls_and_its_profile_shows_them(tiny: Tiny) -> None:
    """On a CPU that is told that it could, with the operators' fallbacks: what a CUDA device would record."""
    overrides = [
        *ASKED,
        "run.device=auto",
        "training.train_iters=6",
        "profiler.profile=true",
        "profiler.profile_step_start=4",
        "profiler.profile_step_end=6",
    ]
    loaded = load_config(str(tiny.file), overrides)
    corpus = ensure_corpus(loaded.config.data, loaded.config.model)
    path = create_run(loaded, corpus, world_size=2, argv=["drivetrain"])
    assert set(on_ranks(_rank, 2, str(path))) == {"finished"}
    run = open_run(path)
    micro_batches = 2
    per_step = 2 * 4 * loaded.config.model.num_layers * micro_batches
    assert {line["comm/tp_fused_calls"] for line in run.metrics()} == {per_step}
    summary = run.summary()
    assert summary is not None
    summary = dict(with_evidence(path, summary))
    (record,) = [one for one in summary["optimisations"] if one["name"] == NAME]
    assert (record["requested"], record["active"], record["reason"]) == (True, True, None)
    assert record["evidence"] == "shown", record["evidence_why"]
