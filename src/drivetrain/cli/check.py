"""``drivetrain check``: rules and counts of a configuration; nothing is started."""

import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from drivetrain.config import LaunchFacts, LoadedConfig, RunConfig
    from drivetrain.engine.dry_run import DryRun

__all__ = ["device_type_of", "register", "show_dry_run"]

_SHOWN_HOSTS = 16
_NO_PLACE = ("rank", "host")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("check")(check)


def check(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A preset, a TOML file, or a run directory.")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.FIELD=VALUE]...", help="Fields to change.")
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, help="Processes. Default: the product of parallelism's sizes."),
    ] = None,
    per_host: Annotated[
        int | None,
        typer.Option("--per-host", min=1, help="Processes on each machine. Default: all on one."),
    ] = None,
    shapes: Annotated[
        bool,
        typer.Option(
            "--shapes",
            help="Also build the model without memory and list its parameters; with --dry-run, each rank's parts.",
        ),
    ] = False,
    dry: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Also build chosen ranks without memory: what each holds, and its collectives in a step.",
        ),
    ] = False,
    ranks: Annotated[
        str | None,
        typer.Option(
            "--ranks", metavar="0,7,4095", help="Ranks that --dry-run builds. Default: one of each kind."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
) -> None:
    """Check every rule of a configuration, and count parameters, tokens and FLOPs.

    All broken rules are reported together; fields whose value changes nothing are named.
    Exit code 0: it can be trained; 1: it cannot, or a rank of the dry run failed; 2: it cannot be read, or what
    breaks rules is to be run dry.

    Example: drivetrain check llama-10m training.global_batch_size=48 --devices 2
    """
    from drivetrain.catalogue.rules import all_rules
    from drivetrain.cli.check_operators import operators_document
    from drivetrain.cli.check_ranks import dry_run_document, parse_ranks
    from drivetrain.cli.check_recompute import recompute_document
    from drivetrain.cli.output import show_document
    from drivetrain.config import (
        LaunchFacts,
        derived_values,
        idle_fields,
        least_processes,
        load_config,
        violations,
    )
    from drivetrain.errors import ConfigurationError, DrivetrainError

    loaded = load_config(config, overrides or [])
    world_size = devices or least_processes(loaded.config)
    if per_host is not None and world_size % per_host:
        raise DrivetrainError(
            f"--per-host {per_host} does not divide {world_size} processes; give a divisor, or leave it out"
        )
    if ranks is not None and not dry:
        raise DrivetrainError(f"--ranks {ranks} names ranks of a dry run; add --dry-run, or drop it")
    shown = parse_ranks(ranks, world_size) if ranks is not None else None
    facts = LaunchFacts(
        world_size=world_size,
        local_world_size=per_host,
        source_name=loaded.name,
        device_type=device_type_of(loaded.config),
    )
    broken = violations(loaded.config, facts, all_rules())
    if broken and dry:
        raise ConfigurationError(*(str(violation) for violation in broken))
    document: dict[str, Any] = {
        "config": loaded.source,
        "devices": world_size,
        "layout": _layout(loaded, facts) if not broken else None,
        "accepted": not broken,
        "violations": [
            {"rule": violation.rule, "fields": list(violation.fields), "message": violation.message}
            for violation in broken
        ],
        "optimisations": _optimisations(loaded, facts),
        "operators": None,
        "no_effect": [
            {"field": idle.field, "reason": idle.reason} for idle in idle_fields(loaded.config, facts)
        ],
    }
    if not broken:
        operators = operators_document(loaded.config, per_host or world_size)
        document["operators"] = operators
        if operators is not None:
            document["violations"] = operators.pop("violations")
            document["accepted"] = not document["violations"]
        if dry and not document["accepted"]:
            raise ConfigurationError(*(one["message"] for one in document["violations"]))
        document["counts"] = _counts(loaded, world_size)
        document["precision"] = _precision(loaded, facts)
        document["derived"] = [
            {"field": derived.field, "value": derived.value, "reason": derived.reason}
            for derived in derived_values(loaded.config, facts)
        ]
        recompute = recompute_document(loaded.config, world_size)
        document["recompute"] = recompute
        if recompute is not None:
            document["violations"] += recompute.pop("violations")
            document["accepted"] = not document["violations"]
        if shapes:
            document["shapes"] = _shapes(loaded, world_size)
        if dry:
            document["dry_run"] = dry_run_document(loaded.config, world_size, shown, by_parameter=shapes)
    if json:
        show_document(document)
    else:
        _print(document)
    if not document["accepted"] or (dry and document["dry_run"]["failed"]):
        raise typer.Exit(1)


def device_type_of(config: "RunConfig") -> str | None:
    """What its processes would compute on if they were started here; None where no rule asks, or without torch."""
    by_budget = config.memory.recompute_granularity == "budget"
    if config.memory.device_memory_limit_bytes is None and not by_budget:
        return None
    if config.run.device != "auto":
        return config.run.device
    if find_spec("torch") is None:
        return None
    from drivetrain.engine.devices import select_device

    return select_device(config.run).type


def _optimisations(loaded: "LoadedConfig", facts: "LaunchFacts") -> list[dict[str, Any]]:
    """What the configuration asks for, and what it cannot have in this launch."""
    from drivetrain.catalogue import catalogue

    return [
        {
            "name": entry.name,
            "field": entry.field,
            "requested": entry.is_asked_for(loaded.config, facts),
            "no_effect_because": entry.applies(loaded.config, facts),
        }
        for entry in catalogue()
    ]


def _layout(loaded: "LoadedConfig", facts: "LaunchFacts") -> dict[str, Any]:
    """Which rank has which place on which host, and groups that leave a host where they should not."""
    from drivetrain.config import layout_of
    from drivetrain.config.hosts import crossing_groups, host_of, ranks_per_host

    layout = layout_of(loaded.config, facts.world_size)
    per_host = ranks_per_host(facts)
    dims = [dim for dim in layout.order if layout.size(dim) > 1]
    return {
        "sizes": {dim: layout.size(dim) for dim in layout.order},
        "shards": layout.size("dp_shard"),
        "ranks": [
            {
                "rank": rank,
                "host": host_of(rank, per_host),
                **{dim: layout.coordinates(rank)[dim] for dim in dims},
            }
            for rank in range(layout.world_size)
        ],
        "warnings": crossing_groups(layout, per_host),
    }


def _precision(loaded: "LoadedConfig", facts: "LaunchFacts") -> list[dict[str, Any]]:
    """The dtype of every class of tensors."""
    from dataclasses import asdict

    from drivetrain.config.tensor_dtypes import tensor_classes

    return [asdict(one) for one in tensor_classes(loaded.config, facts)]


def _counts(loaded: "LoadedConfig", world_size: int) -> dict[str, Any]:
    from drivetrain.config import num_microbatches, tokens_per_step, total_tokens
    from drivetrain.measure.flops import FLOPS_RULE, model_flops
    from drivetrain.measure.parameters import parameter_count

    config = loaded.config
    parameters = parameter_count(config.model)
    flops = model_flops(
        config.model,
        tokens=tokens_per_step(config),
        sum_squared_lengths=config.training.global_batch_size * config.model.seq_length**2,
    )
    return {
        "parameters": parameters.total,
        "parameters_without_embedding": parameters.non_embedding,
        "tokens_per_step": tokens_per_step(config),
        "num_microbatches": num_microbatches(config, world_size),
        "total_tokens": total_tokens(config),
        "model_flops_per_step_of_whole_sequences": flops.total,
        "flops_rule": FLOPS_RULE,
    }


def _shapes(loaded: "LoadedConfig", world_size: int) -> list[dict[str, Any]]:
    from drivetrain.cli.environment import require_torch

    require_torch()
    from drivetrain.engine.dry_run import dry_run

    return [
        {"name": shape.name, "shape": list(shape.shape), "elements": shape.elements}
        for shape in dry_run(loaded.config, world_size).shapes
    ]


def _print(document: dict[str, Any]) -> None:
    if not document["accepted"]:
        for violation in document["violations"]:
            print(f"{violation['rule']}: {violation['message']}")
        count = len(document["violations"])
        print(f"{document['config']}: {count} broken rule{'s' if count != 1 else ''}", file=sys.stderr)
        return
    print(
        f"{document['config']} on {document['devices']} device{'s' if document['devices'] != 1 else ''}: accepted"
    )
    _print_layout(document["layout"])
    for name, value in document["counts"].items():
        print(f"  {name:42} {value:,}" if isinstance(value, int) else f"  {name:42} {value}")
    counted = {"num_microbatches", "tokens_per_step", "total_tokens"}
    print("derived:")
    for derived in document["derived"]:
        if derived["field"] not in counted:
            value = "known when it starts" if derived["value"] is None else derived["value"]
            print(f"  {derived['field']:42} {value}  ({derived['reason']})")
    print("precision:")
    for one in document["precision"]:
        print(f"  {one['name']:42} {one['dtype'] or '-':4}  ({one['note']})")
    asked = [one for one in document["optimisations"] if one["requested"]]
    at_work = [one["name"] for one in asked if one["no_effect_because"] is None]
    print(f"optimisations: {', '.join(at_work) or 'none'}")
    if document["operators"] is not None:
        from drivetrain.cli.check_operators import print_operators

        print_operators(document["operators"])
    if document["recompute"] is not None:
        from drivetrain.cli.check_recompute import print_recompute

        print_recompute(document["recompute"]["lines"])
    for idle in document["no_effect"]:
        print(f"no effect: {idle['field']}, because {idle['reason']}")
    for shape in document.get("shapes", []):
        print(f"  {shape['name']:42} {'x'.join(map(str, shape['shape'])):>18} {shape['elements']:>14,}")
    if "dry_run" in document:
        from drivetrain.cli.check_ranks import print_dry_run

        print_dry_run(document["dry_run"])


def _print_layout(layout: dict[str, Any]) -> None:
    """A line for each host with the place of each of its ranks, and what is wrong with that."""
    ranks = layout["ranks"]
    if len(ranks) > 1:
        print("layout: " + ", ".join(f"{dim} {size}" for dim, size in layout["sizes"].items()))
        hosts = sorted({rank["host"] for rank in ranks})
        for host in hosts[:_SHOWN_HOSTS]:
            places = [
                f"{rank['rank']}({' '.join(f'{dim}{place}' for dim, place in rank.items() if dim not in _NO_PLACE)})"
                for rank in ranks
                if rank["host"] == host
            ]
            print(f"  host {host}: {' '.join(places)}")
        if len(hosts) > _SHOWN_HOSTS:
            print(f"  ... and {len(hosts) - _SHOWN_HOSTS} more hosts; --json has all of them")
    for warning in layout["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)


def show_dry_run(loaded: "LoadedConfig", world_size: int, *, as_json: bool) -> int:
    """Build ``loaded`` without memory and show what would be trained; returns the exit code."""
    import dataclasses

    from drivetrain.cli.output import show_document
    from drivetrain.engine.dry_run import dry_run

    built: DryRun = dry_run(loaded.config, world_size)
    if as_json:
        show_document({"status": "dry run", **dataclasses.asdict(built)})
        return 0
    for line in (
        f"dry run of {loaded.source}: the model was built without memory, nothing was started",
        f"  parameters                     {built.parameters:,}",
        f"  weights, gradients, optimizer  {built.state_bytes:,} bytes on the rank with most, activations on top",
        f"  micro-batches in a step        {built.num_microbatches} on each of {world_size} rank(s)",
        f"  tokens                         {built.tokens_per_step:,} a step, {built.total_tokens:,} in all",
        f"  model FLOPs in a step          {built.model_flops_per_step:,} (whole sequences)",
        f"  logits of a micro-batch        {built.logits_shape}",
        "  learning rate                  "
        + ", ".join(f"{rate:.3g} at step {step}" for step, rate in built.learning_rates),
    ):
        print(line)
    return 0
