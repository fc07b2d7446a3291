"""``transformers.Trainer`` on the workload: python -m peers.huggingface_trainer FOLDER SETTINGS_JSON."""

import json
import sys
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback, TrainingArguments

from peers.workfiles import Rows, Stamps, load_model, read_work, write_record


class Stamping(TrainerCallback):
    """A step ends when the Trainer says so: after the update, the schedule and ``zero_grad``."""

    def __init__(self, stamps: Stamps) -> None:
        self._stamps = stamps

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:  # noqa: ARG002
        control.should_training_stop |= self._stamps.stamp()


def main(folder: Path, settings: dict[str, Any]) -> None:
    """Train. ``settings``: ``attention``, and ``arguments`` for TrainingArguments."""
    work = read_work(folder)
    rows = Rows(folder)
    model = load_model(folder, settings.get("attention"))
    optimizer = work["optimizer"]
    # What defines the training; everything else is the Trainer's default or in settings["arguments"].
    arguments = TrainingArguments(
        output_dir="out",
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=work["micro_batch_size"],
        gradient_accumulation_steps=work["num_microbatches"],
        max_steps=work["steps"],
        learning_rate=optimizer["lr"],
        lr_scheduler_type="constant",
        adam_beta1=optimizer["beta1"],
        adam_beta2=optimizer["beta2"],
        adam_epsilon=optimizer["eps"],
        weight_decay=optimizer["weight_decay"],
        max_grad_norm=optimizer["clip"],
        train_sampling_strategy="sequential",
        save_strategy="no",
        **settings.get("arguments", {}),
    )
    stamps = Stamps()
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Stamping(stamps)])
    result = trainer.train()
    write_record(model, work, rows.seq_length, [result.training_loss])


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
