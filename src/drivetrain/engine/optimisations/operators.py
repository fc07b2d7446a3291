"""What the implementations of all operators have in common: the model computes by the run's selection."""

from drivetrain.config import chosen_backend
from drivetrain.config.fusion import AUTO
from drivetrain.engine.optimisations.implementation import Building, Implementation, Status
from drivetrain.engine.optimisations.service import Service, service_of_rank

__all__ = ["operator_implementation"]


def operator_implementation(name: str) -> Implementation:
    """The implementation of ``fusion.<name>``. A backend that cannot serve ends the run with the first call, or with
    ``fusion.allow_fallback`` is said to be passed over."""

    def prepare(building: Building) -> Status:
        assert building.decoder is not None
        selection = building.operators
        selection.requested[name] = chosen_backend(building.config.fusion, name)
        building.decoder.use_operators(selection)
        return Status(active=True)

    def at_end(building: Building) -> Status:
        service = building.service or service_of_rank(building.operators)
        requested = building.operators.requested[name]
        return _status(service, name, requested, compiled=building.decoder_is_compiled)

    return Implementation(prepare, stage="model", at_end=at_end)


def _status(service: Service, name: str, requested: str, *, compiled: bool) -> Status:
    served = service.served.get(name, {})
    reasons = service.reasons.get(name, ())
    others = sum(calls for backend, calls in served.items() if requested not in (AUTO, backend))
    if not served and not compiled:
        return Status(active=False, reason="no call of it was made")
    if served and others == sum(served.values()):
        return Status(active=False, reason="; ".join(reasons), served=served)
    if others:
        why = "; ".join(reasons)
        return Status(
            active=True,
            reason=f"{others} of {sum(served.values())} calls were served otherwise: {why}",
            served=served,
        )
    return Status(active=True, reason="; ".join(reasons) or None, served=served)
