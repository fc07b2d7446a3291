"""Layouts on which a way to save memory is held against none, to the bit."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from parity_cases import llama

from drivetrain.config import ModelConfig, RunConfig
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks, join

Run = Callable[[RunConfig, ProcessGroup], dict[str, torch.Tensor]]
"""From a configuration to what a rank holds afterwards, by name."""


@dataclass(frozen=True)
class Case:
    """A layout and what runs on it."""

    world_size: int
    model: ModelConfig
    parallelism: dict[str, Any]
    overlap: dict[str, Any] = field(default_factory=dict)
    fusion: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 2

    def config(self, **memory: Any) -> RunConfig:
        dp = self.world_size // (
            self.parallelism.get("tensor_model_parallel_size", 1)
            * self.parallelism.get("pipeline_model_parallel_size", 1)
        )
        return RunConfig.model_validate(
            {
                "model": self.model,
                "data": {"data_path": "not/read"},
                "training": {"micro_batch_size": 8 // (dp * self.micro_batches), "global_batch_size": 8},
                "parallelism": self.parallelism,
                "overlap": self.overlap,
                "fusion": self.fusion,
                "memory": memory,
                "precision": {"params_dtype": "fp32"},
                "run": {"device": "cpu"},
            }
        )


TP = {"tensor_model_parallel_size": 2}
PP = {"pipeline_model_parallel_size": 2}
SP = {**TP, "sequence_parallel": True}
COMPILED = {
    "dp2-zero0-compiled": Case(2, llama(2), {}, fusion={"compile": True}),
    "dp2-zero3-compiled": Case(2, llama(2), {"zero_stage": 3}, fusion={"compile": True}),
}


def unequal(run: Run, case: Case, plans: dict[str, dict[str, Any]]) -> list[str]:
    """On this rank: which tensors of ``run`` differ from those without any plan, under which plan."""
    with join(Ranks.from_environment(), "cpu", 2.0) as group:
        wanted = run(case.config(), group)
        different = []
        for name, memory in plans.items():
            found = run(case.config(**memory), group)
            assert found.keys() == wanted.keys()
            different += [f"{name}: {key}" for key in wanted if not torch.equal(found[key], wanted[key])]
        return different
