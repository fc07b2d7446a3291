"""Figures and pages: what people would rather look at than read.

Inline SVG and plain text from the records of ``measure``; no JavaScript, no fonts or files from elsewhere.
Nothing here computes a figure that is not in the records, and nothing reads a trace.
"""

__all__: list[str] = []
