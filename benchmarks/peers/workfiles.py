"""What the peers' scripts share: reading the workload, stamping steps, writing the record."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

__all__ = ["Rows", "Stamps", "decay_groups", "load_model", "read_work", "write_record"]


class Rows(Dataset[dict[str, Tensor]]):
    """Rows of token ids in memory; a causal model's labels are its inputs, it shifts them itself."""

    seq_length: int

    def __init__(self, folder: Path) -> None:
        self._rows = torch.from_numpy(np.load(folder / "rows.npy"))
        self.seq_length = self._rows.shape[1]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


class Stamps:
    """Writes the moments at which steps ended to ``stamps``, a line each; ``stop`` asks for the end."""

    def __init__(self) -> None:
        self._file = Path("stamps").open("w", encoding="ascii", buffering=1)  # noqa: SIM115

    def stamp(self) -> bool:
        """A step ends here; true when training should end."""
        self._file.write(f"{time.time()!r}\n")
        return Path("stop").exists()


def read_work(folder: Path) -> dict[str, Any]:
    """Facts of the workload; sets the number of threads."""
    work: dict[str, Any] = json.loads((folder / "work.json").read_text(encoding="utf-8"))
    torch.set_num_threads(work["threads"])
    return work


def load_model(folder: Path, attention: str | None, dtype: torch.dtype = torch.float32) -> Any:
    """The Llama of ``transformers`` with our initial weights; ``attention`` None is its default."""
    from transformers import AutoModelForCausalLM

    named = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_pretrained(folder / "weights", dtype=dtype, **named)
    model.config.use_cache = False
    return model.train()


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norms do not: the grouping of both other sides."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def write_record(model: nn.Module, work: dict[str, Any], seq_length: int, losses: list[float]) -> None:
    """``record.json`` in the current folder."""
    record = {
        "losses": losses,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens_per_step": work["micro_batch_size"] * work["num_microbatches"] * seq_length,
    }
    Path("record.json").write_text(json.dumps(record), encoding="utf-8")
