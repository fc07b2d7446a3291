"""Tokens that other tools left: opened as they are, without preparing.

What lives here: recognising a file by its first bytes (``detect``), one file a format that reads it as documents, and
``opening`` which chooses. Megatron's ``.bin/.idx``, our own format too, is in ``indexed``.
"""

__all__: list[str] = []
