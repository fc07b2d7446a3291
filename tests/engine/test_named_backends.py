"""A backend that is named and cannot serve is refused before there is a run."""

import pytest
from test_operators_in_effect import config_of

from drivetrain.engine import preflight
from drivetrain.engine.preflight import asked_operators, require_servable_backends, unservable_backends
from drivetrain.errors import ConfigurationError


def test_each_backend_that_cannot_serve_is_named_with_those_that_can() -> None:
    config = config_of("fusion.attention=flash_attn", "fusion.glu=triton", "fusion.rms_norm=inductor")
    with pytest.raises(ConfigurationError) as raised:
        require_servable_backends(config)
    attention, glu = raised.value.problems
    assert attention.startswith("fusion.attention = flash_attn: flash_attn cannot serve attention(")
    assert "those that can: eager, " in attention
    assert glu.startswith("fusion.glu = triton: triton cannot serve glu(")
    assert "fusion.allow_fallback = true" in glu


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("fusion.level=all",),
        ("fusion.glu=eager", "fusion.attention=chunked"),
        ("fusion.glu=triton", "fusion.allow_fallback=true"),
        # The model makes no call of it, which the record says.
        ("fusion.layer_norm=triton",),
        ("fusion.glu=triton", "model.activation_func=gelu"),
    ],
)
def test_what_serves_or_is_never_called_or_may_be_replaced_is_accepted(overrides: tuple[str, ...]) -> None:
    require_servable_backends(config_of(*overrides))


def test_nothing_is_recorded_where_no_backend_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it costs time")

    monkeypatch.setattr(preflight, "_refusals", never)
    require_servable_backends(config_of("fusion.level=all", "fusion.glu=eager"))
    with pytest.raises(AssertionError):
        require_servable_backends(config_of("fusion.glu=inductor"))


def test_the_dtype_and_the_mask_are_those_of_the_run() -> None:
    assert unservable_backends(config_of("fusion.linear=transposed_gradient"), "cpu").keys() == {"linear"}
    bf16 = config_of("fusion.linear=transposed_gradient", "precision.params_dtype=bf16")
    assert unservable_backends(bf16, "cpu") == {}
    # No backend for training drops attention weights by draws of torch but those that say so.
    dropping = config_of(
        "fusion.attention=products", "precision.params_dtype=bf16", "model.attention_dropout=0.1"
    )
    assert "dropout" in unservable_backends(dropping, "cpu")["attention"]


def test_an_operator_in_whose_place_another_one_works_is_not_asked() -> None:
    """With dropout by an operator, the residual's addition is its own; without, it is the norm's."""
    overrides = ("fusion.add_rms_norm=triton", "model.hidden_dropout=0.1")
    assert unservable_backends(config_of(*overrides), "cpu").keys() == {"add_rms_norm"}
    assert unservable_backends(config_of(*overrides, "fusion.bias_dropout_add=eager"), "cpu") == {}


def test_a_rank_that_has_a_part_of_the_heads_is_asked_with_that_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from drivetrain.engine.ops.selection import Selection

    seen: dict[str, tuple[int, ...]] = {}
    choose = Selection.choose

    def noted(self: Selection, operator, signature):  # type: ignore[no-untyped-def]
        for name, one in signature.arguments:
            seen[f"{operator.name} {name}"] = one.shape
        return choose(self, operator, signature)

    monkeypatch.setattr(Selection, "choose", noted)
    config = config_of(
        "fusion.attention=chunked",
        "fusion.glu=inductor",
        "fusion.linear_cross_entropy=chunked",
        "parallelism.tensor_model_parallel_size=2",
        "training.micro_batch_size=1",
        "model.seq_length=8",
    )
    assert "linear_cross_entropy" not in asked_operators(config), "its vocabulary is spread"
    assert unservable_backends(config, "cpu") == {}
    assert seen["attention q"] == (8, 2, 8)
    assert seen["attention k"] == (8, 1, 8)
    assert seen["glu gate"] == (8, 24)


def test_a_layout_that_a_named_product_leaves_is_what_the_next_operator_is_asked_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from drivetrain.engine.ops.selection import Selection

    gaps: dict[str, bool] = {}
    choose = Selection.choose

    def noted(self: Selection, operator, signature):  # type: ignore[no-untyped-def]
        gaps[operator.name] = any(not one.contiguous for _, one in signature.arguments)
        return choose(self, operator, signature)

    monkeypatch.setattr(Selection, "choose", noted)
    unservable_backends(config_of("fusion.rotary=inductor", "fusion.qkv_product=joined"), "cpu")
    assert gaps["rotary"]
    unservable_backends(config_of("fusion.rotary=inductor", "fusion.qkv_product=eager"), "cpu")
    assert not gaps["rotary"]
