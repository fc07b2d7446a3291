"""``drivetrain doctor``: what this machine has, what it lacks, what is known to go wrong here."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from drivetrain.cli.output import show_document

if TYPE_CHECKING:
    from drivetrain.engine.environment import Examination

__all__ = ["register"]

_HELP = """Devices, capabilities, versions, known-bad combinations, measured ceilings, and what is missing.

Exit code 1 where something that training requires is missing. Works without torch.

\b
Example:
  drivetrain doctor --deep
"""


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor", help=_HELP)(doctor)


def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also compile a function with torch.compile (about 10 s).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Examine this machine."""
    from drivetrain.engine.environment import examine

    examination = examine(deep)
    if as_json:
        show_document(examination.document())
    else:
        for line in _lines(examination):
            typer.echo(line)
    if not examination.ready:
        raise typer.Exit(1)


def _size(value: int | None) -> str:
    if value is None:
        return "?"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _lines(found: "Examination") -> Iterator[str]:
    from drivetrain.catalogue import catalogue

    yield from _machine(found)
    yield from ("", "Versions", f"  {', '.join(f'{name} {text}' for name, text in found.versions.items())}")
    if found.capabilities:
        yield from ("", "Capabilities")
        needed = {entry.capability: entry for entry in catalogue()}
        for one in found.capabilities:
            yield f"  {'yes' if one.available else 'no ':<4} {one.name:<20} {one.reason or one.detail}"
            if not one.available and one.name in needed:
                yield f"       needed by the optimisation {needed[one.name].name} ({needed[one.name].field})"
    yield from ("", "Settings")
    for setting in found.settings:
        yield f"  {'ok' if setting.state == 'good' else '!':<4} {setting.name:<20} {setting.found}"
        if setting.advice:
            yield f"       {setting.advice}"
    if found.ceilings:
        yield from ("", "Ceilings")
        for ceiling in found.ceilings:
            scale, unit = (1e12, "TFLOP/s") if ceiling.kind == "matmul" else (1e9, "GB/s")
            value = "-" if ceiling.value is None else f"{ceiling.value / scale:.4g} {unit}"
            yield f"  {f'{ceiling.kind} {ceiling.dtype}':<14} {value:<16} {ceiling.note}"
    yield from ("", "Known to go wrong here" if found.known_bad else "Known to go wrong here: nothing")
    for bad in found.known_bad:
        yield f"  {bad.effect}: {bad.concerns}  [{bad.id}]"
        yield from (f"       {bad.text}", f"       do: {bad.remedy}", f"       {bad.source}")
    yield from ("", "Missing" if found.missing else "Missing: nothing")
    for missing in found.missing:
        need = "required for" if missing.required else "only for"
        yield from (f"  {missing.package}: {need} {missing.needed_for}", f"       {missing.fix}")


def _machine(found: "Examination") -> Iterator[str]:
    machine = found.machine
    load = machine["load_average"]
    yield "Machine"
    yield f"  {machine['host']}, {machine['system']}; measurements in {machine['cache']}/{machine['name']}"
    yield (
        f"  {machine['cpu']}: {machine['usable_cores']} usable cores of {machine['cpus']} CPUs, "
        f"L3 {_size(machine['l3_bytes'])}, {_size(machine['available_memory_bytes'])} of memory free, "
        f"load {'?' if load is None else f'{load:.2f}'}"
    )
    if machine["gpus"]:
        yield f"  GPUs: {', '.join(machine['gpus'])}"
    if found.device is not None:
        device = found.device
        yield f"  a run trains on: {device['type']} ({device['name']}, {device['count']} visible)"
