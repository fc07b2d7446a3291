"""What every section shares: strict types, no unknown keys, a docstring that is also the help text."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

__all__ = ["Count", "Section"]


class Section(BaseModel):
    """A frozen group of configuration leaves. The string under a field is its help and its documentation."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
        protected_namespaces=(),
    )


def _whole(value: Any) -> Any:
    # 2e9 is a float in TOML; a user who writes it for a number of tokens means a whole number.
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


Count = Annotated[int, BeforeValidator(_whole)]
"""A whole number that may be written as ``1e9``."""
