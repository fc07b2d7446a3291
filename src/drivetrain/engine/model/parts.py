"""Named parts of a layer, so that a part can be run in another way than by a plain call. What ways there are the model
does not know."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, get_args

__all__ = ["PARTS", "HasParts", "Part", "RunPart"]

Part = Literal["core_attn", "mlp", "mlp_act", "norm"]
"""Attention proper, between the projections; the MLP; its activation, between its matrices; each norm of the residual
stream."""

PARTS: tuple[Part, ...] = get_args(Part)

RunPart = Callable[..., Any]
"""From a function and its arguments to what the function returns."""

_Result = TypeVar("_Result")


class HasParts:
    """What a module with such parts inherits beside its own base.

    Attributes:
        ways: how a part is run; None, and those that are not named: plain calls.
    """

    ways: Mapping[Part, RunPart] | None = None

    def part(self, name: Part, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """``function(*arguments)``, run as this module's ``ways`` say."""
        return self.way(name, function)(*arguments)

    def way(self, name: Part, function: Callable[..., _Result]) -> Callable[..., _Result]:
        """What to call instead of ``function``. For one that breaks graphs of compiled code: called from here, it
        would break this graph as well."""
        if self.ways is None or name not in self.ways:
            return function
        return functools.partial(self.ways[name], function)
