"""The schema of a run: sections, presets, TOML, overrides, rules and derived values.

What lives here says what a run *is*, and imports nothing above: no counting of FLOPs, no files of a run,
no torch. A leaf of the schema has a range or a rule, a docstring that is its help, and a reader elsewhere;
a test holds that.
"""

from drivetrain.config.basic_rules import BASIC_RULES, violations
from drivetrain.config.derive import (
    Derived,
    data_parallel_size,
    data_seed,
    decay_tokens,
    derived_values,
    num_microbatches,
    split_weights,
    tokens_per_step,
    total_tokens,
    wsd_decay_tokens,
)
from drivetrain.config.execution import (
    MemoryConfig,
    OverlapConfig,
    ParallelismConfig,
    PrecisionConfig,
)
from drivetrain.config.fusion import FusionConfig, chosen_backend, operator_fields
from drivetrain.config.idle import Idle, idle_fields
from drivetrain.config.layout import Layout, layout_of, least_processes
from drivetrain.config.leaves import Leaf, leaf_values, leaves
from drivetrain.config.load import LoadedConfig, load_config, parse_config
from drivetrain.config.model import ModelConfig
from drivetrain.config.operation import CheckpointConfig, MonitorConfig, RunSectionConfig
from drivetrain.config.presets import preset_names
from drivetrain.config.profiling import ProfilerConfig
from drivetrain.config.rules import LaunchFacts, Rule, Violation
from drivetrain.config.schema import RunConfig
from drivetrain.config.serialise import config_hash, differing_leaves, to_toml
from drivetrain.config.suggest import nearest
from drivetrain.config.training import (
    DataConfig,
    LearningRateScheduleConfig,
    OptimizerConfig,
    TrainingConfig,
)

__all__ = [
    "BASIC_RULES",
    "CheckpointConfig",
    "DataConfig",
    "Derived",
    "FusionConfig",
    "Idle",
    "LaunchFacts",
    "Layout",
    "Leaf",
    "LearningRateScheduleConfig",
    "LoadedConfig",
    "MemoryConfig",
    "ModelConfig",
    "MonitorConfig",
    "OptimizerConfig",
    "OverlapConfig",
    "ParallelismConfig",
    "PrecisionConfig",
    "ProfilerConfig",
    "Rule",
    "RunConfig",
    "RunSectionConfig",
    "TrainingConfig",
    "Violation",
    "chosen_backend",
    "config_hash",
    "data_parallel_size",
    "data_seed",
    "decay_tokens",
    "derived_values",
    "differing_leaves",
    "idle_fields",
    "layout_of",
    "leaf_values",
    "least_processes",
    "leaves",
    "load_config",
    "nearest",
    "num_microbatches",
    "operator_fields",
    "parse_config",
    "preset_names",
    "split_weights",
    "to_toml",
    "tokens_per_step",
    "total_tokens",
    "violations",
    "wsd_decay_tokens",
]
