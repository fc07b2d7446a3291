"""Offloaded state or activations that are not back when they are needed."""

from collections.abc import Iterator

from drivetrain.diagnose.facts import Facts
from drivetrain.diagnose.finding import Evidence, Finding
from drivetrain.diagnose.loss import loss
from drivetrain.diagnose.remedies import switch_off
from drivetrain.diagnose.rule import Rule

__all__ = ["RULE"]


def _detect(facts: Facts) -> Iterator[Finding]:
    assert facts.config is not None
    assert facts.figures is not None
    means, memory = facts.figures.means, facts.config.memory
    waited, step = means.get("offload/exposed_s", 0.0), means.get("time/step_s", 0.0)
    if not waited or not step:
        return
    cost = waited / step * facts.mean.window_ns
    asked = {
        "activation_offload": bool(memory.cpu_offloading_num_layers),
        "embedding_offload": memory.offload_embedding,
        "optimizer_offload": bool(memory.optimizer_offload_fraction),
    }
    moved = means.get("offload/moved_bytes", 0.0)
    yield loss(
        facts,
        "stalling_offload",
        "memory.stalling_offload",
        " and ".join(name for name, on in asked.items() if on) or "offload",
        cost,
        evidence=(
            Evidence(
                f"computation waited {1e3 * waited:.3g} ms of {1e3 * step:.3g} ms for {moved / 1e6:.3g} MB a step",
                f"{facts.figures.steady_steps} steady steps",
                {"exposed_s": waited, "moved_bytes": moved},
            ),
        ),
        remedies=tuple(
            switch_off(facts, name, cost, "as far as memory allows; moving less costs less")
            for name, on in asked.items()
            if on
        ),
        part_of="copy",
    )


RULE = Rule("stalling_offload", ("memory.stalling_offload",), ("configuration", "logged steps"), _detect)
