"""The one JSON document on stdout."""

from collections.abc import Mapping
from typing import Any

__all__ = ["show_document"]


def show_document(document: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout, in ASCII: it is the same whatever the encoding of the terminal."""
    import json
    import re

    from drivetrain.archive.encoding import dumps

    text = dumps(document, indent=True).decode()
    print(re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text), flush=True)
