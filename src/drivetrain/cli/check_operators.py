"""What ``check`` says of operators: backends that are named and cannot serve here, and what the tuned file has."""

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from drivetrain.errors import DrivetrainError

if TYPE_CHECKING:
    from drivetrain.config import RunConfig
    from drivetrain.engine.ops_tuning.coverage import Coverage

__all__ = ["operators_document", "print_operators"]

_SHOWN_CALLS = 8


def operators_document(config: "RunConfig", local_processes: int) -> dict[str, Any] | None:
    """What ``--json`` shows. None where no operator is asked for: then torch is not needed, nor imported.

    ``violations`` in it would end a run: the backends, or the file.
    """
    from drivetrain.config import chosen_backend, operator_fields
    from drivetrain.config.fusion import OFF

    if all(chosen_backend(config.fusion, name) == OFF for name in operator_fields()):
        return None
    reason = _not_looked_at(config)
    if reason is not None:
        return {"not_looked_at": reason, "violations": [], "tuned_file": None}
    from drivetrain.engine.devices import select_device
    from drivetrain.engine.ops_tuning.coverage import coverage_of
    from drivetrain.engine.preflight import unservable_backends

    violations = [
        {"rule": "named-backend-serves", "fields": [f"fusion.{name}"], "message": why}
        for name, why in unservable_backends(config, select_device(config.run).type).items()
    ]
    coverage = None
    try:
        coverage = coverage_of(config, local_processes)
    except DrivetrainError as error:
        violations.append(
            {"rule": "tuned-file-is-usable", "fields": ["fusion.tuned_file"], "message": str(error)}
        )
    return {
        "not_looked_at": None,
        "violations": violations,
        "tuned_file": None if coverage is None else _coverage(coverage),
    }


def _not_looked_at(config: "RunConfig") -> str | None:
    if find_spec("torch") is None:
        return "torch is not installed here"
    if config.run.device != "cuda":
        return None
    from drivetrain.engine.devices import select_device

    try:
        select_device(config.run)
    except DrivetrainError as error:
        # A cluster's configuration may be checked on a machine that has no such device.
        return str(error)
    return None


def _coverage(found: "Coverage") -> dict[str, Any]:
    calls = found.calls
    return {
        "path": str(found.path),
        "status": found.status,
        "sha256": found.sha256,
        "entries": found.entries,
        "stale": found.stale,
        "problems": list(found.problems),
        "unknown": found.unknown,
        "served": None if calls is None else len(calls) - len(found.misses),
        "calls": None
        if calls is None
        else [
            {
                "operator": one.operator,
                "call": one.call,
                "tokens": one.tokens,
                "gradients": one.gradients,
                "backend": one.backend,
                "tuned": one.tuned,
            }
            for one in calls
        ],
    }


def print_operators(document: dict[str, Any]) -> None:
    """A few lines of it."""
    if document["not_looked_at"] is not None:
        print(f"operators: backends and tuned file were not looked at: {document['not_looked_at']}")
        return
    found = document["tuned_file"]
    if found is None:
        return
    if found["status"] == "missing":
        print(
            f"tuned file: there is none ({found['path']}): each operator's own preference serves; make one with "
            "drivetrain ops tune CONFIG"
        )
        return
    for problem in found["problems"]:
        print(f"tuned file: {problem}")
    if found["status"] == "not used":
        return
    if found["unknown"] is not None:
        print(f"tuned file: {found['path']}, {found['entries']} entries; {found['unknown']}")
        return
    print(
        f"tuned file: {found['path']} has the choice of {found['served']} of {len(found['calls'])} kinds of calls that "
        "are auto"
    )
    misses = [one for one in found["calls"] if not one["tuned"]]
    for one in misses[:_SHOWN_CALLS]:
        kind = "training" if one["gradients"] else "evaluation"
        print(f"  not tuned: {one['call']}; {one['tokens']} tokens, in {kind}; {one['backend']} would serve")
    if len(misses) > _SHOWN_CALLS:
        print(f"  ... and {len(misses) - _SHOWN_CALLS} more; --json has all of them")
