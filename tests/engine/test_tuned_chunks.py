"""What becomes of ``overlap.tp_chunks`` in a run: cut as asked, cut as tuned, or not cut, with the reason."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from drivetrain.config import RunConfig, load_config
from drivetrain.config.layout import layout_of
from drivetrain.engine.devices import select_device
from drivetrain.engine.ops._operator_code import module_of, operator_code
from drivetrain.engine.ops.tuned_file import Candidate, Entry, TunedFile, environment_here
from drivetrain.engine.ops_tuning.writing import write_tuned
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from drivetrain.engine.parallel.chunk_calls import OPERATOR, chunk_calls, link_text
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.engine.parallel.tensor_parallel_overlap import WHOLE, Chunks, TunedChunks
from drivetrain.engine.tuned_chunks import tuned_chunks_of_run
from drivetrain.errors import DrivetrainError
from rank_processes import on_kept_ranks

TP = "parallelism.tensor_model_parallel_size=2"
SMALL = (TP, "training.micro_batch_size=1", "model.seq_length=64", "run.device=cpu")
LINK = "gloo over lo on one machine"


def config_of(*overrides: str) -> RunConfig:
    return load_config("llama-2m", [*SMALL, *overrides]).config


def in_effect(config: RunConfig, tuned: TunedChunks | None = None) -> tuple[Chunks, bool, list[str]]:
    building = Building(config=config, device=select_device(config.run), num_ranks=2, tuned_chunks=tuned)
    optimisations = Optimisations(building)
    optimisations.prepare("choices")
    findings = [text for text in optimisations.findings() if "tp_chunks" in text]
    return building.tp_chunks, optimisations.is_active("tp_chunks"), findings


def test_what_is_not_asked_for_is_not_cut() -> None:
    assert in_effect(config_of()) == (WHOLE, False, [])


def test_a_number_is_that_of_all_products() -> None:
    assert in_effect(config_of("overlap.tp_chunks=4")) == (Chunks.of_all(4), True, [])


def test_more_chunks_than_rows_are_as_many_as_rows_and_said() -> None:
    sequence = ("parallelism.sequence_parallel=true", "overlap.tp_chunks=100")
    assert in_effect(config_of("overlap.tp_chunks=64")) == (Chunks.of_all(64), True, [])
    chunks, active, (finding,) = in_effect(config_of(*sequence))
    assert (chunks, active) == (Chunks.of_all(32), True)
    assert finding.endswith("a micro-batch has 32 rows on each rank: there are 32 chunks, not 100")


def test_what_was_tuned_is_taken_and_what_was_not_is_said() -> None:
    config = config_of("overlap.tp_chunks=tuned")
    chunks = Chunks(qkv=2, output=1, gate_up=4, down=8)
    assert in_effect(config, TunedChunks(chunks, None)) == (chunks, True, [])
    found, active, (finding,) = in_effect(config, TunedChunks(WHOLE, "nothing there"))
    assert (found, active) == (WHOLE, False)
    assert finding == "overlap.tp_chunks = tuned is not in effect: nothing there"
    assert not in_effect(config)[1]


def entries_of(config: RunConfig, chosen: Mapping[str, str], link: str = LINK, code: str = "") -> list[Entry]:
    return [
        Entry(
            operator=OPERATOR,
            call=call.text(config.precision.params_dtype, "cpu", 2, link),
            tokens=call.tokens,
            code=code or operator_code(module_of(OPERATOR)),
            backend=chosen[call.product],
            calls_per_step=call.calls_per_step,
            candidate=(Candidate(backend="1", seconds=1.0),),
        )
        for call in chunk_calls(config)
        if call.product in chosen
    ]


def looked_up(
    path: str, overrides: tuple[str, ...], of_rank: tuple[str, ...] = ()
) -> TunedChunks | str | None:
    config = config_of("overlap.tp_chunks=tuned", f"fusion.tuned_file={path}", *overrides)
    with join(Ranks.from_environment(), "cpu", 1.0) as group:
        if of_rank and group.ranks.rank:
            config = config_of("overlap.tp_chunks=tuned", *of_rank)
        mesh = Mesh.form(layout_of(config, 2), group.ranks.rank)
        try:
            return tuned_chunks_of_run(config, select_device(config.run), group, mesh)
        except DrivetrainError as error:
            return f"{type(error).__name__}: {error}"


def environment_of_ranks() -> dict[str, str]:
    """They compute with one thread."""
    return environment_here(select_device(config_of().run), 1)


CHOSEN = {"qkv": "2", "output": "1", "gate_up": "4", "down": "1000"}


def test_each_product_has_what_was_tuned_for_it(tmp_path: Path) -> None:
    path = tmp_path / "ops.tuned.toml"
    write_tuned(path, environment_of_ranks(), entries_of(config_of(), CHOSEN))
    for found in on_kept_ranks(looked_up, 2, str(path), ()):
        assert found == TunedChunks(Chunks(qkv=2, output=1, gate_up=4, down=64), None)


def test_a_file_of_another_link_machine_or_code_cuts_nothing_and_says_why(tmp_path: Path) -> None:
    path, config = tmp_path / "ops.tuned.toml", config_of()
    here = environment_of_ranks()
    for environment, entries, said in (
        (here, entries_of(config, CHOSEN, link="gloo over lo on 2 machines"), "has nothing for 2 ranks"),
        ({**here, "torch": "1.0"}, entries_of(config, CHOSEN), "torch: 1.0 there"),
        (here, entries_of(config, CHOSEN, code="another"), "tp_chunks has other code now"),
        (here, entries_of(config, {"qkv": "1"}), "of output, gate_up, down: these are not cut"),
        (here, entries_of(config, dict.fromkeys(CHOSEN, "1")), "one piece is fastest"),
    ):
        write_tuned(path, environment, entries)
        for found in on_kept_ranks(looked_up, 2, str(path), ()):
            assert isinstance(found, TunedChunks)
            assert found.chunks == WHOLE
            assert said in (found.reason or ""), said


def test_another_micro_batch_was_not_tuned(tmp_path: Path) -> None:
    path = tmp_path / "ops.tuned.toml"
    write_tuned(path, environment_of_ranks(), entries_of(config_of(), CHOSEN))
    (found, _) = on_kept_ranks(looked_up, 2, str(path), ("model.seq_length=128",))
    assert isinstance(found, TunedChunks)
    assert found.chunks == WHOLE


def test_a_file_that_is_damaged_or_missing_is_refused_on_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "ops.tuned.toml"
    for found in on_kept_ranks(looked_up, 2, str(path), ()):
        assert "there is no tuned file" in str(found)
    write_tuned(path, environment_of_ranks(), entries_of(config_of(), {"qkv": "many"}))
    for found in on_kept_ranks(looked_up, 2, str(path), ()):
        assert "damaged" in str(found)
        assert "many" in str(found)


def test_ranks_with_different_files_are_refused(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.toml", "b.toml")]
    for path, count in zip(paths, ("2", "4"), strict=True):
        write_tuned(path, environment_of_ranks(), entries_of(config_of(), {**CHOSEN, "qkv": count}))
    other = (f"fusion.tuned_file={paths[1]}",)
    for found in on_kept_ranks(looked_up, 2, str(paths[0]), (), other):
        assert "copy one file to all machines" in str(found)


def test_nothing_is_read_where_nothing_is_tuned(tmp_path: Path) -> None:
    config = config_of("overlap.tp_chunks=2", f"fusion.tuned_file={tmp_path / 'absent.toml'}")
    group: object = None
    assert tuned_chunks_of_run(config, select_device(config.run), group, group) is None  # type: ignore[arg-type]


def test_a_tuned_file_with_chunks_is_valid_for_operators_too(tmp_path: Path) -> None:
    path = tmp_path / "ops.tuned.toml"
    write_tuned(path, environment_here(), entries_of(config_of(), CHOSEN))
    assert TunedFile.read(path).problems == ()


@pytest.mark.parametrize(
    ("device", "ranks", "per_host", "expected"),
    [
        ("cpu", [0, 1], 2, "gloo on one machine"),
        ("cpu", [0, 1], 1, "gloo on 2 machines"),
        ("cuda", [0, 1, 2, 3], 2, "nccl on 2 machines"),
    ],
)
def test_a_link_is_described_by_what_it_lies_between(
    device: str, ranks: list[int], per_host: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert link_text(device, ranks, per_host) == expected


def test_shapes_are_those_of_a_rank() -> None:
    config = config_of("model.num_attention_heads=4", "model.num_query_groups=1", "model.hidden_size=64")
    qkv, output, gate_up, down = chunk_calls(config)
    ffn = config.model.ffn_size // 2
    assert (qkv.kind, qkv.inputs, qkv.outputs) == ("copied", 64, (32, 16, 16))
    assert (output.kind, output.inputs, output.outputs) == ("summed", 32, (64,))
    assert (gate_up.inputs, gate_up.outputs, down.inputs, down.outputs) == (64, (ffn, ffn), ffn, (64,))
    sequence = chunk_calls(config_of("parallelism.sequence_parallel=true"))
    assert [call.kind for call in sequence] == ["gathered", "scattered", "gathered", "scattered"]
    assert {call.rows(2) for call in sequence} == {32}
