"""What is trained on, for how long, and by which rule: data, training, optimizer, lr_schedule."""

from typing import Literal

from pydantic import Field

from drivetrain.config.base import Count, Section

__all__ = ["DataConfig", "LearningRateScheduleConfig", "OptimizerConfig", "TrainingConfig"]


class DataConfig(Section):
    """Where the tokens come from and how a sequence is cut."""

    data_path: str | None = Field(default=None, min_length=1)
    """Prefix of an indexed corpus (.bin and .idx), or several with the weights in which their samples are mixed, as
    `0.3 corpora/a 0.7 corpora/b`; URLs, as `s3://bucket/corpora/a`, are brought to this machine first. Absent: the
    Python standard library's source, prepared on first use."""
    tokenizer_path: str | None = Field(default=None, min_length=1)
    """A tokenizer.json. Absent: the tokenizer.json beside the corpus."""
    split: str = Field(default="95,5", pattern=r"^[0-9]+(\.[0-9]+)?,[0-9]+(\.[0-9]+)?$", examples=["95,5"])
    """Weights of training and validation, by document, drawn with a fixed seed."""
    reset_attention_mask: bool = True
    """Attention stays inside a document. Off: it crosses document borders inside a sequence."""
    reset_position_ids: bool = True
    """Positions start at 0 in each document. Off: they count through the sequence."""
    eod_mask_loss: bool = False
    """No loss on predicting the token after an end-of-document token."""
    packing: Literal["concatenate", "best_fit", "pad"] = "concatenate"
    """How documents fill sequences of seq_length. concatenate: one stream, cut where a sequence is full. best_fit:
    whole documents, or pieces of those that are longer than a sequence, and padding where none fits. pad: one document,
    or one piece, a sequence."""
    packing_buffer: Count = Field(default=16_384, ge=1, le=16_777_216)
    """Documents that best_fit packs with each other."""
    num_workers: Count = Field(default=0, ge=0, le=256)
    """Worker processes that build batches, in order. 0: built in the training process."""
    prefetch_factor: Count = Field(default=2, ge=1, le=1024)
    """Micro-batches each worker prepares ahead (with num_workers >= 1)."""
    prefetch_batches: Count = Field(default=0, ge=0, le=1024)
    """Micro-batches that a thread of the training process builds ahead (with num_workers = 0). 0: built when they are
    asked for."""
    sample_cache_bytes: Count = Field(default=0, ge=0, le=2**63 - 1)
    """Bytes on disk for finished training sequences, which later epochs, and runs on the same data, read instead of
    building them. 0: none are kept."""
    sample_cache_path: str | None = Field(default=None, min_length=1)
    """Folder of those sequences. Absent: `samples` in the cache folder."""
    remote_cache_bytes: Count = Field(default=100_000_000_000, ge=1, le=2**63 - 1)
    """Most bytes on disk of what URLs in data_path name. Others that nobody uses make room, those used least recently
    first."""
    remote_cache_path: str | None = Field(default=None, min_length=1)
    """Folder of what URLs name. Absent: `remote` in the cache folder."""
    transform: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*[.:][A-Za-z_]\w*(,[A-Za-z_][\w.]*[.:][A-Za-z_]\w*)*$",
        examples=["package.module.function"],
    )
    """Dotted path of a callable applied to each document's token ids (int64 array in, same shape out); several in a row
    are separated by commas. Not applied again to a corpus that `data prepare --bake` made with it."""
    batch_transform: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z_][\w.]*[.:][A-Za-z_]\w*(,[A-Za-z_][\w.]*[.:][A-Za-z_]\w*)*$",
        examples=["package.module.function"],
    )
    """The same for micro-batches: token ids of whole sequences (micro_batch_size, seq_length + 1)."""
    seed: Count | None = Field(default=None, ge=0, le=2**63 - 1)
    """Seed of the order of training data. Derived when absent: run.seed. Runs that share it see the same data
    from other initial weights."""


class TrainingConfig(Section):
    """Batch, length and evaluation of a run."""

    micro_batch_size: Count = Field(default=8, ge=1, le=1_048_576)
    """Sequences in one forward and backward pass of one data-parallel rank."""
    global_batch_size: Count = Field(default=32, ge=1, le=16_777_216)
    """Sequences in one optimizer step over all ranks: micro_batch_size x data-parallel size x
    num_microbatches."""
    train_iters: Count = Field(default=1000, ge=1, le=1_000_000_000)
    """Number of optimizer steps."""
    clip_grad: float = Field(default=1.0, ge=0, le=1e6)
    """Gradients are scaled down to this global norm. 0: not clipped (the norm is still logged)."""
    eval_interval: Count = Field(default=0, ge=0, le=1_000_000_000)
    """Steps between evaluations on held-out text. 0: only after the last step."""
    eval_iters: Count = Field(default=16, ge=0, le=1_000_000)
    """Global batches of held-out text in one evaluation. 0: no evaluation."""


class OptimizerConfig(Section):
    """AdamW with fp32 state."""

    lr: float = Field(default=1e-3, gt=0, le=10)
    """Peak learning rate."""
    weight_decay: float = Field(default=0.1, ge=0, le=10)
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    adam_beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    adam_beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    adam_eps: float = Field(default=1e-8, gt=0, le=0.1)
    """Added to the square root of the second moment."""
    fused: bool = True
    """One fused kernel for the update instead of one operator per term."""


class LearningRateScheduleConfig(Section):
    """The learning rate as a function of tokens seen."""

    lr_decay_style: Literal["cosine", "WSD", "constant"] = "cosine"
    """Cosine to min_lr, warmup-stable-decay, or constant after warm-up."""
    min_lr: float = Field(default=0.0, ge=0, le=10)
    """Learning rate at the end of the decay."""
    lr_warmup_tokens: Count = Field(default=0, ge=0, le=2**63 - 1)
    """Tokens of linear warm-up from 0."""
    lr_decay_tokens: Count | None = Field(default=None, ge=1, le=2**63 - 1)
    """Tokens at which the decay ends. Derived when absent: all tokens of the run."""
    lr_wsd_decay_tokens: Count | None = Field(default=None, ge=1, le=2**63 - 1)
    """Length of the final decay of WSD, in tokens. Derived when absent: one fifth of lr_decay_tokens."""
    lr_wsd_decay_style: Literal["linear", "cosine", "minus_sqrt"] = "linear"
    """Shape of the final decay of WSD."""

    def decay_end(self, total_tokens: int) -> int:
        """lr_decay_tokens, or the value derived for it in a run of ``total_tokens``."""
        return total_tokens if self.lr_decay_tokens is None else self.lr_decay_tokens

    def wsd_decay_length(self, total_tokens: int) -> int:
        """lr_wsd_decay_tokens, or the value derived for it in a run of ``total_tokens``."""
        if self.lr_wsd_decay_tokens is not None:
            return self.lr_wsd_decay_tokens
        return max(1, self.decay_end(total_tokens) // 5)
