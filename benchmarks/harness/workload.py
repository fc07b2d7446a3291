"""The work both sides do: the same shape, the same initial weights, the same rows of tokens in the same order."""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drivetrain.config import RunConfig, load_config

__all__ = ["ALLOCATORS", "Workload", "environment"]

THREADS = 2
ALLOCATORS: dict[str, dict[str, str]] = {
    "default malloc": {},
    # Freed memory is kept instead of being given back to the system and faulted in again at every step.
    "malloc that keeps memory": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"},
}
"""Environment variables of glibc's malloc; the same ones for both sides."""

OPTIMIZER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "clip": 1.0}


def environment(allocator: str) -> dict[str, str]:
    """What is set in the processes of both sides, beside the caller's environment."""
    threads = str(THREADS)
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **ALLOCATORS[allocator],
    }


@dataclass(frozen=True)
class Workload:
    """One preset at one batch, as files that a peer's process reads.

    Attributes:
        folder: holds ``rows.npy`` (int64, (samples, seq_length)), ``weights/`` (a Hugging Face folder, fp32)
            and ``work.json``.
        preset: name of the preset.
        micro_batch_size, num_microbatches, steps: sequences in a pass, passes in a step, steps.
    """

    folder: Path
    preset: str
    micro_batch_size: int
    num_microbatches: int
    steps: int

    def overrides(self) -> list[str]:
        """Our side's configuration; whole rows, because the peers know no documents."""
        return [
            f"training.train_iters={self.steps}",
            f"training.micro_batch_size={self.micro_batch_size}",
            f"training.global_batch_size={self.micro_batch_size * self.num_microbatches}",
            f"training.clip_grad={OPTIMIZER['clip']}",
            "training.eval_interval=0",
            "training.eval_iters=0",
            "checkpoint.save_interval=0",
            "data.reset_attention_mask=false",
            "data.reset_position_ids=false",
            f"optimizer.lr={OPTIMIZER['lr']}",
            f"optimizer.adam_beta1={OPTIMIZER['beta1']}",
            f"optimizer.adam_beta2={OPTIMIZER['beta2']}",
            f"optimizer.adam_eps={OPTIMIZER['eps']}",
            f"optimizer.weight_decay={OPTIMIZER['weight_decay']}",
            "lr_schedule.lr_decay_style=constant",
            "lr_schedule.lr_warmup_tokens=0",
            "lr_schedule.min_lr=0",
            "precision.params_dtype=bf16",
            "monitor.log_interval=1",
            "run.device=cpu",
            f"run.num_threads={THREADS}",
        ]

    def config(self) -> RunConfig:
        """Our side's resolved configuration."""
        return load_config(self.preset, self.overrides()).config

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, on both sides."""
        return self.micro_batch_size * self.num_microbatches * self.config().model.seq_length

    @property
    def loss_at_random(self) -> float:
        """Cross-entropy of a model that knows nothing: ln V."""
        return math.log(self.config().model.vocab_size)

    def write(self) -> None:
        """Make the files. Imports torch, in a process that only prepares."""
        from drivetrain.engine.data.corpus import ensure_corpus
        from drivetrain.engine.data.loader import BatchLoader
        from drivetrain.engine.model.decoder import Decoder
        from drivetrain.engine.model.huggingface import export_folder
        from drivetrain.engine.model.initialization import initialize
        from drivetrain.engine.precision import compute_dtype

        config = self.config()
        self.folder.mkdir(parents=True, exist_ok=True)
        corpus = ensure_corpus(config.data, config.model)
        samples = self.steps * config.training.global_batch_size
        with BatchLoader(config, corpus, "train", num_samples=samples) as loader:
            rows = np.concatenate([batch.token_ids.numpy() for batch in loader])
        np.save(self.folder / "rows.npy", rows)
        decoder = Decoder(config.model, compute_dtype(config.precision))
        initialize(decoder, config.run.seed)
        export_folder(decoder.state_dict(), config.model, self.folder / "weights")
        facts = {
            "micro_batch_size": self.micro_batch_size,
            "num_microbatches": self.num_microbatches,
            "steps": self.steps,
            "threads": THREADS,
            "optimizer": OPTIMIZER,
        }
        (self.folder / "work.json").write_text(json.dumps(facts), encoding="utf-8")
