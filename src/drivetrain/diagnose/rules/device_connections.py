"""``CUDA_DEVICE_MAX_CONNECTIONS`` against what the layout needs.

Kernels of different streams start in the order of their launch only where the device has one connection. Tensor
parallelism that overlaps its collectives counts on that order on devices before Blackwell; sharded parameters must not
have it, since then prefetched gathers queue behind computation (sources: Megatron-LM, checks of its arguments;
NVIDIA, CUDA environment variables).
"""

from collections.abc import Iterator

from drivetrain.config import data_parallel_size
from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]

_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_NEWER = ("B100", "B200", "B300")


def _detect(facts: Facts) -> Iterator[Finding]:
    figures, config = facts.figures, facts.config
    assert figures is not None
    assert config is not None
    assert facts.launch is not None
    if figures.device_type != "cuda":
        return
    value = figures.environment.get(_VARIABLE)
    shared = config.parallelism.tensor_model_parallel_size > 1
    overlaps = (
        config.parallelism.sequence_parallel
        or config.overlap.async_tensor_model_parallel_allreduce
        or config.overlap.tp_chunks != "1"
    )
    if config.parallelism.zero_stage == 3:
        wrong = value == "1"
        why = "parameters are gathered ahead of use, and one connection queues them behind computation"
        right = "unset it"
    elif shared and overlaps and not any(name in figures.device_name for name in _NEWER):
        wrong = value != "1"
        why = "tensor parallelism overlaps its collectives, which one connection keeps in the order of their launch"
        right = f"set {_VARIABLE}=1"
        if data_parallel_size(config, facts.launch.world_size) > 1:
            right += "; gradients of data parallelism then queue behind backward, too: try both"
    else:
        return
    if not wrong:
        return
    yield loss(
        facts,
        "device_connections",
        "environment.max_connections",
        _VARIABLE,
        None,
        why_unknown="what the other value brings was not measured",
        kind="setting",
        confidence="low",
        evidence=(Evidence(f"it is {value or 'not set'}; {why}", "provenance and configuration of the run"),),
        no_remedy=right,
    )


RULE = Rule("device_connections", ("environment.max_connections",), ("configuration", "run"), _detect)
