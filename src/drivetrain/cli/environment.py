"""What a verb needs installed."""

import importlib.util

from drivetrain.errors import EnvironmentFault

__all__ = ["require_packages", "require_torch"]


def require_packages(*names: str) -> None:
    """Raise EnvironmentFault with the command that mends it when one of these packages is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentFault(
            f"this command needs the training engine, and {', '.join(missing)} cannot be imported; install it "
            "with: pip install 'drivetrain[train]'"
        )


def require_torch() -> None:
    """:func:`require_packages` for everything that training needs."""
    require_packages("torch", "safetensors", "tokenizers")
