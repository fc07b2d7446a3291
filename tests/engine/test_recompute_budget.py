"""A budget: what is chosen is the cheapest along the hull, the predicted peak is the counted one, and never above."""

from collections.abc import Mapping
from itertools import cycle, pairwise

import pytest
import torch

from drivetrain.config import ModelConfig, RunConfig
from drivetrain.engine.memory.limit import count_step
from drivetrain.engine.memory.predict import batch_of_borders, whole_rows
from drivetrain.engine.memory.recompute import Recomputation
from drivetrain.engine.memory.recompute_budget import choose, hull, name_of
from drivetrain.engine.memory.recompute_choice import Choice, ChoiceCost, choices_for, plan_of_choices
from drivetrain.engine.memory.recompute_measure import cost_of_choices, peak_of_step
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimizer import build_optimizer, clip_gradients
from drivetrain.errors import ConfigurationError

NOTHING: Choice = frozenset()
NORM: Choice = frozenset({"norm"})
MLP: Choice = frozenset({"mlp"})
COSTS = [
    ChoiceCost(NOTHING, 100, 0),
    ChoiceCost(NORM, 90, 1),
    ChoiceCost(frozenset({"core_attn"}), 85, 50),
    ChoiceCost(MLP, 40, 20),
    ChoiceCost(None, 10, 80),
]


def test_the_hull_leaves_out_what_is_dearer_by_the_byte() -> None:
    assert [name_of(one.choice) for one in hull(COSTS)] == ["nothing", "norm", "mlp", "all"]


def held(choices: Mapping[str, Choice]) -> int:
    """Peak of layers that hold what ``COSTS`` say, and 1000 bytes besides."""
    of = {one.choice: one.held_bytes for one in COSTS}
    return 1000 + sum(of[choice] for choice in choices.values())


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [
        (1400, ["nothing"] * 4),
        (1390, ["norm", "nothing", "nothing", "nothing"]),
        (1360, ["norm"] * 4),
        (1310, ["mlp", "norm", "norm", "norm"]),
        (1040, [None]),
    ],
)
def test_steps_along_the_hull_are_taken_until_the_peak_fits(budget: int, wanted: list[str | None]) -> None:
    plan = choose(["0", "1", "2", "3"], COSTS, budget, held)
    assert plan.peak_bytes == held(plan.choices) <= budget
    if wanted == [None]:
        wanted = ["all"] * 4
    assert [name_of(choice) for choice in plan.choices.values()] == wanted
    assert plan.peak_bytes_without == 1400


def test_a_last_step_that_goes_too_far_is_replaced_by_a_cheaper_one() -> None:
    """From mlp to all would give back 30 bytes; where one is missing, nothing between them does."""
    costs = [*COSTS, ChoiceCost(frozenset({"mlp", "norm"}), 35, 21)]
    of = {one.choice: one.held_bytes for one in costs}
    plan = choose(["0"], costs, 1036, lambda choices: 1000 + of[choices["0"]])
    assert name_of(plan.choices["0"]) == "mlp,norm"


def test_a_budget_that_nothing_fits_is_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(ConfigurationError, match=r"memory\.budget_bytes = 1040$"):
        choose(["0", "1", "2", "3"], COSTS, 1039, held)
    assert choose(["0", "1", "2", "3"], COSTS, 1040, held).peak_bytes == 1040


def test_the_table_names_every_choice_with_its_price() -> None:
    plan = choose(["0", "1", "2", "3"], COSTS, 1360, held)
    text = "\n".join(plan.lines())
    for part in ("1,360 of 1,360", "1,400 with nothing", "1,040 at the least", "norm", "all"):
        assert part in text
    document = plan.to_document()
    assert {one["recomputed"]: one["layers"] for one in document["choices"]}["norm"] == 4
    assert document["layers"] == dict.fromkeys("0123", "norm")


def config_of(model: ModelConfig, budget_bytes: int = 10**12, dtype: str = "fp32") -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": model,
            "training": {"micro_batch_size": 2, "global_batch_size": 4},
            "optimizer": {"fused": False},
            "precision": {"params_dtype": dtype},
            "memory": {"recompute_granularity": "budget", "budget_bytes": budget_bytes},
            "run": {"device": "cpu"},
        }
    )


def llama(**fields: object) -> ModelConfig:
    return ModelConfig.model_validate(
        {
            "num_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "seq_length": 128,
            "vocab_size": 300,
            **fields,
        }
    )


GPT: dict[str, object] = {
    "num_query_groups": None,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "activation_func": "gelu",
    "add_bias_linear": True,
}
MODELS = {
    "llama": (llama(), "fp32"),
    "llama, bf16": (llama(), "bf16"),
    "eight layers": (llama(num_layers=8), "fp32"),
    "long": (llama(seq_length=512), "fp32"),
    "wide": (llama(hidden_size=128, ffn_hidden_size=512), "fp32"),
    "large vocabulary": (llama(vocab_size=4000, seq_length=64), "fp32"),
    "norms of heads": (llama(qk_layernorm=True), "fp32"),
    "gpt": (llama(**GPT), "fp32"),
    "gpt, dropout": (llama(**GPT, hidden_dropout=0.1), "fp32"),
    "gpt, bf16": (llama(**GPT, num_layers=6), "bf16"),
    "gpt, deep": (llama(**GPT, num_layers=8, hidden_size=32), "fp32"),
}


def counted(config: RunConfig, choices: Mapping[str, Choice]) -> int:
    """Most bytes alive in a real step of two micro-batches."""
    decoder = Decoder(
        config.model, torch.float32 if config.precision.params_dtype == "fp32" else torch.bfloat16
    )
    initialize(decoder, 3)
    Recomputation(decoder, plan_of_choices(choices))
    optimizer = build_optimizer(decoder, config.optimizer)
    batches = [batch_of_borders(config, whole_rows(config)) for _ in range(2)]

    def step() -> None:
        for batch in batches:
            (decoder.loss_sum(batch) / 100).backward()
        clip_gradients(decoder.parameters(), 1.0)
        optimizer.step()

    return count_step(step, decoder=decoder, optimizer=optimizer, limit_bytes=None).peak_bytes


class Peaks:
    """Predicted peak of a step of one configuration by choices; each is predicted once."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.found: dict[tuple[Choice, ...], int] = {}

    def __call__(self, choices: Mapping[str, Choice]) -> int:
        key = tuple(choices.values())
        if key not in self.found:
            self.found[key] = peak_of_step(self.config, 1, 0, plan_of_choices(choices))
        return self.found[key]


@pytest.mark.long
@pytest.mark.parametrize(("name", "share"), list(zip(MODELS, cycle((0.25, 0.5, 0.75)), strict=False)))
def test_a_budget_is_used_and_never_exceeded(name: str, share: float) -> None:
    """At that share of the way from recomputing all to recomputing nothing; and less is repeated than by ``full``."""
    model, dtype = MODELS[name]
    config = config_of(model, dtype=dtype)
    layers = [str(layer) for layer in range(config.model.num_layers)]
    costs = cost_of_choices(config, choices_for(compiled=False))
    peak = Peaks(config)
    nothing, everything = (peak(dict.fromkeys(layers, choice)) for choice in (NOTHING, None))
    assert everything < nothing
    budget = int(everything + share * (nothing - everything))
    plan = choose(layers, costs, budget, peak)
    found = counted(config, plan.choices)
    assert found <= plan.peak_bytes <= budget
    # Never less than was counted, or a limit that the plan fits would end its run.
    assert plan.peak_bytes < 1.01 * found
    # One step more of one layer is all that may be left.
    coarsest = max(one.held_bytes - other.held_bytes for one, other in pairwise(hull(costs)))
    assert found >= min(0.95 * budget, budget - coarsest)
    # It fits ``full`` too, which computes more again.
    flops = {one.choice: one.repeated_flops for one in costs}
    assert sum(flops[choice] for choice in plan.choices.values()) < len(layers) * flops[None]


@pytest.mark.long
def test_what_is_cheap_holds_less_and_repeats_no_product() -> None:
    costs = {
        name_of(one.choice): one for one in cost_of_choices(config_of(llama()), choices_for(compiled=False))
    }
    assert costs["nothing"].repeated_flops == 0
    assert costs["all"].held_bytes < costs["mlp,norm"].held_bytes < costs["norm"].held_bytes
    assert costs["norm"].held_bytes < costs["nothing"].held_bytes
    assert costs["norm"].repeated_flops < costs["mlp"].repeated_flops < costs["all"].repeated_flops


def test_compiled_blocks_choose_between_attention_and_all() -> None:
    assert [name_of(choice) for choice in choices_for(compiled=True)] == ["nothing", "core_attn", "all"]
