"""From a file of another trainer's arguments to a configuration, with what became of each argument."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from drivetrain.config.basic_rules import BASIC_RULES
from drivetrain.config.importing.arguments import Trainer, known_names
from drivetrain.config.importing.conversion import Conversion, Lacking
from drivetrain.config.importing.megatron_execution import convert_execution, model_ranks_of
from drivetrain.config.importing.megatron_model import convert_model
from drivetrain.config.importing.megatron_training import convert_training
from drivetrain.config.importing.reading import read_source
from drivetrain.config.importing.torchtitan import convert_torchtitan
from drivetrain.config.layout import least_processes
from drivetrain.config.load import config_of
from drivetrain.config.rules import LaunchFacts, Rule
from drivetrain.config.schema import RunConfig
from drivetrain.errors import ConfigurationError

__all__ = ["Imported", "import_file"]

_EFFECTS = ("curve", "memory", "speed", "operation")


@dataclass(frozen=True)
class Imported:
    """A configuration made of another trainer's arguments.

    Attributes:
        config: validated; the rules that were given hold.
        conversion: what became of each argument.
        overrides: what was given beside the file.
    """

    config: RunConfig
    conversion: Conversion
    overrides: tuple[str, ...]

    @property
    def missing(self) -> list[Lacking]:
        """What is not supported here, and what nobody gave: what changes the training first."""
        found = [*self.conversion.lacking, *self.conversion.remarks]
        given = {override.partition("=")[0].strip() for override in self.overrides}
        settled = {
            "data.data_path": _DATA,
            "checkpoint.initial_load_path": ("--load", "--pretrained-checkpoint"),
        }
        for path, names in settled.items():
            if path in given:
                found = [one for one in found if one.name.removesuffix(" (absent)") not in names]
        return sorted(found, key=lambda one: _EFFECTS.index(one.effect))

    @property
    def changes_training(self) -> bool:
        """Whether something is left out that may change the training's mathematics."""
        return bool(self.conversion.unknown) or any(one.effect == "curve" for one in self.missing)

    def to_document(self) -> dict[str, Any]:
        """For ``--json``."""
        conversion = self.conversion
        return {
            "source": conversion.source.where,
            "trainer": conversion.source.trainer,
            "processes": conversion.source.processes,
            "taken": [asdict(one) for one in conversion.taken],
            "defaults": [asdict(one) for one in conversion.defaults],
            "same": [asdict(one) for one in conversion.same],
            "not_supported": [asdict(one) for one in self.missing],
            "unknown": [asdict(one) for one in conversion.unknown],
            "overrides": list(self.overrides),
            "changes_training": self.changes_training,
            "config": self.config.model_dump(),
        }


_DATA = ("--data-path", "--train-data-path", "--mock-data", "training.dataset", "training.dataset_path")


def import_file(
    path: Path,
    *,
    trainer: Trainer | None = None,
    given: Mapping[str, str] | None = None,
    devices: int | None = None,
    overrides: Sequence[str] = (),
    rules: Sequence[Rule] = BASIC_RULES,
) -> Imported:
    """Read ``path`` and convert it. Nothing in it is executed.

    Args:
        trainer: whose arguments they are; None: the content tells.
        given: values of shell variables, by name.
        devices: processes of the job, where the file does not say.
        overrides: ``section.field=value``, laid over what was converted.
        rules: that the configuration must satisfy.

    Raises:
        ConfigurationError: it is no such file, arguments have no legal value or contradict each other, or the
            configuration breaks a rule. All that is known is reported, under the source's own names.
    """
    source = read_source(path, trainer, given or {}, devices)
    conversion = Conversion(source)
    if source.trainer == "torchtitan":
        convert_torchtitan(conversion)
    else:
        convert_model(conversion)
        convert_execution(conversion)
        convert_training(conversion, model_ranks_of(conversion))
    conversion.settle(known_names(source.trainer).get)
    problems = [f"{source.where}: {one}" for one in conversion.problems]
    if problems:
        raise ConfigurationError(*problems)
    config = _config(conversion, overrides)
    facts = LaunchFacts(world_size=least_processes(config))
    broken = [one for rule in rules if (one := rule.violation(config, facts)) is not None]
    if broken:
        given_fields = {override.partition("=")[0].strip() for override in overrides}
        raise ConfigurationError(
            *(
                f"{source.where}: {_named(conversion, one.fields, given_fields)}{one.message}"
                for one in broken
            )
        )
    return Imported(config, conversion, tuple(overrides))


def _config(conversion: Conversion, overrides: Sequence[str]) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {"model": {}}
    for path, value in conversion.values.items():
        section, _, name = path.partition(".")
        sections.setdefault(section, {})[name] = value
    where = conversion.source.where
    given = {override.partition("=")[0].strip() for override in overrides}
    if "model.vocab_size" not in conversion.values and "model.vocab_size" not in given:
        raise ConfigurationError(
            f"{where}: the vocabulary is not among the arguments, the source's tokenizer decides it: give "
            "model.vocab_size=N behind the file, with the source's padding"
        )
    origins = {path: f"{where}, by {name}" for path, name in conversion.origins.items()}
    return config_of(sections, overrides, origins)


def _named(conversion: Conversion, fields: Sequence[str], given: set[str]) -> str:
    """The source's arguments behind fields, as the beginning of a message about a rule."""
    names = dict.fromkeys(
        conversion.origins.get(field, "")
        for field in fields
        if field not in given and field in conversion.origins
    )
    shown = ", ".join(name for name in names if name)
    return f"{shown} ({fields[0]}): " if shown else f"{fields[0]}: "
