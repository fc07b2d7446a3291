"""What operators around matrix products do beyond their numerics; tests stand for bugs of other libraries."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from drivetrain.engine.ops import _chunked_cross_entropy
from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.grouped_product import grouped_product, loop_over_experts, torch_grouped_mm
from drivetrain.engine.ops.linear_cross_entropy import linear_cross_entropy
from drivetrain.engine.ops.modules_products import mean_loss
from drivetrain.engine.ops.selection import Selection
from drivetrain.errors import DrivetrainError

pytestmark = [
    # Torch's own, when Inductor is imported.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # Dynamo makes an object of what it traces.
    pytest.mark.filterwarnings(
        "ignore:.*autograd.function.Function.* should not be instantiated:DeprecationWarning"
    ),
    # Dynamo looks at every tensor that it meets, and hides this one warning itself, unless warnings are errors.
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"
    ),
]

CALLS = {
    "linear_cross_entropy": "a weight for each token",
    "grouped_product": "rows past the last expert",
    "linear": "bias",
    "qkv_product": "odd sizes",
    "gate_up_product": "odd sizes",
}
CALLS_OF = {("linear_cross_entropy", "in_place"): "odd sizes"}
"""Of a backend that refuses the call of the others."""
BACKENDS = [
    ("linear_cross_entropy", "eager", torch.float32),
    ("linear_cross_entropy", "chunked", torch.float32),
    ("linear_cross_entropy", "chunked", torch.bfloat16),
    ("linear_cross_entropy", "in_place", torch.float32),
    ("linear_cross_entropy", "in_place", torch.bfloat16),
    ("grouped_product", "eager", torch.float32),
    ("grouped_product", "torch_grouped_mm", torch.float32),
    ("linear", "transposed_gradient", torch.bfloat16),
    ("qkv_product", "joined", torch.float32),
    ("gate_up_product", "joined", torch.float32),
]


def called(
    name: str, backend: str, dtype: torch.dtype
) -> tuple[Callable[..., Any], dict[str, Any], list[Tensor]]:
    """A function to the outputs with gradients, arguments, and the leaves among them."""
    operator = operator_named(name)
    case = next(case for case in operator.cases() if case.name == CALLS_OF.get((name, backend), CALLS[name]))
    given = case.make(dtype, torch.Generator().manual_seed(7))
    selection = Selection(requested={name: backend})

    def call(**given: Any) -> tuple[Tensor, ...]:
        outputs = selection.call(operator, **given)
        if isinstance(outputs, Tensor):
            return (outputs,)
        return tuple(one for one in outputs if one.requires_grad)

    return call, given, [one for one in given.values() if isinstance(one, Tensor) and one.requires_grad]


@pytest.mark.parametrize(("name", "backend", "dtype"), BACKENDS)
def test_a_second_backward_gives_its_own_gradients(name: str, backend: str, dtype: torch.dtype) -> None:
    """Backward that overwrites what it saved is wrong the second time (quack 209, unsloth-zoo 610, ms-swift 10130)."""
    call, given, leaves = called(name, backend, dtype)
    outputs = call(**given)
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in outputs]
    first = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)
    doubled = torch.autograd.grad(outputs, leaves, [2 * one for one in upstream], retain_graph=True)
    nothing = torch.autograd.grad(outputs, leaves, [0 * one for one in upstream], retain_graph=True)
    again = torch.autograd.grad(outputs, leaves, upstream)
    for one, two, zero, other in zip(first, doubled, nothing, again, strict=True):
        assert torch.equal(2 * one, two)
        assert not zero.any()
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "backend", "dtype"), BACKENDS)
def test_only_some_gradients_may_be_wanted(name: str, backend: str, dtype: torch.dtype) -> None:
    call, given, leaves = called(name, backend, dtype)
    outputs = call(**given)
    wanted = torch.autograd.grad(outputs, leaves, [torch.ones_like(one) for one in outputs])
    with torch.no_grad():
        assert call(**given) == () or not call(**given)[0].requires_grad
    for leaf, gradient in zip(leaves, wanted, strict=True):
        for other in leaves:
            other.requires_grad_(other is leaf)
        alone = call(**given)
        (found,) = torch.autograd.grad(alone, [leaf], [torch.ones_like(one) for one in alone])
        torch.testing.assert_close(found, gradient)


# The loop reads on the host how many rows an expert has: it is no graph. Of torch's grouped product a graph has bf16
# alone (torch 2.13).
COMPILABLE = [
    (name, backend, torch.bfloat16 if name == "grouped_product" else dtype)
    for name, backend, dtype in BACKENDS
    if (name, backend) != ("grouped_product", "eager")
]


@pytest.mark.parametrize(
    ("name", "backend", "dtype"),
    [
        pytest.param(
            *one,
            marks=[] if one[:2] not in [other[:2] for other in COMPILABLE[:number]] else pytest.mark.long,
        )
        for number, one in enumerate(COMPILABLE)
    ],
)
def test_compiled_whole_it_computes_the_same(name: str, backend: str, dtype: torch.dtype) -> None:
    """Operators that break a graph, or that compiled code calls wrongly (pytorch 180642)."""
    call, given, leaves = called(name, backend, dtype)
    plain = call(**given)
    upstream = [torch.ones_like(one) for one in plain]
    wanted = torch.autograd.grad(plain, leaves, upstream)
    torch.compiler.reset()
    backend_call = operator_named(name).backend(backend)
    assert backend_call is not None

    def whole(**given: Any) -> Any:
        return backend_call.call(**given)

    outputs = torch.compile(whole, fullgraph=True, backend="aot_eager")(**given)
    within = [one for one in ((outputs,) if isinstance(outputs, Tensor) else outputs) if one.requires_grad]
    found = torch.autograd.grad(within, leaves, upstream)
    for one, other in zip((*plain, *wanted), (*within, *found), strict=True):
        torch.testing.assert_close(other, one)


# -- linear and cross-entropy --


def drawn(
    tokens: int = 40, features: int = 16, words: int = 50, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, features, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(words, features, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(words, (tokens,), generator=generator)


def chunked(*given: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return _chunked_cross_entropy.chunked_cross_entropy(*given, **options)


def test_the_sum_is_that_of_torch_and_the_count_is_of_what_is_not_ignored() -> None:
    """A mean over all tokens, ignored ones too (TransformerEngine 2476)."""
    hidden, weight, labels = drawn()
    labels[::3] = -100
    total, count = chunked(hidden, weight, labels, chunk_rows=7)
    logits = hidden.detach().double() @ weight.detach().double().t()
    assert total.item() == pytest.approx(float(F.cross_entropy(logits, labels, reduction="sum")), rel=1e-6)
    assert int(count) == int((labels != -100).sum()) < 40
    assert mean_loss(total, count).item() == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-6)


def test_sums_and_counts_add_up_over_micro_batches() -> None:
    """A mean of means weighs tokens by how many stand beside them (flash-linear-attention 539)."""
    hidden, weight, labels = drawn()
    labels[:15] = -100
    whole = mean_loss(*chunked(hidden, weight, labels))
    parts = [chunked(hidden[few], weight, labels[few]) for few in (slice(0, 20), slice(20, 40))]
    total, count = (torch.stack(one).sum(0) for one in zip(*parts, strict=True))
    torch.testing.assert_close(mean_loss(total, count), whole)
    means = torch.stack([mean_loss(*part) for part in parts]).mean()
    assert abs(float((means - whole).detach())) > 1e-3


@pytest.mark.parametrize("compute", [linear_cross_entropy, chunked])
def test_of_ignored_tokens_alone_the_mean_and_its_gradients_are_zero(compute: Callable[..., Any]) -> None:
    """The mean of nothing is not-a-number in torch (pytorch 116349, 75181)."""
    hidden, weight, labels = drawn()
    total, count = compute(hidden, weight, labels.fill_(-100))
    gradients = torch.autograd.grad(mean_loss(total, count), (hidden, weight))
    assert float(total.detach()) == float(count) == 0.0
    assert not any(one.any() for one in gradients)


@pytest.mark.parametrize("compute", [linear_cross_entropy, chunked])
def test_what_an_ignored_token_holds_is_not_looked_at(compute: Callable[..., Any]) -> None:
    """Zero times not-a-number is not zero (torchtitan 1237, transformers 45621)."""
    hidden, weight, labels = drawn()
    weights = torch.ones(40)
    weights[3], labels[5] = 0.0, -100
    right = torch.autograd.grad(compute(hidden, weight, labels, weights)[0], (hidden, weight))
    poisoned = hidden.detach().clone()
    poisoned[[3, 5]] = math.nan
    poisoned.requires_grad_()
    found = torch.autograd.grad(compute(poisoned, weight, labels, weights)[0], (poisoned, weight))
    for one, other in zip(right, found, strict=True):
        assert torch.equal(one, other)


def test_each_token_has_the_gradient_of_its_own_weight() -> None:
    """All gradients multiplied by the first token's (Liger-Kernel 968)."""
    hidden, weight, labels = drawn()
    weights = torch.rand(40, generator=torch.Generator().manual_seed(5))
    logits = hidden @ weight.t()
    right = torch.autograd.grad((F.cross_entropy(logits, labels, reduction="none") * weights).sum(), hidden)[
        0
    ]
    found = torch.autograd.grad(chunked(hidden, weight, labels, weights, chunk_rows=9)[0], hidden)[0]
    torch.testing.assert_close(found, right)
    with pytest.raises(DrivetrainError, match="get no gradient"):
        chunked(hidden, weight, labels, weights.requires_grad_())


def test_two_losses_of_the_same_hidden_states_have_the_gradients_of_both() -> None:
    """Backward that writes over logits is wrong for a second loss (unsloth 5002)."""
    hidden, weight, labels = drawn()
    other = (labels + 1) % 50
    one_by_one = [torch.autograd.grad(chunked(hidden, weight, one)[0], hidden)[0] for one in (labels, other)]
    both = chunked(hidden, weight, labels)[0] + chunked(hidden, weight, other)[0]
    torch.testing.assert_close(torch.autograd.grad(both, hidden)[0], one_by_one[0] + one_by_one[1])


def test_the_loss_is_in_fp32_whatever_the_hidden_states_are_in() -> None:
    """10.875 for 10.868: a loss in bf16 has three digits."""
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float64,) * 2,
    ):
        total, count = chunked(*drawn(dtype=dtype))
        assert total.dtype == count.dtype == wide


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_error_of_the_weights_gradient_does_not_grow_with_the_chunks(dtype: torch.dtype) -> None:
    """Sums rounded to bf16 after every chunk get worse with each (Liger-Kernel 512 and 827, OLMo-core 370)."""
    hidden, weight, labels = drawn(tokens=512, features=24, words=40, dtype=dtype)
    hidden, weight = hidden.detach() + 0.5, (weight.detach() / 5).requires_grad_()
    exact = weight.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(linear_cross_entropy(hidden.double(), exact, labels)[0], exact)

    def error(rows: int) -> float:
        (found,) = torch.autograd.grad(chunked(hidden, weight, labels, chunk_rows=rows)[0], weight)
        return float((found.double() - truth).norm() / truth.norm())

    whole = error(512)
    for rows in (256, 32, 4, 1):
        # In fp32 chunks are summed in fp32 as within a product; the 512 of one row each are 512 roundings of 6e-8.
        assert error(rows) <= (6e-7 if dtype == torch.float32 else 1.7 * whole), rows


def test_gradients_of_gradients_are_refused() -> None:
    hidden, weight, labels = drawn()
    (of_hidden,) = torch.autograd.grad(chunked(hidden, weight, labels)[0], hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(of_hidden.sum(), weight)
    factor = torch.ones((), requires_grad=True)
    (of_hidden,) = torch.autograd.grad(chunked(hidden, weight, labels)[0] * factor, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        of_hidden.sum().backward()


def test_logits_of_all_tokens_never_exist_at_once() -> None:
    from drivetrain.engine.memory import LiveBytes

    hidden, weight, labels = drawn(tokens=2048, features=8, words=512)

    def peak(compute: Callable[..., Any], **options: Any) -> int:
        with LiveBytes() as live:
            torch.autograd.grad(compute(hidden, weight, labels, **options)[0], (hidden, weight))
        return live.peak_bytes

    logits = 2048 * 512 * 4
    assert peak(chunked, chunk_rows=64) < logits / 2
    assert peak(linear_cross_entropy) > 2 * logits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(40, 15)}, "have to be \\(T, D\\) and \\(V, D\\)"),
        ({"hidden": torch.zeros(40, 16, dtype=torch.bfloat16)}, "convert one of them"),
        ({"labels": torch.zeros(39, dtype=torch.int64)}, "have to be int64 \\(40,\\)"),
        ({"labels": torch.zeros(40)}, "have to be int64"),
        ({"token_weights": torch.zeros(40, dtype=torch.int64)}, "floating point"),
        ({"chunk_rows": -1}, "0 or more"),
    ],
)
@pytest.mark.parametrize("backend", ["eager", "chunked", "in_place", "inductor"])
def test_what_does_not_fit_a_cross_entropy_is_refused_in_words(
    backend: str, change: dict[str, Any], message: str
) -> None:
    hidden, weight, labels = drawn()
    call = operator_named("linear_cross_entropy").backend(backend)
    assert call is not None
    with pytest.raises(DrivetrainError, match=message):
        call.call(**{"hidden": hidden, "weight": weight, "labels": labels, **change})


@pytest.mark.parametrize("label", [50, -1])
def test_a_label_outside_the_vocabulary_is_an_error(label: int) -> None:
    hidden, weight, labels = drawn()
    labels[7] = label
    for backend in ("eager", "chunked", "in_place"):
        call = operator_named("linear_cross_entropy").backend(backend)
        assert call is not None
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            call.call(hidden=hidden, weight=weight, labels=labels)


# -- grouped product --

GROUPED = [loop_over_experts, torch_grouped_mm]


def poisoned_memory(*shapes: tuple[int, ...]) -> None:
    """Leave not-a-number where the next tensors of these shapes will lie."""
    blocks = [torch.full(shape, math.nan) for shape in shapes for _ in range(8)]
    del blocks


@pytest.mark.parametrize("compute", GROUPED)
@pytest.mark.parametrize("counts", [[3, 0, 5], [8], [0, 0]])
def test_rows_past_the_last_expert_are_zero_in_result_and_gradient(
    compute: Callable[..., Tensor], counts: list[int]
) -> None:
    """Torch leaves them as memory was, by design (pytorch 193633, flash-attention 2324, TransformerEngine 3484)."""
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    held = int(ends[-1])
    x = torch.randn(held + 6, 16)
    x[held:] = math.nan
    x.requires_grad_()
    weight = torch.randn(len(counts), 16, 24, requires_grad=True)
    for _ in range(3):
        poisoned_memory((held + 6, 24), (held + 6, 16))
        y = compute(x, weight, ends)
        upstream = torch.randn(held + 6, 24)
        upstream[held:] = math.nan
        of_x, of_weight = torch.autograd.grad(y, (x, weight), upstream)
        assert not y[held:].any()
        assert not of_x[held:].any()
        assert bool(of_weight.isfinite().all())


@pytest.mark.parametrize("compute", GROUPED)
@pytest.mark.parametrize("counts", [[0, 4, 0, 0, 9, 0], [0, 0, 0]])
def test_the_gradient_of_an_expert_without_rows_is_exactly_zero(
    compute: Callable[..., Tensor], counts: list[int]
) -> None:
    """It was left unwritten (pytorch 172439, tokamax 887), or missing where all were empty (TransformerEngine 3019)."""
    ends = torch.tensor(counts).cumsum(0).to(torch.int32)
    x = torch.randn(int(ends[-1]), 16, requires_grad=True)
    weight = torch.randn(len(counts), 16, 24, requires_grad=True)
    poisoned_memory(tuple(weight.shape), (16, 24))
    y = compute(x, weight, ends)
    of_x, of_weight = torch.autograd.grad(y.sum(), (x, weight))
    assert of_x.shape == x.shape
    for number, count in enumerate(counts):
        assert bool(of_weight[number].any()) == (count > 0)


def test_rows_that_are_not_aligned_are_refused_by_name() -> None:
    selection = Selection(requested={"grouped_product": "torch_grouped_mm"})
    given = {"ends": torch.tensor([2], dtype=torch.int32)}
    operator = operator_named("grouped_product")
    with pytest.raises(
        DrivetrainError, match="16 bytes: both have to be multiples of 4; those that can: eager"
    ):
        selection.call(operator, x=torch.zeros(2, 6), weight=torch.zeros(1, 6, 8), **given)
    with pytest.raises(DrivetrainError, match="float64 is not among its dtypes"):
        selection.call(operator, x=torch.zeros(2, 8).double(), weight=torch.zeros(1, 8, 8).double(), **given)
    with pytest.raises(DrivetrainError, match="would be copied"):
        selection.call(operator, x=torch.zeros(2, 8), weight=torch.zeros(1, 8, 8).mT[:, :, :4], **given)


@pytest.mark.parametrize("compute", [grouped_product, *GROUPED])
@pytest.mark.parametrize(
    ("ends", "message"),
    [
        ([2, 1], "must not fall"),
        ([2, 9], "nor pass the 5 rows"),
        ([-1, 3], "must not fall"),
        ([3], "have to be int32"),
    ],
)
def test_ends_that_cannot_be_are_refused(
    compute: Callable[..., Tensor], ends: list[int], message: str
) -> None:
    with pytest.raises(DrivetrainError, match=message):
        compute(torch.zeros(5, 8), torch.zeros(2, 8, 8), torch.tensor(ends, dtype=torch.int32))


# -- linear --


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_transposed_gradient_is_served_where_it_gains_alone(dtype: torch.dtype) -> None:
    selection = Selection(requested={"linear": "transposed_gradient"})
    with pytest.raises(DrivetrainError, match="gains in bfloat16 alone"):
        selection.call(
            operator_named("linear"), x=torch.zeros(2, 3).to(dtype), weight=torch.zeros(4, 3).to(dtype)
        )
    with pytest.raises(DrivetrainError, match="on meta"):
        selection.call(
            operator_named("linear"),
            x=torch.zeros(2, 3, device="meta").bfloat16(),
            weight=torch.zeros(4, 3, device="meta").bfloat16(),
        )
