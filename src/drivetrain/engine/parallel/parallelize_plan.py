"""A plan for the user's own module: from patterns to submodules, and everything that is wrong with it at once."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd

from drivetrain.engine.parallel.parallelize_text import listed, nearest_multiples, nearest_names
from drivetrain.errors import ConfigurationError

__all__ = ["Planned", "Word", "read_plan"]

Word = Literal["column", "column_gathered", "row", "sequence", "shared", "replicate"]

_WORDS: tuple[Word, ...] = get_args(Word)
_ANY: tuple[Word, ...] = ("sequence", "shared", "replicate")
_COVERING = ("sequence", "shared")
"""Words that hold for all that is in a module too."""


@dataclass(frozen=True)
class Planned:
    """A plan that fits.

    Attributes:
        words: by the names of submodules, outermost first; what is in a module with "sequence" or "shared" is left out.
        divided: modules, names of their attributes, and the new values.
    """

    words: Mapping[str, Word]
    divided: Sequence[tuple[nn.Module, str, int]]


def read_plan(module: nn.Module, plan: Mapping[str, Word], size: int, divided: Sequence[str]) -> Planned:
    """What ``plan`` says of each submodule, for ``size`` ranks. Nothing is changed.

    Raises:
        ConfigurationError: with every problem.
    """
    if isinstance(divided, str):
        raise ConfigurationError(
            f"divided = {divided!r} is one text, and would be read letter by letter; use [{divided!r}]"
        )
    modules = dict(module.named_modules(remove_duplicate=False))
    problems: list[str] = []
    words = _words(modules, plan, problems)
    for name, word in words.items():
        problems += _unfit(name, modules[name], word, size)
    problems += _tied_modules(modules, words)
    problems += _tied_parameters(modules, words)
    counts = _divided(modules, divided, size, problems)
    if not problems and next(module.parameters(), None) is None:
        problems.append(
            f"the module ({type(module).__name__}) has no parameters: there is nothing that ranks could hold a part of"
        )
    if problems:
        raise ConfigurationError(*dict.fromkeys(problems))
    return Planned(words, counts)


def _words(
    modules: Mapping[str, nn.Module], plan: Mapping[str, Word], problems: list[str]
) -> dict[str, Word]:
    """The word of each submodule that has one. The root has none: nothing could hold what replaces it."""
    found: dict[str, tuple[str, Word]] = {}
    for pattern, word in plan.items():
        if word not in _WORDS:
            close = get_close_matches(str(word), _WORDS, n=1)
            legal = ", ".join(map(repr, _WORDS))
            problems.append(
                f"plan[{pattern!r}] is {word!r}; legal are {legal}"
                + (f"; nearest: {close[0]!r}" if close else "")
            )
            continue
        matched = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not matched:
            problems.append(f"plan[{pattern!r}] matches no submodule{nearest_names(pattern, modules)}")
        for name in matched:
            other, known = found.setdefault(name, (pattern, word))
            if known != word:
                problems.append(
                    f"{name} is matched by {other!r} ({known!r}) and by {pattern!r} ({word!r}); one of them must be "
                    "narrower"
                )
    words: dict[str, Word] = {}
    for name in modules:
        if name not in found:
            continue
        word = found[name][1]
        around = next((outer for outer in _parents(name) if words.get(outer) in _COVERING), None)
        if around is None:
            words[name] = word
        elif word != words[around]:
            problems.append(
                f"{name} has {word!r} and is in {around}, which has {words[around]!r} for all that is in it"
            )
    return words


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _unfit(name: str, module: nn.Module, word: Word, size: int) -> list[str]:
    """Why ``module`` cannot have ``word``."""
    kind = type(module).__name__
    if word == "replicate":
        return []
    legal = _legal_words(module)
    if word not in legal:
        return [f"{name} is a {kind}, which cannot have {word!r}; legal are {', '.join(map(repr, legal))}"]
    hooked = [
        ".".join(filter(None, (name, inner)))
        for inner, replaced in _replaced_with(module, word).items()
        if _has_hooks(replaced)
    ]
    if hooked:
        return [
            f"{one} has hooks, which would not survive that it is replaced; set them after parallelize"
            for one in hooked
        ]
    if word == "sequence" and (mixing := _mixing_positions(name, module)):
        return mixing
    if isinstance(module, nn.Embedding) and (module.max_norm or module.scale_grad_by_freq or module.sparse):
        return [
            f"{name} has max_norm, scale_grad_by_freq or sparse; an Embedding with {word!r} can have none of them"
        ]
    cut = _sizes(module, word)
    if cut is None:
        return []
    what, length, evenly = cut
    if length < size:
        return [f"{name} has {length} {what}, fewer than the {size} ranks that {word!r} spreads them over"]
    if evenly and length % size:
        return [
            f"{name} has {length} {what}, which {size} ranks do not divide for {word!r}; nearest: "
            f"{nearest_multiples(length, size)}"
        ]
    return []


def _replaced_with(module: nn.Module, word: Word) -> dict[str, nn.Module]:
    """What another takes the place of, by its name in ``module``: itself, and what splits its mask by the sequence."""
    inner = module.named_modules() if word == "sequence" else ()
    return {"": module, **{name: part for name, part in inner if type(part) is nn.Dropout}}


def _mixing_positions(name: str, module: nn.Module) -> list[str]:
    """Torch's own modules that compute something else for a part of the sequence than for the whole.

    Nothing else would tell: every shape is right, and every gradient is alike on all ranks. A batch norm does so at any
    depth; of the others only ``module`` itself surely reads the sequence, since code around them may reshape.
    """
    batch_norms = {
        ".".join(filter(None, (name, inner))): part
        for inner, part in module.named_modules()
        if isinstance(part, _BatchNorm)
    }
    other = "use a norm of features (LayerNorm, RMSNorm), or a plan without 'sequence'"
    found = [
        f"{one} is a {type(norm).__name__}, whose statistics would be those of a rank's part of the sequence; {other}"
        for one, norm in batch_norms.items()
    ]
    if isinstance(module, _NormBase | nn.GroupNorm) and not found:
        found = [
            f"{name} is a {type(module).__name__}, which takes its statistics over the sequence; {other}"
        ]
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) or (
        isinstance(module, _ConvNd) and any(length != 1 for length in module.kernel_size)
    ):
        found = [
            f"{name} is a {type(module).__name__}, which reads several positions at once, and with 'sequence' a rank "
            "has a part of them; use a plan without 'sequence'"
        ]
    return found


def _has_hooks(module: nn.Module) -> bool:
    return any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    )


def _legal_words(module: nn.Module) -> tuple[Word, ...]:
    # Exact types: a subclass may use its weight in a forward of its own.
    if type(module) is nn.Linear:
        return _WORDS
    if type(module) is nn.Embedding:
        return ("column", "row", *_ANY)
    if type(module) is nn.Dropout:
        return ("column", "sequence", "replicate")
    return _ANY


def _sizes(module: nn.Module, word: Word) -> tuple[str, int, bool] | None:
    """What ``word`` cuts, how many there are, and whether the parts must be equal; None: nothing is cut."""
    if isinstance(module, nn.Linear) and word in ("column", "column_gathered"):
        # Nobody sees the parts of an output that is joined: they may differ by one.
        return "output features", module.out_features, word == "column"
    if isinstance(module, nn.Linear) and word == "row":
        return "input features", module.in_features, True
    if isinstance(module, nn.Embedding) and word == "column":
        return "features", module.embedding_dim, True
    if isinstance(module, nn.Embedding) and word == "row":
        return "rows", module.num_embeddings, False
    return None


def _cut_dimension(module: nn.Module, parameter: str, word: Word | None) -> int | None:
    """The dimension of ``parameter`` that is cut."""
    if isinstance(module, nn.Linear):
        if word in ("column", "column_gathered"):
            return 0
        return 1 if word == "row" and parameter == "weight" else None
    if isinstance(module, nn.Embedding):
        return {"row": 0, "column": 1}.get(word or "")
    return None


def _tied_modules(modules: Mapping[str, nn.Module], words: Mapping[str, Word]) -> Iterator[str]:
    """One module under several names has one word."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in modules.items():
        names.setdefault(module, []).append(name)
    for shared in names.values():
        if len({words.get(name, "replicate") for name in shared}) > 1:
            yield f"{listed(shared)} are one module, but the plan says {_said(shared, words)}"


def _tied_parameters(modules: Mapping[str, nn.Module], words: Mapping[str, Word]) -> Iterator[str]:
    """One parameter of several modules is cut in one way."""
    owners: dict[nn.Parameter, list[tuple[str, int | None, str]]] = {}
    for name, module in modules.items():
        for key, parameter in module.named_parameters(recurse=False):
            cut = _cut_dimension(module, key, words.get(name))
            owners.setdefault(parameter, []).append((f"{name}.{key}".lstrip("."), cut, name))
    for held in owners.values():
        if len({cut for _, cut, _ in held}) > 1:
            yield (
                f"{listed([parameter for parameter, _, _ in held])} are one parameter, but the plan cuts it in several "
                f"ways: {_said([name for _, _, name in held], words)}"
            )


def _said(names: Sequence[str], words: Mapping[str, Word]) -> str:
    return listed([f"{words.get(name, 'replicate')!r} for {name or 'the whole module'}" for name in names])


def _divided(
    modules: Mapping[str, nn.Module], patterns: Sequence[str], size: int, problems: list[str]
) -> list[tuple[nn.Module, str, int]]:
    """Integers that count what is cut. Torch's own modules have none: their sizes are set when they are cut."""
    known = {
        f"{name}.{attribute}".lstrip("."): (module, attribute, value)
        for name, module in modules.items()
        if not type(module).__module__.startswith("torch.")
        for attribute, value in vars(module).items()
        if type(value) is int
    }
    found: dict[tuple[nn.Module, str], int] = {}
    for pattern in patterns:
        matched = [name for name in known if fnmatchcase(name, pattern)]
        if not matched:
            problems.append(
                f"divided: {pattern!r} matches no integer attribute{nearest_names(pattern, known)}"
            )
        for name in matched:
            module, attribute, value = known[name]
            if value % size or value < size:
                problems.append(
                    f"divided: {name} is {value}, which {size} ranks do not divide; nearest: "
                    f"{nearest_multiples(value, size)}"
                )
            found[module, attribute] = value // size
    return [(module, attribute, count) for (module, attribute), count in found.items()]
