"""Waiting for batches: builders beside the training, and transforms that need not run again."""

from dataclasses import replace

from drivetrain.catalogue.time_models.facts import TimeFacts
from drivetrain.catalogue.time_models.model import MeanStep, TimeModel, mean_step, predicted
from drivetrain.config import RunConfig, num_microbatches
from drivetrain.config.blend import transform_paths
from drivetrain.measure.optimisation import NoPrediction, Prediction

__all__ = ["BAKED_TRANSFORM", "BUILDERS", "PACKED"]

_LOADER = ("data.loader",)
_NOTHING = NoPrediction("no time of the profiled steps is waiting for batches")
_NO_STEPS = NoPrediction("the account has no steps")


def _builders(config: RunConfig) -> int:
    """Threads or processes that build batches beside the training thread; 0: it builds them itself."""
    data = config.data
    return data.num_workers or (1 if data.prefetch_batches else 0)


def _builders_of(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """Step time T, of which w waiting for batches.

    Where the training thread builds them itself, w is the time of building. n builders take w/n beside a step, and a
    step is as long as the longer of both: ``max(T - w, w / n)``. Where n0 builders do already and are waited for, they
    take all of a step: building is ``n0 T``, and the step becomes ``max(T - w, n0 T / n)``. Without a spare core for
    each builder the computation gives its own up: ``w / threads`` on top, at most. All in ns.
    """
    step = mean_step(facts.account)
    if step is None:
        return _NO_STEPS
    waited = step.ns_of(_LOADER)
    before, now = _builders(facts.config), _builders(after)
    if now == before:
        return NoPrediction("as many builders as before: how unevenly batches take is not known")
    if now < before:
        return NoPrediction("fewer builders: what they would not keep up with is not known")
    if not waited:
        return _NOTHING
    building = before * step.window_ns if before else waited
    alone = max(step.window_ns - waited, building / now)
    rule = (
        f"{waited / 1e6:.3g} ms of {step.window_ns / 1e6:.3g} ms a step are waiting for batches, and {now} "
        f"builder{'s' if now > 1 else ''} would take {building / now / 1e6:.3g} ms beside the rest"
    )
    if facts.spare_cores is None or facts.threads is None:
        return predicted(
            step,
            _LOADER,
            step.window_ns - alone,
            f"{rule}; upper bound: no core is taken away from the computation",
        )
    lacking = max(0, (now - before) - facts.spare_cores) / (now - before)
    if not lacking or before:
        return predicted(
            step, _LOADER, step.window_ns - alone, f"{rule}; {facts.spare_cores} cores are spare"
        )
    shared = max(step.window_ns - waited + lacking * waited / facts.threads, building / now)
    return predicted(
        step,
        _LOADER,
        step.window_ns - shared,
        f"{rule}; {facts.spare_cores} cores are spare, so that the computation gives up "
        f"{lacking * waited / facts.threads / 1e6:.3g} ms of its own",
        low_ns=step.window_ns - shared,
        high_ns=step.window_ns - alone,
    )


def _baked(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """The transform's own time t a step is not spent again: ``min(w, t / max(1, builders))`` of the w ns waited."""
    del after
    step = mean_step(facts.account)
    if step is None:
        return _NO_STEPS
    waited = step.ns_of(_LOADER)
    if not waited:
        return _NOTHING
    paths = transform_paths(facts.config.data.transform)
    known = [facts.data_operations[path] for path in paths if path in facts.data_operations]
    if not known:
        return NoPrediction("the run does not say how long data.transform takes")
    seconds = sum(known) * num_microbatches(facts.config, facts.launch.world_size)
    return _of_building(step, waited, 1e9 * seconds / max(1, _builders(facts.config)))


def _of_building(step: MeanStep, waited: float, transform_ns: float) -> Prediction | NoPrediction:
    return predicted(
        step,
        _LOADER,
        min(waited, transform_ns),
        f"{transform_ns / 1e6:.3g} ms a step are the transform's, of {waited / 1e6:.3g} ms that batches are waited "
        "for; reading takes as long as before",
    )


BUILDERS = TimeModel(
    "building goes on beside the step, which then takes as long as the longer of both; without spare cores the "
    "computation gives its own up",
    _builders_of,
)
BAKED_TRANSFORM = TimeModel("the time of data.transform, as far as batches are waited for", _baked)


def _packed(facts: TimeFacts, after: RunConfig) -> Prediction | NoPrediction:
    """A share p of the processed tokens is padding: as many tokens that carry loss take ``1 - p`` of the time."""
    if after.data.packing == "pad":
        return NoPrediction("documents are padded either way")
    if facts.padding is None:
        return NoPrediction("the run does not say how much of its tokens is padding")
    step = mean_step(facts.account)
    if step is None:
        return _NO_STEPS
    found = predicted(
        step,
        ("compute.matmul", "compute.attention"),
        facts.padding * step.window_ns,
        f"{facts.padding:.1%} of the processed tokens are padding; a gain in tokens that carry loss, not in tokens",
    )
    return found if isinstance(found, NoPrediction) else replace(found, of="effective_tokens")


PACKED = TimeModel(
    "the share of processed tokens that is padding: a gain in tokens that carry loss, of which a trial of processed "
    "tokens sees nothing",
    _packed,
)
