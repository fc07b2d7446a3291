"""Arguments as the sources give them, and what is known of their names."""

import functools
import tomllib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal, get_args

from drivetrain.config.suggest import nearest

__all__ = [
    "TRAINERS",
    "Argument",
    "Effect",
    "Known",
    "Source",
    "Trainer",
    "known_by_dump_name",
    "known_names",
    "nearest_name",
]

Trainer = Literal["megatron", "mindspeed", "torchtitan"]
TRAINERS: tuple[Trainer, ...] = get_args(Trainer)
Effect = Literal["curve", "memory", "speed", "operation"]
"""What leaving an argument out changes: the training itself, what fits, how fast it is, or nothing of the training."""
_FOLDER = resources.files("drivetrain.config.importing")


@dataclass(frozen=True)
class Argument:
    """One argument that was given.

    Attributes:
        name: as the source writes it: ``--num-layers``, ``training.seq_len``.
        values: its words; none for a switch.
        missing: why values are unknown, in words; empty: they are known.
        where: line of the source; 0: unknown.
    """

    name: str
    values: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    where: int = 0

    @property
    def given(self) -> str:
        """Its words in one, for a reader."""
        return " ".join(self.values)


@dataclass(frozen=True)
class Known:
    """What is known of an argument.

    Attributes:
        name: with its dashes; of torchtitan ``section.field``.
        dump_name: in dumps of arguments.
        default: as text, ``true`` or ``false`` for a switch; None: absent.
        effect: ``converted``: rules of this package take it over; ``same``: it has no effect here.
        reason: in words.
        trainer: whose it is.
    """

    name: str
    dump_name: str
    default: str | None
    effect: Literal["converted", "same"] | Effect
    reason: str
    trainer: Trainer

    @property
    def is_negative(self) -> bool:
        """A switch that turns something off which dumps know by what is on."""
        return self.default == "true" and self.name.startswith("--")


@dataclass(frozen=True)
class Source:
    """A file with arguments.

    Attributes:
        trainer: whose they are.
        where: names the file in messages.
        arguments: in their order; a name that is given twice stands for its last.
        repeated: earlier ones of such names.
        processes: that its launcher starts; None: unknown.
        launcher: the launcher's own arguments.
        notes: words that are no arguments, with what became of them.
        lost: words that may hold arguments, with why nobody knows which.
    """

    trainer: Trainer
    where: str
    arguments: Mapping[str, Argument]
    repeated: Sequence[Argument] = ()
    processes: int | None = None
    launcher: Sequence[Argument] = ()
    notes: Sequence[tuple[str, str]] = ()
    lost: Sequence[tuple[str, str]] = ()


@functools.cache
def known_names(trainer: Trainer) -> Mapping[str, Known]:
    """Name to what is known of it; MindSpeed has Megatron-LM's and its own."""
    if trainer == "torchtitan":
        return types.MappingProxyType(_read("torchtitan_names.toml", "torchtitan"))
    found = _read("megatron_names.toml", "megatron")
    if trainer == "mindspeed":
        found.update(_read("mindspeed_names.toml", "mindspeed"))
    return types.MappingProxyType(found)


@functools.cache
def known_by_dump_name(trainer: Trainer) -> Mapping[str, Known]:
    """The same by the names of dumps, ``num_layers``."""
    known = known_names(trainer)
    # A name of its own goes before one that only a dump calls so.
    own = {one.name[2:].replace("-", "_"): one for one in known.values()}
    return types.MappingProxyType({**{one.dump_name: one for one in known.values()}, **own})


def nearest_name(name: str, trainer: Trainer) -> str | None:
    """The known argument most like ``name``."""
    return nearest(name, known_names(trainer))


def _read(file: str, trainer: Trainer) -> dict[str, Known]:
    document = tomllib.loads((_FOLDER / file).read_text(encoding="utf-8"))
    found: dict[str, Known] = {}
    for group in document["group"]:
        for token in group["names"].split():
            head, equals, default = token.partition("=")
            name, _, dump_name = head.partition(">")
            known = Known(
                name if trainer == "torchtitan" else f"--{name}",
                dump_name or name.replace("-", "_"),
                default if equals else None,
                group["effect"],
                group["reason"],
                trainer,
            )
            assert known.name not in found, f"{known.name} stands in {file} twice"
            found[known.name] = known
    return found
