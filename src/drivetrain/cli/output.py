"""The one JSON document on stdout."""

from collections.abc import Mapping
from typing import Any

__all__ = ["show_document"]


def show_document(document: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout."""
    from drivetrain.archive.encoding import dumps

    print(dumps(document, indent=True).decode(), flush=True)
