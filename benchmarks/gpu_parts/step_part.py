"""Part ``step``: optimizer steps of a Llama of about a billion parameters through the engine's own stepper, with MFU.

The shape is TinyLlama's (Zhang et al., arXiv:2401.02385): 22 layers of 2,048 features, 32 heads in 4 groups, 1.1
billion parameters. A step is the time from the end of one to the end of the next, on the device's clock: forward,
backward, clipping and AdamW over random tokens; there is no loader. Weights are drawn on the device, as a billion of
them drawn on a CPU would take longer than the steps.
"""

import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from statistics import median
from typing import Any

import torch
from torch import nn

from drivetrain.config import Layout, RunConfig, load_config
from drivetrain.config.fusion import LEVELS
from drivetrain.engine.ceilings import MatmulShape, measure_matmul
from drivetrain.engine.devices import Device, peak_for, select_device
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from drivetrain.engine.optimizer import build_optimizer
from drivetrain.engine.parallel.local_model import build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks
from drivetrain.engine.step import StepFigures, Stepper
from drivetrain.measure.flops import FLOPS_RULE, model_flops
from drivetrain.measure.parameters import parameter_count
from drivetrain.measure.peaks import Peak, supplied_peak
from gpu_parts.context import Context, attempt
from gpu_parts.record import DRY, Row, Verdict, times_in_words
from harness.attention_workloads import document_lengths

__all__ = ["VARIANTS", "Variant", "batch_of_lengths", "dry_variants", "mfu_lines", "run"]

_PRESET = "llama-125m"
_SHAPE: Mapping[str, int | str] = {
    "num_layers": 22,
    "hidden_size": 2048,
    "ffn_hidden_size": 5632,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "seq_length": 2048,
    "vocab_size": 32000,
    "untie_embeddings_and_output_weights": "true",
}
_TINY_SHAPE: Mapping[str, int | str] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 32,
    "vocab_size": 64,
    "untie_embeddings_and_output_weights": "true",
}
_MICRO_BATCHES = (8, 4, 2, 1)
"""Sequences; the first that fits is taken for all variants."""
_KERNELS = tuple(f"fusion.{name}=triton" for name in ("rms_norm", "add_rms_norm", "rotary", "glu"))


@dataclass(frozen=True)
class Variant:
    """What is stepped.

    Attributes:
        name: in words.
        overrides: of the configuration.
        packed: whether documents of log-normal length fill the sequences; else each is one document.
    """

    name: str
    overrides: tuple[str, ...]
    packed: bool = False

    @property
    def compiles(self) -> bool:
        """Whether the first step compiles for a minute."""
        return "fusion.compile=true" in self.overrides


VARIANTS = (
    Variant("fusion.level=off", ()),
    Variant("fusion.level=all", ("fusion.level=all",)),
    Variant("fusion.level=all, our Triton kernels", ("fusion.level=all", *_KERNELS)),
    Variant("fusion.compile=true", ("fusion.compile=true",)),
    Variant("fusion.level=off, packed documents", (), packed=True),
    Variant("fusion.level=all, packed documents", ("fusion.level=all",), packed=True),
    Variant("fusion.level=core", ("fusion.level=core",)),
    Variant("fusion.level=all, fusion.compile=true", ("fusion.level=all", "fusion.compile=true")),
)
"""In this order while there is time."""

_WARM, _LEAST, _MOST = 3, 5, 12
_SUSTAIN_S = 5.0


def run(context: Context) -> None:
    """The peak first, then the variants."""
    shape = _TINY_SHAPE if context.dry else _SHAPE
    config = _config(context, shape, 1, ())
    device = select_device(config.run)
    peaks, without = _peaks(context, device)
    context.record.tell(
        model=dict(shape),
        parameters=parameter_count(config.model).total,
        flops_rule=FLOPS_RULE,
        token_rule="all tokens that are processed",
        peaks=[{"flops_per_s": peak.value, "peak_source": peak.source} for peak in peaks],
        no_mfu_because=without,
        window=f"steps after the first {_WARM} until {_MOST} or the time is up, {_LEAST} at least",
    )
    variants = dry_variants() if context.dry else VARIANTS
    for left_out in sorted({one.name for one in VARIANTS} - {one.name for one in variants}):
        context.record.leave_out(left_out, "a dry run compiles nothing")
    micro_batches: tuple[int, ...] = (2,) if context.dry else _MICRO_BATCHES
    for number, variant in enumerate(variants):
        if context.budget.spent:
            context.record.leave_out(variant.name, "time was up")
            continue
        micro_batches = _first_that_fits(
            context, variant, shape, micro_batches, device, peaks, len(variants) - number
        )


def dry_variants() -> tuple[Variant, ...]:
    """Those that compile nothing and need no device: where a level stands, its operators are served by ``eager``."""
    found = []
    for variant in VARIANTS:
        if not (variant.compiles or any(override.endswith("=triton") for override in variant.overrides)):
            levels = [override.removeprefix("fusion.level=") for override in variant.overrides]
            served = sorted({operator for level in levels for operator in LEVELS[level]})
            found.append(replace(variant, overrides=tuple(f"fusion.{operator}=eager" for operator in served)))
    return tuple(found)


def _peaks(context: Context, device: Device) -> tuple[list[Peak], str | None]:
    """What MFU is counted against: what the user gave, what was measured here, the data sheet where it is known."""
    peaks = [] if context.peak is None else [supplied_peak(context.peak)]
    shapes = [MatmulShape(64, 64, 64)] if context.dry else None
    entry = attempt(
        context,
        "matrix product, sustained",
        "torch",
        lambda: measure_matmul(
            "bf16", 0.05 if context.dry else _SUSTAIN_S, torch.get_num_threads(), device, shapes=shapes
        ),
    )
    if context.dry:
        return [], DRY
    if entry is not None:
        peaks.append(Peak(entry.value, entry.source))
    sheet = peak_for(device, "bf16", 1)
    if sheet.peak is not None:
        peaks.append(sheet.peak)
    without = None if peaks else f"no product was measured, and {sheet.reason}"
    return peaks, without


def _config(
    context: Context, shape: Mapping[str, int | str], micro_batch: int, overrides: Sequence[str]
) -> RunConfig:
    given = [
        *(f"model.{name}={value}" for name, value in shape.items()),
        f"training.micro_batch_size={micro_batch}",
        f"training.global_batch_size={micro_batch}",
        f"run.device={context.device.type}",
        # Small, as there is no warm-up; it costs the same time as any.
        "optimizer.lr=1e-4",
        *overrides,
    ]
    return load_config(_PRESET, given).config


def _first_that_fits(
    context: Context,
    variant: Variant,
    shape: Mapping[str, int | str],
    micro_batches: Sequence[int],
    device: Device,
    peaks: Sequence[Peak],
    variants_left: int,
) -> tuple[int, ...]:
    """Step ``variant`` with the first micro-batch that fits; those from that one on are the next variant's choice."""
    for number, micro_batch in enumerate(micro_batches):
        what = f"step, {variant.name}"
        config = _config(context, shape, micro_batch, variant.overrides)
        found = attempt(
            context,
            what,
            "engine",
            lambda config=config: _steps(context, config, variant, device, variants_left),  # type: ignore[misc]
        )
        if isinstance(found, _Stepped):
            _tell(context, what, config, found, peaks)
        elif found is not None:
            context.record.leave_out(f"{what}, micro-batch {micro_batch}", found.why)
        fits = not isinstance(found, _TooLarge)
        del found
        _forget(context, variant)
        if fits:
            return tuple(micro_batches[number:])
    return tuple(micro_batches[-1:])


def _forget(context: Context, variant: Variant) -> None:
    """Give the memory of a model back."""
    if variant.compiles:
        # Compiled blocks are held by the code that was made of them.
        torch.compiler.reset()
    gc.collect()
    context.clock.settle()


@dataclass(frozen=True)
class _TooLarge:
    """A micro-batch does not fit into the device's memory, which is no failure: a smaller one may."""

    why: str


@dataclass(frozen=True)
class _Stepped:
    times: Sequence[float]
    figures: StepFigures
    losses: tuple[float, ...]
    findings: Sequence[str]
    served: dict[str, int]
    step_bytes: int | None


def _steps(
    context: Context, config: RunConfig, variant: Variant, device: Device, variants_left: int
) -> _Stepped | _TooLarge:
    try:
        return _stepped(context, config, variant, device, variants_left)
    except torch.OutOfMemoryError as error:
        return _TooLarge(str(error).splitlines()[0])


def _stepped(
    context: Context, config: RunConfig, variant: Variant, device: Device, variants_left: int
) -> _Stepped:
    torch.manual_seed(config.run.seed)
    mesh = Mesh.form(Layout(), 0, device.type)
    building = Building(config=config, device=device, num_ranks=1)
    optimisations = Optimisations(building)
    optimisations.prepare("choices")
    local = build_local_model(config, mesh, device.torch_device, building)
    building.decoder = local.decoder
    optimizer = build_optimizer(local.sync.updated(), config.optimizer, fused=building.fused_update)
    _draw(local.decoder, config.model.init_method_std)
    optimisations.prepare("model")
    stepper = Stepper(
        decoder=local.decoder,
        sync=local.sync,
        optimizer=optimizer,
        group=ProcessGroup(Ranks()),
        mesh=mesh,
        device=device.torch_device,
        num_microbatches=1,
        max_norm=config.training.clip_grad,
        pipeline=None,
    )
    # On the device before the first step: what is stepped is the model, not the copy of its tokens.
    batches = repeat(_batch(config, variant.packed).to(device.torch_device))

    def step() -> StepFigures:
        return stepper.step(batches, config.optimizer.lr, stop_requested=False)

    first = step()
    latest = [first]
    times: list[float] = []

    def go() -> None:
        times[:] = context.clock.periods(
            lambda: latest.append(step()),
            context.budget.share(variants_left),
            warm=_WARM - 1,
            least=_LEAST,
            most=_MOST,
        )

    held_bytes = context.clock.peak_bytes(go)
    losses = tuple(float(one.loss_sum) / one.valid_tokens for one in (first, latest[-1]))
    optimisations.end()
    served = {f"{operator}/{name}": count for (operator, name), count in building.operators.served.items()}
    return _Stepped(times, latest[-1], losses, optimisations.findings(), served, held_bytes)


@torch.no_grad()
def _draw(decoder: nn.Module, deviation: float) -> None:
    """Weights on the device itself: matrices normal, norms 1, biases 0."""
    for name, parameter in decoder.named_parameters():
        if parameter.ndim >= 2:
            parameter.normal_(0.0, deviation)
        elif name.endswith("bias"):
            parameter.zero_()
        else:
            parameter.fill_(1.0)


def _batch(config: RunConfig, packed: bool) -> Batch:
    sequences, length = config.training.micro_batch_size, config.model.seq_length
    rows = [document_lengths(length, seed) if packed else [length] for seed in range(sequences)]
    return batch_of_lengths(rows, config.model.vocab_size)


def batch_of_lengths(rows: Sequence[Sequence[int]], vocabulary: int) -> Batch:
    """Random tokens in documents of these lengths, one sequence of them in each row."""
    length = sum(rows[0])
    assert all(sum(row) == length for row in rows)
    lengths = torch.tensor([one for row in rows for one in row])
    borders = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = torch.randint(vocabulary, (len(rows), length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(tokens.numel(), dtype=torch.bool)
    # The last token of a document has nothing to predict.
    mask[borders[1:] - 1] = False
    positions = torch.arange(tokens.numel()) - torch.repeat_interleave(borders[:-1], lengths)
    return Batch(
        token_ids=tokens,
        labels=tokens.flatten().roll(-1).view_as(tokens),
        loss_mask=mask.view_as(tokens),
        position_ids=positions.view_as(tokens),
        cu_seqlens=borders.int(),
        num_valid_tokens=int(mask.sum()),
        sum_squared_lengths=int(lengths.square().sum()),
    )


def mfu_lines(flops: int, seconds: float, peaks: Sequence[Peak]) -> list[dict[str, Any]]:
    """MFU under each peak, with its rule."""
    return [
        {
            "mfu": flops / (seconds * peak.value),
            "peak_flops_per_s": peak.value,
            "peak_source": peak.source,
            "flops_rule": FLOPS_RULE,
        }
        for peak in peaks
    ]


def _tell(context: Context, what: str, config: RunConfig, found: _Stepped, peaks: Sequence[Peak]) -> None:
    figures: dict[str, Any] = {
        "micro_batch_size": config.training.micro_batch_size,
        "tokens": found.figures.tokens,
        "losses_first_and_last": found.losses,
        "served": found.served,
        "findings": list(found.findings),
    }
    said = DRY
    if found.times:
        seconds = median(found.times)
        flops = model_flops(
            config.model, tokens=found.figures.tokens, sum_squared_lengths=found.figures.sum_squared_lengths
        ).total
        mfu = mfu_lines(flops, seconds, peaks)
        figures |= {
            "model_flops": flops,
            "tokens_per_s": found.figures.tokens / seconds,
            "mfu": mfu,
            "step_bytes": found.step_bytes,
        }
        said = f"{times_in_words(found.times, dry=False)}, {figures['tokens_per_s']:,.0f} tokens/s"
        said += (
            "".join(f", MFU {one['mfu']:.1%} of {one['peak_source']}" for one in mfu) or ", no MFU: no peak"
        )
    if found.findings:
        said += f"; {'; '.join(found.findings)}"
    finite = all(math.isfinite(loss) for loss in found.losses)
    said += f"; loss {found.losses[0]:.3f} at first, {found.losses[1]:.3f} at last, of the same tokens"
    verdict: Verdict = "information" if finite else "wrong"
    context.record.add(Row(what, "engine", said, verdict, None, found.times, figures))
