"""One colour for each group of classes, the same in every figure.

Chosen to stay apart for colour-blind readers (Okabe & Ito's set) and in greyscale print; a label or a legend
always says the same in words.
"""

__all__ = ["colour_of", "group_of"]

_COLOURS = {
    "mfu": "#0072b2",
    "compute": "#56b4e9",
    "recompute": "#8fb8d0",
    "communication": "#e69f00",
    "copy": "#cc79a7",
    "unclassified": "#b0b0b0",
    "bubble": "#f0e442",
    "data": "#d55e00",
    "host": "#009e73",
    "maintenance": "#7f6a9c",
    "idle": "#d9d9d9",
    "unexplained": "#444444",
}
_LOSSES_OF_COMPUTE = {
    "peak_not_achievable": "#a6cee3",
    "peak_and_shortfall": "#a6cee3",
    "memory_bound": "#7fb3d5",
    "shortfall": "#56b4e9",
}


def group_of(class_name: str) -> str:
    """First part of a class's dotted name."""
    return class_name.split(".")[0]


def colour_of(kind: str, class_name: str | None) -> str:
    """Fill of a bar of a waterfall, or of a class (``kind="class"``)."""
    if kind == "mfu":
        return _COLOURS["mfu"]
    if kind in _LOSSES_OF_COMPUTE:
        return _LOSSES_OF_COMPUTE[kind]
    return _COLOURS.get(group_of(class_name or ""), "#999999")
