"""Every error a user can cause, in one place.

::

    DrivetrainError (ValueError)     what, where, the nearest legal value; the command line exits with 2
     |-- ConfigurationError          a field of a configuration, or a rule between fields
     |-- DataError                   a corpus, a tokenizer, an indexed file
     |-- RunError                    a run directory
     |-- CheckpointError             a checkpoint, or a Hugging Face folder
     |-- EnvironmentFault            something the machine lacks: torch, a device, disk space
     |-- OutOfMemory                 live tensor bytes above ``memory.device_memory_limit_bytes``

A message names what is wrong, where, and what would be right. Our own invariants are ``assert``
statements, never one of these.
"""

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "DataError",
    "DrivetrainError",
    "EnvironmentFault",
    "OutOfMemory",
    "RunError",
]


class DrivetrainError(ValueError):
    """Something the user can mend. The message is all they see: no traceback, exit code 2."""


class ConfigurationError(DrivetrainError):
    """One or more fields are wrong. ``problems`` holds one line for each; ``str()`` joins them."""

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems: tuple[str, ...] = problems


class DataError(DrivetrainError):
    """A corpus, a tokenizer or an indexed file is missing, damaged or does not fit the model."""


class RunError(DrivetrainError):
    """A path is no run directory, or a run lacks what was asked of it."""


class CheckpointError(DrivetrainError):
    """A checkpoint or a Hugging Face folder is missing, damaged or belongs to another model."""


class EnvironmentFault(DrivetrainError):
    """The machine lacks something: a package, a device, room on a disk."""


class OutOfMemory(DrivetrainError):
    """Live tensor bytes exceed ``memory.device_memory_limit_bytes``.

    Attributes:
        category: ``parameters``, ``gradients``, ``optimizer`` or ``activations``; ``unknown`` on CUDA.
        tensor: what was being allocated, with shape and dtype.
        live_bytes: bytes alive with it.
        limit_bytes: the configured limit.
    """

    def __init__(self, category: str, tensor: str, live_bytes: int, limit_bytes: int) -> None:
        known = f" ({category})" if category != "unknown" else ""
        super().__init__(
            f"out of memory: {tensor}{known} brings the live tensors to {live_bytes:,} bytes, above "
            f"memory.device_memory_limit_bytes = {limit_bytes:,}; lower training.micro_batch_size or "
            f"model.seq_length, or raise the limit to at least {live_bytes:,}"
        )
        self.category = category
        self.tensor = tensor
        self.live_bytes = live_bytes
        self.limit_bytes = limit_bytes
