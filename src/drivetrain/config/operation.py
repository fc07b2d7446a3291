"""What surrounds the computation: checkpoint, monitor, run."""

from typing import Literal

from pydantic import Field

from drivetrain.config.base import Count, Section

__all__ = ["CheckpointConfig", "MonitorConfig", "RunSectionConfig"]


class CheckpointConfig(Section):
    """When state is saved, and what a run starts from."""

    save_interval: Count = Field(default=0, ge=0, le=1_000_000_000)
    """Steps between checkpoints. 0: only at the end and when interrupted."""
    keep_latest_k: Count = Field(default=2, ge=1, le=1_000_000)
    """How many checkpoints stay on disk."""
    async_save: bool = False
    """Training goes on while a checkpoint is written: each rank copies its part to host memory, and a thread writes
    it. The next checkpoint, and the end of the run, wait for that."""
    initial_load_path: str | None = Field(default=None, min_length=1)
    """What the run starts from: the weights in a Hugging Face folder, or, with initial_load_model_only off, a
    checkpoint (step-…) of a run of any layout. Absent: initialised from run.seed."""
    initial_load_model_only: bool = True
    """Take weights alone. Off: both moments, the step, the counters and the position in the data come along."""


class MonitorConfig(Section):
    """What is logged while training."""

    log_interval: Count = Field(default=1, ge=1, le=1_000_000)
    """Steps between records in metrics.jsonl and lines in the log."""
    log_rank_times: bool = False
    """Each rank writes its own step, wait, data-wait and work times, and what it hands to collectives, to ranks/."""
    check_weight_hash_across_dp_replicas_interval: Count = Field(default=0, ge=0, le=1_000_000_000)
    """Steps between comparisons, bit by bit, of the weights that several ranks hold alike, data-parallel or not. The
    first is before the first step; there is one before each checkpoint too. A difference ends the run. 0: none."""


class RunSectionConfig(Section):
    """Identity and reproducibility of the run."""

    name: str | None = Field(
        default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", examples=["llama-10m_first"]
    )
    """Part of the run directory's name. Derived when absent: the preset's or the file's name."""
    runs_dir: str = Field(default="runs", min_length=1)
    """Folder in which run directories are made."""
    seed: Count = Field(default=1234, ge=0, le=2**63 - 1)
    """Seed of the initial weights and of dropout, and of the data order unless data.seed is given."""
    deterministic: bool = False
    """Only deterministic algorithms: the same run on the same machine gives the same bits."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device type to train on. auto: cuda where there is one, else cpu."""
    num_threads: Count | None = Field(default=None, ge=1, le=4096)
    """Compute threads of each process on a CPU. Derived when absent: the usable cores divided by the
    local processes."""
