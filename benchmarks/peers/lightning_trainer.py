"""``lightning.Trainer`` on the workload: python -m peers.lightning_trainer FOLDER SETTINGS_JSON."""

import json
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from peers.workfiles import Rows, Stamps, decay_groups, load_model, read_work, write_record


class LanguageModel(lightning.LightningModule):
    """The module of Lightning's own guides: the step returns the model's loss."""

    def __init__(self, model: Any, work: dict[str, Any], settings: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self._optimizer = work["optimizer"]
        self._settings = settings
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # noqa: ARG002
        loss: Tensor = self.model(**batch).loss
        if self._settings.get("log", True):
            self.log("train_loss", loss)
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer
        return torch.optim.AdamW(
            decay_groups(self.model, optimizer["weight_decay"]),
            lr=optimizer["lr"],
            betas=(optimizer["beta1"], optimizer["beta2"]),
            eps=optimizer["eps"],
            **self._settings.get("adamw", {}),
        )


class OwnClipping(LanguageModel):
    """Clips with torch's function in the hook that Lightning has for it."""

    def configure_gradient_clipping(
        self,
        optimizer: Any,  # noqa: ARG002
        gradient_clip_val: Any = None,
        gradient_clip_algorithm: Any = None,  # noqa: ARG002
    ) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)


class Stamping(lightning.Callback):
    """A batch ends after the update; with accumulation every ``num_microbatches``-th ends a step."""

    def __init__(self, stamps: Stamps, num_microbatches: int) -> None:
        self._stamps = stamps
        self._batches = 0
        self._num_microbatches = num_microbatches

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        self._batches += 1
        if self._batches % self._num_microbatches == 0:
            trainer.should_stop |= self._stamps.stamp()


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Train. ``settings``: ``attention``, ``compile``, ``adamw``, ``own_clipping``, ``log``,
    ``precision``, ``loader``, and ``arguments`` for Trainer."""
    work = read_work(folder)
    rows = Rows(folder)
    precision = settings.get("precision", "bf16-mixed")
    model = load_model(folder, settings.get("attention"))
    compiled = torch.compile(model, **settings["compile"]) if "compile" in settings else model
    kind = OwnClipping if settings.get("own_clipping") else LanguageModel
    module = kind(compiled, work, settings)
    stamps = Stamps()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        precision=precision,
        max_steps=work["steps"],
        accumulate_grad_batches=work["num_microbatches"],
        gradient_clip_val=work["optimizer"]["clip"],
        callbacks=[Stamping(stamps, work["num_microbatches"])],
        **settings.get("arguments", {}),
    )
    loader = DataLoader(
        rows, batch_size=work["micro_batch_size"], shuffle=False, **settings.get("loader", {})
    )
    trainer.fit(module, loader)
    write_record(model, work, rows.seq_length, [float(loss) for loss in module.losses])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
