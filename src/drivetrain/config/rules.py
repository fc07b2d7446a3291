"""The rule mechanism: what a configuration must satisfy beyond the type and range of each field.

A rule sees the whole configuration and the facts of the launch, and answers with a message that gives
the nearest legal values, or with None. All rules are tried; nothing is changed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from drivetrain.config.schema import RunConfig

__all__ = ["LaunchFacts", "Rule", "Violation"]


@dataclass(frozen=True)
class LaunchFacts:
    """What a configuration does not say but its start decides.

    Attributes:
        world_size: number of processes over all machines.
        local_world_size: number of processes on this machine; None: all of them.
        usable_cores: CPU cores this machine's processes may use; None where unknown.
        source_name: name of the preset or file the configuration came from; None where unknown.
        device_type: what the processes compute on, ``cpu`` or ``cuda``; None where unknown.
    """

    world_size: int = 1
    local_world_size: int | None = None
    usable_cores: int | None = None
    source_name: str | None = None
    device_type: str | None = None

    def __post_init__(self) -> None:
        assert self.world_size >= 1


@dataclass(frozen=True)
class Violation:
    """A rule that is broken: its id, the fields it looked at, and the message."""

    rule: str
    fields: tuple[str, ...]
    message: str

    def __str__(self) -> str:
        return f"{self.fields[0]}: {self.message}"


@dataclass(frozen=True)
class Rule:
    """One condition between fields.

    Attributes:
        id: dotted or hyphenated identifier, unique among all rules that are tried together.
        fields: dotted paths of the leaves it looks at, the one to change first.
        check: answers None, or what is wrong with the nearest legal values. Never raises for a
            configuration that the schema accepts, also when other rules are broken.
        doc: the condition in one line, for the documentation.
    """

    id: str
    fields: tuple[str, ...]
    check: Callable[[RunConfig, LaunchFacts], str | None]
    doc: str

    def violation(self, config: RunConfig, facts: LaunchFacts) -> Violation | None:
        """Try this rule."""
        message = self.check(config, facts)
        return None if message is None else Violation(rule=self.id, fields=self.fields, message=message)
