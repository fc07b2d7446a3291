"""Behaviours of the Triton backends of ``adamw`` and ``gradient_clip`` in the interpreter: a script, run by a test in a
process of its own. Prints as JSON what failed, and the names of what was checked."""

import json
import math
import traceback
from typing import Any

import torch
from interpreter import use_exact_bfloat16

from drivetrain.engine.ops import adamw, gradient_clip


def drawn(*shapes: tuple[int, ...]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(4)
    lists = [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(3)]
    return {
        "parameters": lists[0],
        "gradients": lists[1],
        "first_moments": lists[2],
        "second_moments": [one.square() for one in lists[2]],
        "step": torch.tensor(3),
        "learning_rate": torch.tensor(0.1),
    }


def served(operator: Any, **given: Any) -> tuple[torch.Tensor, ...]:
    backend = operator.backend("triton")
    found: tuple[torch.Tensor, ...] = backend.call(**given)
    return found


def custom_operators_pass_torchs_own_checks() -> None:
    given = drawn((5, 7), (0,))
    common = torch.tensor([0.99, 0.3, 1.4])
    for number in range(2):
        four = [given[name][number] for name in list(given)[:4]]
        torch.library.opcheck(torch.ops.drivetrain.adamw_update.default, (*four, common, 0.9, 0.95, 1e-8))
    for size in (0, 3, 4096, 4097):
        torch.library.opcheck(torch.ops.drivetrain.sums_of_squares.default, (torch.randn(size),))


def a_bad_gradient_touches_its_own_element_alone() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        given = drawn((4, 3))
        clean = served(adamw.OPERATOR, **given)
        given["gradients"][0][2, 1] = bad
        for found, before in zip(served(adamw.OPERATOR, **given), clean, strict=True):
            assert not found[2, 1].isfinite()
            found[2, 1] = before[2, 1]
            assert torch.equal(found, before)


def a_gradient_that_is_not_finite_is_not_scaled() -> None:
    for bad in (math.nan, math.inf):
        gradients = [torch.full((5000,), 3.0), torch.tensor([bad, 4.0])]
        *clipped, norm, factor = served(gradient_clip.OPERATOR, gradients=gradients, max_norm=1.0)
        assert not norm.isfinite()
        assert factor.item() == 1.0
        assert torch.equal(clipped[0], gradients[0])
        assert clipped[1][1].item() == 4.0


def both_are_one_graph_of_compiled_code() -> None:
    given = drawn((5, 7), (3,))
    update = torch.compile(
        lambda **given: served(adamw.OPERATOR, **given), backend="aot_eager", fullgraph=True
    )
    for found, wanted in zip(update(**given), served(adamw.OPERATOR, **given), strict=True):
        torch.testing.assert_close(found, wanted)
    clip = torch.compile(
        lambda gradients: served(gradient_clip.OPERATOR, gradients=gradients, max_norm=1.0),
        backend="aot_eager",
        fullgraph=True,
    )
    wanted = served(gradient_clip.OPERATOR, gradients=given["gradients"], max_norm=1.0)
    for one, other in zip(clip(given["gradients"]), wanted, strict=True):
        torch.testing.assert_close(one, other)


CHECKS = (
    custom_operators_pass_torchs_own_checks,
    a_bad_gradient_touches_its_own_element_alone,
    a_gradient_that_is_not_finite_is_not_scaled,
    both_are_one_graph_of_compiled_code,
)


def main() -> None:
    """The script."""
    use_exact_bfloat16()
    torch.set_num_threads(1)
    failed = {}
    for check in CHECKS:
        try:
            check()
        except Exception:  # noqa: BLE001 - whatever it was, the test shows it
            failed[check.__name__] = traceback.format_exc()[-1500:]
    print(json.dumps({"failed": failed, "made": [check.__name__ for check in CHECKS]}))


if __name__ == "__main__":
    main()
