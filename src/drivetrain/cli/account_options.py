"""Options of the verbs that make an account: ``account`` and ``diagnose``."""

from typing import Annotated

import typer

__all__ = [
    "AchievableFlops",
    "DeviceName",
    "Dtype",
    "Expect",
    "Model",
    "PeakFlops",
    "Rules",
    "Sources",
    "TokensPerStep",
]

Sources = Annotated[
    list[str],
    typer.Argument(metavar="RUN|TRACE...", help="A run with a profile, traces, or a folder of traces."),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", help="Preset or TOML of the model, for the waterfall and MFU points of foreign traces."
    ),
]
TokensPerStep = Annotated[
    int | None, typer.Option("--tokens-per-step", min=1, help="Tokens of a step over all devices.")
]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="Row of the hardware table whose peak MFU is counted against."),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", help="Dtype of the peak.  [default: the run's; bf16 for foreign traces]"),
]
PeakFlops = Annotated[float | None, typer.Option("--peak-flops", min=1, help="Your own peak, FLOP/s.")]
AchievableFlops = Annotated[
    float | None, typer.Option("--achievable-flops", min=1, help="Sustained matrix product, FLOP/s.")
]
Rules = Annotated[
    str | None, typer.Option("--rules", help="TOML of your own kernel-name rules, asked before ours.")
]
Expect = Annotated[
    list[str] | None,
    typer.Option(
        "--expect",
        help="flash, bf16, fp16, fp8, tf32, fused-optimizer or compile: say so if the records show otherwise "
        "(repeatable; a run expects what its configuration asks for).",
    ),
]
