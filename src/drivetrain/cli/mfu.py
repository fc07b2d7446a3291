"""``drivetrain mfu``: one figure under every rule."""

from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import typer

from drivetrain.cli.output import show_document

if TYPE_CHECKING:
    from drivetrain.config import ModelConfig
    from drivetrain.measure.figure import TrainingFigure, UtilisationAnswer
    from drivetrain.measure.peaks import Peak

__all__ = ["register"]

_Recompute = Literal["none", "selective", "full"]

_HELP = """One training figure under every rule: our MFU and HFU, what other tools would say, which of
their rules are wrong, and whether the figure can be true at all.

\b
Example:
  drivetrain mfu llama2-7b --seq-length 4096 --global-batch-size 512 --step-time 14.6 \\
      --devices 32 --device A100-SXM-80GB --dtype bf16 --recompute full
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("mfu", help=_HELP)(mfu)


def mfu(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A preset's name or a TOML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[section.field=value]...", help="Changes to it.")
    ] = None,
    seq_length: Annotated[
        int | None, typer.Option(help="Tokens in a sequence. Default: the model's.", show_default=False)
    ] = None,
    global_batch_size: Annotated[
        int | None,
        typer.Option(help="Sequences in a step. Default: the configuration's.", show_default=False),
    ] = None,
    step_time: Annotated[float | None, typer.Option(help="Seconds a step takes.", show_default=False)] = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(help="Tokens/s of all devices, instead of or beside the step time.", show_default=False),
    ] = None,
    devices: Annotated[int, typer.Option(help="Number of devices.")] = 1,
    device: Annotated[
        str | None,
        typer.Option(
            help="Name in the table of peaks; a wrong one lists the candidates.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Dtype of the matrix products, which decides the peak.")
    ] = "bf16",
    recompute: Annotated[
        str, typer.Option(help="What backward computes again: none, selective (attention), full.")
    ] = "none",
    peak_flops: Annotated[
        float | None,
        typer.Option(help="Peak of one device in FLOP/s, instead of the table's.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """One training figure under every rule."""
    from drivetrain.config import load_config
    from drivetrain.measure.figure import TrainingFigure, utilisation

    loaded = load_config(model, overrides or ())
    length = loaded.config.model.seq_length if seq_length is None else seq_length
    figure = TrainingFigure(
        model=_shape(loaded.config, length),
        seq_length=length,
        global_batch_size=(
            loaded.config.training.global_batch_size if global_batch_size is None else global_batch_size
        ),
        devices=devices,
        peak=_peak(device, dtype, peak_flops),
        recompute=_recompute(recompute),
        step_time_s=step_time,
        tokens_per_second=tokens_per_second,
    )
    answer = utilisation(figure)
    if as_json:
        show_document(_document(loaded.name, figure, answer))
    else:
        _show(loaded.name, figure, answer)


def _shape(config: Any, seq_length: int) -> "ModelConfig":
    """The model at this sequence length. Broken rules between its fields are refused."""
    from drivetrain.config import LaunchFacts, ModelConfig, violations
    from drivetrain.errors import ConfigurationError, DrivetrainError

    if seq_length < 1:
        raise DrivetrainError(f"a sequence length of {seq_length}: it must be at least 1")
    positions = config.model.max_position_embeddings
    # A figure for a longer sequence than the preset's is a figure for a model with as many positions.
    model: ModelConfig = config.model.model_copy(
        update={
            "seq_length": seq_length,
            "max_position_embeddings": None if positions is None else max(positions, seq_length),
        }
    )
    broken = [
        str(violation)
        for violation in violations(config.model_copy(update={"model": model}), LaunchFacts())
        if all(field.startswith("model.") for field in violation.fields)
    ]
    if broken:
        raise ConfigurationError(*broken)
    return model


def _peak(device: str | None, dtype: str, supplied: float | None) -> "Peak":
    from drivetrain.errors import DrivetrainError
    from drivetrain.measure.peaks import device_names, find_device, peak_flops, supplied_peak

    row = None if device is None else find_device(device)
    if supplied is not None:
        return supplied_peak(supplied)
    if row is None:
        raise DrivetrainError(
            "no device: give --device NAME or --peak-flops FLOP/s; there is no default peak. Devices: "
            + ", ".join(device_names())
        )
    return peak_flops(row, dtype)


def _recompute(value: str) -> _Recompute:
    from drivetrain.errors import DrivetrainError

    if value not in get_args(_Recompute):
        raise DrivetrainError(f"--recompute {value!r}: one of {', '.join(get_args(_Recompute))}")
    return cast("_Recompute", value)


def _document(name: str, figure: "TrainingFigure", answer: "UtilisationAnswer") -> dict[str, Any]:
    from drivetrain.measure.flops import FLOPS_RULE, HARDWARE_FLOPS_RULE

    return {
        "model": name,
        "peak_flops": figure.peak.value,
        "peak_source": figure.peak.source,
        "model_flops_per_step": {
            "causal": answer.causal.total,
            "full_attention": answer.full_attention.total,
        },
        "hardware_flops_per_step": answer.hardware.total,
        "mfu": {"causal": answer.mfu_causal, "full_attention": answer.mfu_full_attention},
        "hfu": answer.hfu,
        "others": [
            {"rule": other.rule, "mfu": other.mfu, "verdict": other.verdict, "used_by": other.used_by}
            for other in answer.others
        ],
        "impossible": answer.impossible,
        "credible": not answer.findings,
        "verdict": answer.verdict,
        "findings": list(answer.findings),
        "recompute": figure.recompute,
        "devices": figure.devices,
        "step_time_s": figure.seconds,
        "tokens_per_step": figure.tokens_per_step,
        "tokens_per_second": answer.tokens_per_second,
        "flops_rule": FLOPS_RULE,
        "hardware_flops_rule": HARDWARE_FLOPS_RULE,
    }


def _show(name: str, figure: "TrainingFigure", answer: "UtilisationAnswer") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from drivetrain.measure.flops import FLOPS_RULE

    console = Console(highlight=False)
    console.print(
        f"{name}: {figure.global_batch_size:,} x {figure.seq_length:,} = {figure.tokens_per_step:,} "
        f"tokens a step, {figure.seconds:.4g} s, {figure.devices:,} device(s), "
        f"{answer.tokens_per_second:,.0f} tokens/s"
    )
    console.print(escape(f"peak {figure.peak.value / 1e12:,.1f} TFLOP/s a device ({figure.peak.source})"))
    ours = Table("figure", "value", "model FLOPs a step", "how", title="our rule", title_justify="left")
    ours.add_row("MFU", f"{answer.mfu_causal:.1%}", f"{answer.causal.total:.4e}", FLOPS_RULE)
    ours.add_row(
        "MFU, full attention",
        f"{answer.mfu_full_attention:.1%}",
        f"{answer.full_attention.total:.4e}",
        "the masked half counted too, for comparison",
    )
    ours.add_row(
        "HFU",
        f"{answer.hfu:.1%}",
        f"{answer.hardware.total:.4e}",
        f"and recomputation: {figure.recompute}",
    )
    console.print(ours)
    others = Table("rule", "figure", "verdict", title="rules of others", title_justify="left")
    for other in answer.others:
        others.add_row(escape(other.rule), f"{other.mfu:.1%}", escape(other.verdict))
    console.print(others)
    for finding in answer.findings:
        console.print(f"[bold red]ERROR[/bold red] {escape(finding)}")
    if not answer.findings:
        console.print(escape(answer.verdict))
