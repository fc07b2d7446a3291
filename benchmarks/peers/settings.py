"""The settings each peer is tried with, as data. The best one is chosen by measurement, not by us."""

from typing import Any

__all__ = ["CANDIDATES", "DEFAULTS", "INFORMATION", "KNOWN_BEST", "MODULES"]

MODULES = {
    "huggingface": "peers.huggingface_trainer",
    "lightning": "peers.lightning_trainer",
}

DEFAULTS: dict[str, dict[str, Any]] = {
    # TrainingArguments' own: eager, SDPA, fused AdamW (the default of version 5), a log line every 500 steps.
    "huggingface": {},
    # Trainer's own: eager, CSV log every 50 steps, progress bar, checkpoints; torch's default AdamW.
    "lightning": {},
}

_HF_QUIET = {"logging_strategy": "no", "disable_tqdm": True, "dataloader_pin_memory": False}
_LIGHTNING_QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}
# Lightning refuses its own clipping beside a fused optimizer under bf16-mixed; its hook for clipping does not.
_FUSED = {"adamw": {"fused": True}, "own_clipping": True}
_LIGHTNING = {"log": False, "arguments": _LIGHTNING_QUIET}

CANDIDATES: dict[str, dict[str, dict[str, Any]]] = {
    "huggingface": {
        "sdpa, no logging": {"arguments": _HF_QUIET},
        "eager attention, no logging": {"attention": "eager", "arguments": _HF_QUIET},
        "torch_compile, sdpa, no logging": {"arguments": {**_HF_QUIET, "torch_compile": True}},
        "torch_compile, eager attention, no logging": {
            "attention": "eager",
            "arguments": {**_HF_QUIET, "torch_compile": True},
        },
        "torch_compile, eager attention, no logging, 1 loader worker": {
            "attention": "eager",
            "arguments": {**_HF_QUIET, "torch_compile": True, "dataloader_num_workers": 1},
        },
    },
    "lightning": {
        "sdpa, fused AdamW, no logging": {**_LIGHTNING, **_FUSED},
        "eager attention, fused AdamW, no logging": {**_LIGHTNING, **_FUSED, "attention": "eager"},
        "torch.compile, sdpa, fused AdamW, no logging": {**_LIGHTNING, **_FUSED, "compile": {}},
        "torch.compile, eager attention, fused AdamW, no logging": {
            **_LIGHTNING,
            **_FUSED,
            "compile": {},
            "attention": "eager",
        },
        "torch.compile, eager attention, foreach AdamW, no logging": {
            **_LIGHTNING,
            "adamw": {"foreach": True},
            "compile": {},
            "attention": "eager",
        },
        "torch.compile, eager attention, fused AdamW, no logging, 1 loader worker": {
            **_LIGHTNING,
            **_FUSED,
            "compile": {},
            "attention": "eager",
            "loader": {"num_workers": 1, "persistent_workers": True},
        },
    },
}

INFORMATION: dict[str, dict[str, dict[str, Any]]] = {
    # No fp32 masters: another training, with less work; never a target.
    "lightning": {
        "bf16-true (bf16 masters: not the same training)": {
            **_LIGHTNING,
            "adamw": {"fused": True},
            "compile": {},
            "attention": "eager",
            "precision": "bf16-true",
        }
    },
}

KNOWN_BEST: dict[str, tuple[str, dict[str, Any]]] = {
    peer: (label, CANDIDATES[peer][label])
    for peer, label in {
        "huggingface": "eager attention, no logging",
        "lightning": "eager attention, fused AdamW, no logging",
    }.items()
}
"""What is quick to start: eager, because --quick has no time to compile."""
