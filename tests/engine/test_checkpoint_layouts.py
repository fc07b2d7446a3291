"""Checkpoints across layouts: saved by ranks that hold parts, loaded by others that hold other parts.

The layouts are made by hand, so that nothing but names and placements connects a rank with a file.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from drivetrain.config.model import ModelConfig
from drivetrain.engine.checkpoint import (
    HeldState,
    agreement_over,
    damage,
    load_checkpoint,
    save_checkpoint,
    whole_state,
)
from drivetrain.engine.checkpoint.tensor_files import WholeTensor, lay_out
from drivetrain.engine.checkpoint.write_plan import describe, plan_writes
from drivetrain.engine.model.huggingface_state import state_from_huggingface
from drivetrain.engine.parallel.gradient_sync import Held
from drivetrain.engine.parallel.placement import Placement, Shard
from drivetrain.engine.parallel.process_group import Ranks, join
from drivetrain.errors import CheckpointError
from rank_processes import on_kept_ranks
from tiny_training import GPT, LLAMA, MODELS, OWN, Training, names

Parts = Callable[[str, tuple[int, ...]], Placement | None]
"""Where a rank's part of a parameter lies; None: the rank holds nothing of it."""


def whole(name: str, shape: tuple[int, ...]) -> Placement | None:
    return Placement(shape)


def shard(shape: tuple[int, ...], dim: int, index: int, parts: int, group: str) -> Shard:
    """Nearly equal parts, larger ones first; the last may be empty."""
    size = -(-shape[dim] // parts)
    first = min(shape[dim], index * size)
    return Shard(group, dim, first, min(size, shape[dim] - first))


def tensor_parallel(index: int, parts: int) -> Parts:
    """Columns of what writes into the residual stream, rows of the other matrices; norms whole."""

    def place(name: str, shape: tuple[int, ...]) -> Placement | None:
        if len(shape) < 2:
            return Placement(shape)
        dim = 1 if name.endswith(("attention.output.weight", "mlp.down.weight")) else 0
        return Placement(shape, (shard(shape, dim, index, parts, "tp"),))

    return place


def tensor_and_data_parallel(tp: int, dp: int) -> Parts:
    """TP 2, and the rows that are left over two data-parallel ranks: two cuts of one dimension, or of two."""

    def place(name: str, shape: tuple[int, ...]) -> Placement | None:
        first = tensor_parallel(tp, 2)(name, shape)
        assert first is not None
        rows = first.local_shape[0]
        begin = first.slices()[0].start
        half = -(-rows // 2)
        cut = Shard("dp_shard", 0, begin + min(rows, dp * half), min(half, rows - dp * half))
        return first.cut(cut)

    return place


def fully_sharded(index: int, parts: int) -> Parts:
    """Rows of everything."""
    return lambda name, shape: Placement(shape, (shard(shape, 0, index, parts, "dp_shard"),))


def stage(index: int) -> Parts:
    """Two pipeline stages of a two-layer model; a tied embedding is on both."""

    def place(name: str, shape: tuple[int, ...]) -> Placement | None:
        first = name.startswith(("embedding", "position_embedding", "blocks.0."))
        last = name.startswith(("embedding", "final_norm", "output", "blocks.1."))
        return Placement(shape) if (first, last)[index] else None

    return place


LAYOUTS: dict[str, list[Parts]] = {
    "one": [whole],
    "replicas": [whole, whole],
    "tp2": [tensor_parallel(0, 2), tensor_parallel(1, 2)],
    "shards4": [fully_sharded(index, 4) for index in range(4)],
    "shards3": [fully_sharded(index, 3) for index in range(3)],
    "tp2-dp2": [tensor_and_data_parallel(tp, dp) for dp in range(2) for tp in range(2)],
    "pp2": [stage(0), stage(1)],
}


def part_of(state: HeldState, parts: Parts, *, blank: bool = False) -> HeldState:
    """What a rank of a layout holds of a whole state: copies of its parts, or (blank) room for them."""

    def cut(tensors: Mapping[str, Held]) -> dict[str, Held]:
        found = {}
        for name, held in tensors.items():
            parameter, _, key = name.partition("/")
            shape = tuple(state.weights[parameter].tensor.shape)
            place = parts(parameter, shape)
            if place is None:
                continue
            if key == "step":
                place = Placement(())
            values = held.tensor[place.slices()].clone()
            found[name] = Held(torch.full_like(values, float("nan")) if blank else values, place)
        return found

    return HeldState(cut(state.weights), cut(state.optimizer))


def trained(model: ModelConfig, steps: int = 2) -> Training:
    """The same weights and moments in every process."""
    torch.manual_seed(11)
    training = Training(model)
    training.train(steps)
    return training


def saves(model: ModelConfig, layout: str, folder: str, shard_bytes: int) -> None:
    """On one rank of ``layout``: save its part."""
    ranks = Ranks.from_environment()
    training = trained(model)
    state = part_of(whole_state(training.decoder, training.optimizer), LAYOUTS[layout][ranks.rank])
    with join(ranks, "cpu", 1.0) as group:
        save_checkpoint(
            Path(folder),
            training.step,
            model=model,
            state=state,
            trainer_state={"samples": 4},
            keep_latest_k=2,
            agreement=agreement_over(group),
            max_shard_bytes=shard_bytes,
        )


def loads(model: ModelConfig, layout: str, path: str) -> tuple[int, str]:
    """On one rank of ``layout``: load its part and compare with what was saved; the error in words, if any."""
    ranks = Ranks.from_environment()
    training = trained(model)
    everything = whole_state(training.decoder, training.optimizer)
    parts = LAYOUTS[layout][ranks.rank]
    expected, found = part_of(everything, parts), part_of(everything, parts, blank=True)
    with join(ranks, "cpu", 1.0) as group:
        try:
            loaded = load_checkpoint(Path(path), model, found, agreement=agreement_over(group))
        except CheckpointError as error:
            assert all(
                bool(held.tensor.isnan().all())
                for held in [*found.weights.values(), *found.optimizer.values()]
            )
            return -1, str(error)
    assert found.weights.keys() == expected.weights.keys()
    for kind in ("weights", "optimizer"):
        for name, held in getattr(found, kind).items():
            assert torch.equal(held.tensor, getattr(expected, kind)[name].tensor), name
    return loaded.step, ""


def on_layout(function: Callable[..., Any], model: ModelConfig, layout: str, *arguments: Any) -> list[Any]:
    return on_kept_ranks(function, len(LAYOUTS[layout]), model, layout, *arguments)


@pytest.mark.parametrize(
    ("model", "chain"),
    [
        ("llama", ["tp2", "one", "shards4"]),
        ("llama", ["shards3", "tp2-dp2", "pp2"]),
        ("llama", ["pp2", "replicas", "tp2"]),
        ("gpt", ["tp2-dp2", "shards3", "one"]),
        ("own", ["tp2", "shards4", "one"]),
    ],
)
def test_what_one_layout_saves_every_other_loads_to_the_bit(
    model: str, chain: Sequence[str], tmp_path: Path
) -> None:
    """Saved by the first layout and loaded by all three."""
    on_layout(saves, MODELS[model], chain[0], str(tmp_path), 10**9)
    path = tmp_path / "step-00000002"
    assert damage(path) is None
    for layout in chain:
        assert set(on_layout(loads, MODELS[model], layout, str(path))) == {(2, "")}


@pytest.mark.parametrize("layout", ["tp2", "pp2", "shards3", "tp2-dp2"])
def test_the_files_of_any_layout_are_those_of_a_single_process(layout: str, tmp_path: Path) -> None:
    training = trained(LLAMA)
    one = training.save(tmp_path / "one")
    on_layout(saves, LLAMA, layout, str(tmp_path / "many"), 10**9)
    many = tmp_path / "many" / one.name
    for name in ("model/model.safetensors", "model/config.json", "optimizer.safetensors"):
        assert (many / name).read_bytes() == (one / name).read_bytes(), name
    assert {path.name for path in many.iterdir()} == {path.name for path in one.iterdir()}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the ranks have: sums in another number of threads have other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("model", "layout"), [("llama", "tp2-dp2"), ("gpt", "shards3"), ("gpt", "tp2")])
def test_transformers_opens_what_several_ranks_wrote(model: str, layout: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    on_layout(saves, MODELS[model], layout, str(tmp_path), 3000)
    folder = tmp_path / "step-00000002" / "model"
    assert len(list(folder.glob("model-*-of-*.safetensors"))) > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32).eval()
    ids = torch.randint(MODELS[model].vocab_size, (2, 8), generator=torch.Generator().manual_seed(1))
    training = trained(MODELS[model])
    with torch.no_grad():
        logits = theirs(ids).logits
    expected = {name: parameter.detach() for name, parameter in training.decoder.named_parameters()}
    state = {name: tensor.detach() for name, tensor in theirs.state_dict().items()}
    if not MODELS[model].untie_embeddings_and_output_weights:
        state.pop("lm_head.weight", None)
    found = state_from_huggingface(state, MODELS[model])
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert bool(logits.isfinite().all())


def test_a_rank_that_holds_no_row_of_a_tensor_saves_and_loads_the_others(tmp_path: Path) -> None:
    """Five rows over four ranks: two, two, one and none."""
    model = LLAMA.model_copy(update={"vocab_size": 5})
    empty = fully_sharded(3, 4)("embedding.weight", (5, 16))
    assert empty is not None
    assert empty.local_shape == (0, 16)
    on_layout(saves, model, "shards4", str(tmp_path), 10**9)
    for layout in ("shards4", "one"):
        assert set(on_layout(loads, model, layout, str(tmp_path / "step-00000002"))) == {(2, "")}


def test_a_checkpoint_in_many_files_is_loaded_by_another_layout(tmp_path: Path) -> None:
    on_layout(saves, LLAMA, "tp2", str(tmp_path), 3000)
    path = tmp_path / "step-00000002"
    assert len(list(path.glob("optimizer-*-of-*.safetensors"))) > 2
    assert set(on_layout(loads, LLAMA, "shards3", str(path))) == {(2, "")}


def test_a_checkpoint_written_whole_by_the_formats_own_writer_is_loaded_in_parts(tmp_path: Path) -> None:
    """Files of other programs, and of versions whose rank 0 wrote everything, have tensors in another order."""
    path = trained(LLAMA).save(tmp_path)
    for name in ("model/model.safetensors", "optimizer.safetensors"):
        save_file(dict(reversed(load_file(path / name).items())), path / name, metadata={"format": "pt"})
    assert set(on_layout(loads, LLAMA, "tp2", str(path))) == {(2, "")}


def test_each_part_is_written_once_and_replicas_share_the_work() -> None:
    training = trained(LLAMA)
    state = whole_state(training.decoder, training.optimizer)
    tensors = {**state.weights, **state.optimizer}
    plan = plan_writes([describe(tensors)] * 4)
    assert sorted(name for names in plan.written_by for name in names) == sorted(tensors)
    sizes = [sum(tensors[name].tensor.nbytes for name in names) for names in plan.written_by]
    largest = max(held.tensor.nbytes for held in tensors.values())
    assert max(sizes) - min(sizes) <= largest


def test_a_part_that_no_rank_holds_is_found_before_anything_is_written(tmp_path: Path) -> None:
    training = trained(LLAMA)
    state = part_of(whole_state(training.decoder, training.optimizer), tensor_parallel(0, 2))
    with pytest.raises(CheckpointError, match=r"no rank holds all of embedding.weight"):
        save_checkpoint(tmp_path, 1, model=LLAMA, state=state, trainer_state={}, keep_latest_k=1)
    assert names(tmp_path) == []


def test_only_the_parts_of_a_rank_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.engine.checkpoint import source

    path = trained(LLAMA).save(tmp_path)
    read: dict[str, int] = {}
    original = source.TensorSource.read

    def count(self: source.TensorSource, tensor: str, region: Any) -> torch.Tensor:
        values = original(self, tensor, region)
        read[tensor] = read.get(tensor, 0) + values.numel()
        return values

    monkeypatch.setattr(source.TensorSource, "read", count)
    training = trained(LLAMA)
    state = part_of(whole_state(training.decoder, training.optimizer), fully_sharded(1, 4), blank=True)
    load_checkpoint(path, LLAMA, state)
    assert sum(read.values()) == sum(
        held.tensor.numel() for held in [*state.weights.values(), *state.optimizer.values()]
    )


def test_what_an_index_names_is_gone_through_no_more_often_for_more_tensors(tmp_path: Path) -> None:
    from drivetrain.engine.checkpoint import source

    class Counted(list[str]):
        times = 0

        def __iter__(self) -> Iterator[str]:
            self.times += 1
            return super().__iter__()

    file = tmp_path / "many.safetensors"
    save_file({f"t{number}": torch.zeros(1) for number in range(50)}, file)
    expected = Counted(f"t{number}" for number in range(50))
    assert set(source._read_header(file, expected)) == set(expected)
    assert expected.times <= 4


def test_layouts_that_lay_out_files_by_themselves_agree_with_the_format(tmp_path: Path) -> None:
    tensors = {
        "a": WholeTensor((3, 5), torch.bfloat16),
        "b": WholeTensor((), torch.float32),
        "c": WholeTensor((0, 4), torch.float32),
        "d": WholeTensor((7,), torch.float64),
    }
    (file,) = lay_out(tensors, "some", 10**9).files
    file.create(tmp_path)
    found = load_file(tmp_path / "some.safetensors")
    assert {name: (tuple(one.shape), one.dtype) for name, one in found.items()} == {
        name: (one.shape, one.dtype) for name, one in tensors.items()
    }


# Damage: what is wrong is named, on every rank, and no tensor of any rank has changed.


@pytest.fixture(scope="module")
def in_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in many files."""
    folder = tmp_path_factory.mktemp("saved")
    on_layout(saves, LLAMA, "tp2", str(folder), 3000)
    return folder / "step-00000002"


def _index(path: Path) -> dict[str, str]:
    document: dict[str, dict[str, str]] = json.loads(
        (path / "model" / "model.safetensors.index.json").read_bytes()
    )
    return document["weight_map"]


def lose_a_file(path: Path) -> Sequence[str]:
    tensor, file = next(iter(_index(path).items()))
    (path / "model" / file).unlink()
    return [file, tensor, "is missing"]


def cut_a_file(path: Path) -> Sequence[str]:
    file = sorted(path.glob("optimizer-*.safetensors"))[-1]
    last = list(load_file(file))[-1]
    file.write_bytes(file.read_bytes()[:-4])
    return [file.name, "is cut", last.split("/")[0].split(".")[0]]


def cut_a_header(path: Path) -> Sequence[str]:
    file = sorted(path.glob("optimizer-*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:40])
    return [file.name, "is cut in its header"]


def add_a_file(path: Path) -> Sequence[str]:
    save_file({"stray": torch.zeros(2)}, path / "model" / "model-00099-of-00099.safetensors")
    return ["model-00099-of-00099.safetensors", "'stray'", "not named"]


def add_a_tensor(path: Path) -> Sequence[str]:
    file = sorted((path / "model").glob("*.safetensors"))[0]
    save_file({**load_file(file), "stray": torch.zeros(2)}, file)
    return [file.name, "'stray'"]


def lose_a_tensor(path: Path) -> Sequence[str]:
    file = sorted(path.glob("optimizer-*.safetensors"))[0]
    first, *_ = (tensors := load_file(file))
    save_file({name: one for name, one in tensors.items() if name != first}, file)
    return [file.name, repr(first), "lacks"]


def change_a_dtype(path: Path) -> Sequence[str]:
    file = sorted(path.glob("optimizer-*.safetensors"))[0]
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name].bfloat16()}, file)
    return [file.name, repr(name), "bfloat16"]


def lose_the_index(path: Path) -> Sequence[str]:
    (path / "optimizer.safetensors.index.json").unlink()
    return ["optimizer.safetensors.index.json", "is missing"]


HARMS = [
    lose_a_file,
    cut_a_file,
    cut_a_header,
    add_a_file,
    add_a_tensor,
    lose_a_tensor,
    change_a_dtype,
    lose_the_index,
]


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_harm_is_named_on_every_rank_and_nothing_is_half_loaded(
    harm: Callable[[Path], Sequence[str]], in_files: Path, tmp_path: Path
) -> None:
    path = tmp_path / in_files.name
    shutil.copytree(in_files, path)
    words = harm(path)
    for step, message in on_layout(loads, LLAMA, "tp2", str(path)):
        assert step == -1, "it was loaded all the same"
        assert all(word in message for word in words), (words, message)


def test_harm_that_one_rank_meets_stops_all_of_them(in_files: Path, tmp_path: Path) -> None:
    """A stage that holds nothing of a tensor does not look at its dtype: it hears of it from the other."""
    path = tmp_path / in_files.name
    shutil.copytree(in_files, path)
    for file in path.glob("optimizer-*.safetensors"):
        tensors = load_file(file)
        save_file(
            {
                name: one.double() if name == "final_norm.weight/exp_avg" else one
                for name, one in tensors.items()
            },
            file,
        )
    (first, told), (second, met) = on_layout(loads, LLAMA, "pp2", str(path))
    assert (first, second) == (-1, -1)
    assert "final_norm.weight/exp_avg" in met
    assert told == f"rank 1: {met}"


@pytest.mark.parametrize("other", [OWN, GPT, LLAMA.model_copy(update={"ffn_hidden_size": 80})])
def test_a_checkpoint_of_another_model_is_refused_by_every_rank(other: ModelConfig, in_files: Path) -> None:
    for step, message in on_layout(loads, other, "tp2", str(in_files)):
        assert step == -1
        assert "another model" in message


def test_random_parts_cover_what_they_cover() -> None:
    """The plan finds a hole wherever a counter of elements finds one."""
    generator = np.random.default_rng(3)
    verdicts = set()
    for _ in range(200):
        shape = (int(generator.integers(1, 6)), int(generator.integers(1, 6)))
        counted = np.zeros(shape, dtype=bool)
        described = []
        for _ in range(int(generator.integers(1, 6))):
            bounds = [sorted(generator.integers(0, size + 1, 2).tolist()) for size in shape]
            place = Placement(
                shape, tuple(Shard("tp", dim, first, end - first) for dim, (first, end) in enumerate(bounds))
            )
            counted[place.slices()] = True
            described.append(describe({"a": Held(torch.zeros(place.local_shape), place)}))
        verdict = plan_writes(described).uncovered == ()
        assert verdict == bool(counted.all())
        verdicts.add(verdict)
    assert verdicts == {True, False}
