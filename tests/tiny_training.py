"""A training loop small enough to be read at a glance, and helpers for tests of checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from drivetrain.config.model import ModelConfig
from drivetrain.config.training import OptimizerConfig
from drivetrain.engine.checkpoint import load_checkpoint, save_checkpoint, whole_state
from drivetrain.engine.model.batch import whole_sequences
from drivetrain.engine.model.decoder import Decoder
from drivetrain.engine.model.initialization import initialize
from drivetrain.engine.optimizer import build_optimizer, clip_gradients
from drivetrain.engine.random_state import restore_random_state, seed_everything

LLAMA = ModelConfig(
    num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2, seq_length=8, vocab_size=50
)
GPT = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    vocab_size=50,
    normalization="LayerNorm",
    position_embedding_type="learned_absolute",
    activation_func="gelu",
    add_bias_linear=True,
    hidden_dropout=0.1,
)
OWN = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    vocab_size=50,
    normalization="RMSNorm",
    position_embedding_type="learned_absolute",
    activation_func="swiglu",
    hidden_dropout=0.1,
)
MODELS = {"llama": LLAMA, "gpt": GPT, "own": OWN}


class Training:
    """A loop small enough to be read at a glance: decoder, optimizer, counters."""

    def __init__(self, model: ModelConfig, seed: int = 0) -> None:
        self.model = model
        self.decoder = Decoder(model, torch.float32)
        initialize(self.decoder, seed)
        self.optimizer = build_optimizer(self.decoder, OptimizerConfig(lr=1e-2))
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            batch = whole_sequences(torch.randint(self.model.vocab_size, (2, 8)))
            loss = self.decoder.loss_sum(batch) / batch.num_valid_tokens
            loss.backward()
            clip_gradients(self.decoder.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
            losses.append(loss.item())
        return losses

    def save(self, folder: Path, keep_latest_k: int = 2, **arguments: Any) -> Path:
        return save_checkpoint(
            folder,
            self.step,
            model=self.model,
            state=whole_state(self.decoder, self.optimizer),
            trainer_state={"samples": 2 * self.step, "flops": 2**80 + self.step, "loss_ema": 0.1 + 0.2},
            keep_latest_k=keep_latest_k,
            **arguments,
        )

    def load(self, path: Path) -> Mapping[str, Any]:
        loaded = load_checkpoint(path, self.model, whole_state(self.decoder, self.optimizer))
        assert loaded.random_state is not None
        restore_random_state(loaded.random_state)
        self.step = loaded.step
        return loaded.trainer_state


def save_two_checkpoints(folder: Path) -> None:
    """Sound checkpoints of steps 1 and 2."""
    seed_everything(0, 0)
    training = Training(OWN)
    for _ in range(2):
        training.train(1)
        training.save(folder)


def unexpected(path: Path, reason: str) -> None:
    raise AssertionError(f"{path} is damaged: {reason}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
