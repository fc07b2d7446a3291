"""All operators: one in each file or folder of this package that has ``OPERATOR``."""

import functools
import importlib
import pkgutil

import drivetrain.engine.ops
from drivetrain.engine.ops.operator import Operator

__all__ = ["operator_named", "operators"]

_NOT_OPERATORS = frozenset(
    {"discovery", "grid", "numerics", "operator", "selection", "signature", "tuned_file"}
)


@functools.cache
def operators() -> tuple[Operator, ...]:
    """Sorted by name."""
    found: list[Operator] = []
    for module in pkgutil.iter_modules(drivetrain.engine.ops.__path__):
        if module.name in _NOT_OPERATORS or module.name.startswith(("_", "modules_")):
            continue
        loaded = importlib.import_module(f"drivetrain.engine.ops.{module.name}")
        operator = getattr(loaded, "OPERATOR", None)
        if isinstance(operator, Operator):
            assert operator.name == module.name, f"{module.name} holds the operator {operator.name}"
            found.append(operator)
    return tuple(sorted(found, key=lambda operator: operator.name))


def operator_named(name: str) -> Operator:
    """The operator of that name.

    Raises:
        DrivetrainError: there is none.
    """
    from difflib import get_close_matches

    from drivetrain.errors import DrivetrainError

    names = [operator.name for operator in operators()]
    for operator in operators():
        if operator.name == name:
            return operator
    close = get_close_matches(name, names, 1)
    raise DrivetrainError(
        f"there is no operator {name!r}; {f'did you mean {close[0]}? ' if close else ''}there are: {', '.join(names)}"
    )
