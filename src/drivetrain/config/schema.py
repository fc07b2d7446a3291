"""The whole configuration of a run: a section for each concern."""

from pydantic import Field

from drivetrain.config.base import Section
from drivetrain.config.execution import (
    MemoryConfig,
    OverlapConfig,
    ParallelismConfig,
    PrecisionConfig,
)
from drivetrain.config.fusion import FusionConfig
from drivetrain.config.model import ModelConfig
from drivetrain.config.operation import CheckpointConfig, MonitorConfig, RunSectionConfig
from drivetrain.config.profiling import ProfilerConfig
from drivetrain.config.training import (
    DataConfig,
    LearningRateScheduleConfig,
    OptimizerConfig,
    TrainingConfig,
)

__all__ = ["RunConfig"]


class RunConfig(Section):
    """The configuration of one run. Only the model has no defaults: presets and files give it."""

    model: ModelConfig
    """Shape of the decoder."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Where the tokens come from."""
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    """Batch, length and evaluation."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """AdamW."""
    lr_schedule: LearningRateScheduleConfig = Field(default_factory=LearningRateScheduleConfig)
    """Learning rate over tokens."""
    parallelism: ParallelismConfig = Field(default_factory=ParallelismConfig)
    """Processes."""
    overlap: OverlapConfig = Field(default_factory=OverlapConfig)
    """Communication under compute."""
    fusion: FusionConfig = Field(default_factory=FusionConfig)
    """Fused operators."""
    memory: MemoryConfig = Field(default_factory=MemoryConfig)
    """Memory limits."""
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig)
    """Dtypes."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Saved state."""
    profiler: ProfilerConfig = Field(default_factory=ProfilerConfig)
    """Profile window."""
    monitor: MonitorConfig = Field(default_factory=MonitorConfig)
    """Logging."""
    run: RunSectionConfig = Field(default_factory=RunSectionConfig)
    """Identity and reproducibility."""
