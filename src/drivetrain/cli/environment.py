"""What a verb needs installed."""

import importlib.util

from drivetrain.errors import EnvironmentFault

__all__ = ["require_torch"]


def require_torch() -> None:
    """Raise EnvironmentFault with the command that mends it when the engine's packages are missing."""
    missing = [
        name for name in ("torch", "safetensors", "tokenizers") if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise EnvironmentFault(
            f"this command needs the training engine, and {', '.join(missing)} cannot be imported; install it "
            "with: pip install 'drivetrain[train]'"
        )
