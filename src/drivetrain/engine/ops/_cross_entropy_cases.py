"""Calls of the numerics grid of linear and cross-entropy."""

from typing import Any

import torch

from drivetrain.engine.ops.operator import Case

__all__ = ["linear_cross_entropy_cases"]

_SHAPES: tuple[tuple[str, int, int, int, dict[str, Any]], ...] = (
    ("odd sizes", 37, 13, 101, {}),
    ("one token", 1, 8, 5, {}),
    ("two features", 9, 2, 7, {}),
    ("two words", 9, 8, 2, {}),
    ("no tokens", 0, 8, 5, {}),
    ("many words", 5, 16, 5003, {}),
    ("a row at a time", 11, 8, 33, {"chunk_rows": 1}),
    ("chunks that do not divide the rows", 37, 8, 33, {"chunk_rows": 10}),
    ("a chunk larger than all rows", 7, 8, 33, {"chunk_rows": 1000}),
    ("z-loss", 24, 8, 33, {"z_loss": 0.05, "chunk_rows": 7}),
    ("another index is ignored", 24, 8, 33, {"ignore_index": 3}),
)


def linear_cross_entropy_cases() -> list[Case]:
    """Of ``linear_cross_entropy``."""

    def case(
        name: str,
        tokens: int,
        features: int,
        words: int,
        options: dict[str, Any],
        scale: float = 1.0,
        ignored: float = 0.25,
        layout: str = "rows",
        weighted: bool = False,
    ) -> Case:
        def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
            hidden = torch.randn(tokens, features, generator=generator)
            weight = torch.randn(words, features, generator=generator) * scale / features**0.5
            if layout == "columns":
                hidden, weight = hidden.t().contiguous().t(), weight.t().contiguous().t()
            elif layout == "gaps":
                hidden = torch.cat((hidden, hidden), dim=1)[:, :features]
                weight = torch.cat((weight, weight), dim=1)[:, :features]
            labels = torch.randint(words, (tokens,), generator=generator)
            index = options.get("ignore_index", -100)
            labels[torch.rand(tokens, generator=generator) < ignored] = index
            given: dict[str, Any] = {
                "hidden": hidden.to(dtype).requires_grad_(),
                "weight": weight.to(dtype).requires_grad_(),
                "labels": labels,
            }
            if weighted:
                drawn = torch.rand(tokens, generator=generator) * 3
                drawn[::5] = 0
                given["token_weights"] = drawn.to(torch.promote_types(dtype, torch.float32))
            return {**given, **options}

        return Case(name, make)

    return [
        *(case(*one) for one in _SHAPES),
        case("nothing ignored", 24, 8, 33, {}, ignored=-1.0),
        case("everything ignored", 24, 8, 33, {"chunk_rows": 5}, ignored=2.0),
        case("a weight for each token", 24, 8, 33, {"chunk_rows": 5, "z_loss": 0.01}, weighted=True),
        case("large logits", 24, 8, 33, {"chunk_rows": 5}, scale=200.0),
        case("small logits", 24, 8, 33, {"chunk_rows": 5}, scale=1e-3),
        case("columns first in memory", 24, 16, 33, {"chunk_rows": 5}, layout="columns"),
        case("gaps between rows", 24, 16, 33, {"chunk_rows": 5}, layout="gaps"),
        case("everything ignored, no chunks asked for", 24, 8, 33, {}, ignored=2.0),
        case("large logits, no chunks asked for", 24, 8, 33, {}, scale=200.0),
        case("columns first in memory, no chunks asked for", 24, 16, 33, {}, layout="columns"),
        case("gaps between rows, no chunks asked for", 24, 16, 33, {}, layout="gaps"),
    ]
