"""Megatron-LM's words for an uneven pipeline, ``Et*3|(tt|)*2,m|L``, as numbers of layers."""

__all__ = ["StageLayoutError", "layers_of_stages"]

_MOST = 10_000


class StageLayoutError(ValueError):
    """The text is no such layout."""


def layers_of_stages(text: str) -> list[int]:
    """Decoder layers of each stage, in model order.

    ``t`` is a layer, ``E`` the embedding, ``L`` the loss, ``|`` ends a stage, ``(…)*3`` and ``t*3`` repeat; commas mean
    nothing.

    Raises:
        StageLayoutError: it is anything else, or endless.
    """
    flat = _expand(text.strip("'\""))
    stages = flat.split("|")
    if any("m" in stage for stage in stages):
        raise StageLayoutError("it holds layers of multi-token prediction (m), which are not built")
    return [stage.count("t") for stage in stages]


def _expand(text: str) -> str:
    """Without repetitions."""
    found: list[str] = [""]
    last: list[str] = [""]
    at = 0
    while at < len(text):
        char = text[at]
        at += 1
        if char in "EtLm|":
            found[-1] += char
            last[-1] = char
        elif char == "(":
            found.append("")
            last.append("")
        elif char == ")":
            if len(found) == 1:
                raise StageLayoutError("a bracket closes that was not opened")
            group = found.pop()
            last.pop()
            found[-1] += group
            last[-1] = group
        elif char == "*":
            digits = ""
            while at < len(text) and text[at].isdigit() and len(digits) < 6:
                digits += text[at]
                at += 1
            if not digits or not last[-1]:
                raise StageLayoutError("* stands between a letter or a bracket and a number")
            if int(digits) * len(last[-1]) > _MOST:
                raise StageLayoutError(f"it repeats to more than {_MOST:,} letters")
            found[-1] = found[-1][: len(found[-1]) - len(last[-1])] + last[-1] * int(digits)
            last[-1] = ""
        elif char not in ", ":
            raise StageLayoutError(f"{char!r} is none of E, t, L, |, ( ) and *")
        if sum(map(len, found)) > _MOST:
            raise StageLayoutError(f"it has more than {_MOST:,} letters")
    if len(found) > 1:
        raise StageLayoutError("a bracket is not closed")
    return found[0]
