"""From a configuration to the objects that train it, restored to where the run stands."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch

from drivetrain.archive.origin import PLAIN, RunOrigin
from drivetrain.archive.reader import open_run
from drivetrain.config import ModelConfig, RunConfig, layout_of
from drivetrain.config.derive import microbatches_per_rank
from drivetrain.config.layout import ORDER
from drivetrain.engine.checkpoint import (
    CheckpointSaver,
    HeldState,
    LoadedCheckpoint,
    agreement_over,
    damage,
    find_latest,
    held_state,
    load_checkpoint,
    remove_leftovers,
    set_aside,
)
from drivetrain.engine.communication import Communication, why_unseen
from drivetrain.engine.data.corpus import Corpus, ensure_corpus
from drivetrain.engine.data.loader import BatchLoader
from drivetrain.engine.devices import Device
from drivetrain.engine.initial_state import former_state, initialize_weights, other_data
from drivetrain.engine.memory.cuda import apply_cuda_limit
from drivetrain.engine.memory.limit import count_step, unseen_with_compile
from drivetrain.engine.memory.recompute_budget import BudgetPlan, agreed
from drivetrain.engine.operators_of_run import selection_of_run
from drivetrain.engine.optimisations.implementation import Building
from drivetrain.engine.optimisations.in_effect import Optimisations
from drivetrain.engine.optimizer import build_optimizer, clip_gradients
from drivetrain.engine.parallel.local_model import LocalModel, build_local_model
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.process_group import ProcessGroup
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.engine.perturbation import perturb_weights
from drivetrain.engine.precision import LossScaler
from drivetrain.engine.preflight import require_countable_step
from drivetrain.engine.progress import Progress
from drivetrain.engine.random_state import restore_random_state, seed_everything
from drivetrain.engine.recorder import Recorder
from drivetrain.engine.step import Stepper
from drivetrain.engine.training_run import LOSS_SCALER, Logbook, TrainingRun
from drivetrain.engine.tuned_chunks import tuned_chunks_of_run
from drivetrain.engine.weight_hash import ReplicaCheck
from drivetrain.errors import CheckpointError, DataError
from drivetrain.measure.peaks import Peak

__all__ = ["assemble"]


def assemble(
    config: RunConfig,
    run_path: Path,
    group: ProcessGroup,
    device: Device,
    logbook: Logbook,
    peak: Peak | None,
    fingerprint: str,
    origin: RunOrigin = PLAIN,
    budget_plan: BudgetPlan | None = None,
) -> TrainingRun:
    """Build everything on this rank; weights and state come from the run's newest sound checkpoint, if it has any.

    Args:
        budget_plan: what this rank recomputes to stay within a budget; where a run goes by one.

    Raises:
        DrivetrainError: corpus, weights or checkpoints that do not fit; OutOfMemory.
    """
    timeout = timedelta(minutes=config.parallelism.distributed_timeout_minutes)
    mesh = Mesh.form(layout_of(config, group.size), group.ranks.rank, device.type, timeout)
    seed_everything(config.run.seed, mesh.index("dp"), mesh.index("pp"))
    corpus = ensure_corpus(config.data, config.model)
    _require_same_corpus(corpus, fingerprint, run_path)
    building = Building(
        config=config,
        device=device,
        num_ranks=group.size,
        local_world_sizes=_local_world_sizes(config, group),
        operators=selection_of_run(config, device, group, logbook),
        tuned_chunks=tuned_chunks_of_run(config, device, group, mesh),
    )
    if budget_plan is not None:
        building.recomputed = agreed(budget_plan, group, mesh)
        for line in budget_plan.lines():
            logbook.say(line)
        logbook.event("window", what="recompute_plan", **budget_plan.to_document())
    optimisations = Optimisations(building)
    optimisations.prepare("choices")
    if building.ranks_per_host is not None:
        mesh = mesh.in_levels(building.ranks_per_host, device.torch_device)
    local = build_local_model(config, mesh, device.torch_device, building)
    building.decoder = local.decoder
    sync = local.sync
    optimizer = build_optimizer(
        sync.updated(),
        config.optimizer,
        fused=building.fused_update,
        offload=building.state_offload,
        state_dtype=building.state_dtype,
        placements=sync.placements(),
    )
    layout = {**{dim: mesh.size(dim) for dim in ORDER}, "order": config.parallelism.rank_order}
    state = held_state(sync, optimizer)
    checkpoint = _restore(run_path / "checkpoints", group, config.model, state, layout, logbook)
    resumed, former = checkpoint is not None, former_state(config)
    if checkpoint is None and former is not None:
        _require_sound(former, group, begun=open_run(run_path).last_segment() is not None)
        checkpoint = _load(former, group, config.model, state, layout, logbook)
        if group.is_main and (other := other_data(former, fingerprint)) is not None:
            logbook.warn(other)
    elif checkpoint is None:
        initialize_weights(sync, config)
        if origin.perturb_ulp is not None:
            perturb_weights(sync.parameters(), origin.perturb_ulp, building.compute_dtype)
    optimisations.prepare("model")
    _enforce_memory_limit(optimisations, corpus, local, optimizer, group, mesh, logbook)
    if checkpoint is not None and checkpoint.random_state is not None:
        # Last of all, so that nothing above has drawn from the generators in between.
        restore_random_state(checkpoint.random_state)
    return TrainingRun(
        path=run_path,
        config=config,
        group=group,
        mesh=mesh,
        device=device,
        corpus=corpus,
        decoder=local.decoder,
        optimizer=optimizer,
        optimisations=optimisations,
        budget_plan=budget_plan,
        stepper=Stepper(
            decoder=local.decoder,
            sync=sync,
            optimizer=optimizer,
            group=group,
            mesh=mesh,
            device=device.torch_device,
            num_microbatches=microbatches_per_rank(config, mesh.size("dp")),
            max_norm=config.training.clip_grad,
            pipeline=local.pipeline,
            loss_scaler=_loss_scaler(building, checkpoint),
            offload=building.offload,
            embedding=building.embedding_offload,
        ),
        recorder=Recorder(
            config,
            group,
            device.torch_device,
            peak=peak,
            writer=logbook.writer,
            console=logbook.console,
            communication=_followed(config, local.sync.traffic, group, mesh, device),
            repeated=building.repeated,
        ),
        saver=CheckpointSaver(
            run_path / "checkpoints",
            config.model,
            keep_latest_k=config.checkpoint.keep_latest_k,
            asynchronous=building.async_save,
            tokenizer_file=corpus.tokenizer_file,
            agreement=agreement_over(group),
            layout=layout,
            timeout_s=60 * config.parallelism.distributed_timeout_minutes,
        ),
        progress=Progress() if checkpoint is None else Progress.from_dict(checkpoint.trainer_state),
        resumed=resumed,
        logbook=logbook,
        probed=origin.probe,
        replica_check=(
            ReplicaCheck(agreement_over(group))
            if group.size > 1 and config.monitor.check_weight_hash_across_dp_replicas_interval
            else None
        ),
    )


def _loss_scaler(building: Building, checkpoint: LoadedCheckpoint | None) -> LossScaler | None:
    """Where the run computes in fp16: from its checkpoint, or new where that was trained without one."""
    if building.compute_dtype != torch.float16:
        return None
    scaler = LossScaler(building.config.precision)
    saved = None if checkpoint is None else checkpoint.trainer_state.get(LOSS_SCALER)
    if isinstance(saved, dict):
        scaler.restore(saved)
    return scaler


def _followed(
    config: RunConfig, traffic: Traffic, group: ProcessGroup, mesh: Mesh, device: Device
) -> Communication:
    """Have the times of this rank's collectives kept, where they can be known."""
    unseen = why_unseen(
        device.type,
        pipeline=mesh.size("pp"),
        zero_stage=config.parallelism.zero_stage,
        replicas=mesh.size("dp_replicate"),
    )
    if group.size == 1:
        return Communication(None)
    if device.type != "cpu":
        return Communication(None, unseen)
    traffic.flights = group.flights
    return Communication(group.flights, unseen)


def _local_world_sizes(config: RunConfig, group: ProcessGroup) -> frozenset[int]:
    """Numbers of processes on machines, each once; asked of all ranks where it matters."""
    if group.size == 1 or not config.overlap.hierarchical_collectives:
        return frozenset()
    return frozenset(map(int, group.gather_texts(str(group.ranks.local_world_size))))


def _require_same_corpus(corpus: Corpus, fingerprint: str, run_path: Path) -> None:
    if corpus.fingerprint != fingerprint:
        raise DataError(
            f"the corpus {corpus.prefix} is not the one this run was started with (fingerprint "
            f"{corpus.fingerprint[:12]}, the run has {fingerprint[:12]}); put the former files back, start a new run, "
            f"or let this one go on with other data: drivetrain data accept {run_path}"
        )


def _restore(
    folder: Path,
    group: ProcessGroup,
    model: ModelConfig,
    state: HeldState,
    layout: Mapping[str, object],
    logbook: Logbook,
) -> LoadedCheckpoint | None:
    """Load the newest checkpoint that is whole; None where there is none."""
    found: Path | None = None
    damaged: list[Path] = []
    failure = ""
    if group.is_main:
        remove_leftovers(folder)

        def pass_over(path: Path, why: str) -> None:
            logbook.warn(f"checkpoint {path.name} is damaged ({why}); using the one before")
            damaged.append(path)

        try:
            found = find_latest(folder, pass_over)
        except CheckpointError as error:
            failure = str(error)
        else:
            for path in damaged:
                set_aside(path)
    # Rank 0 decides for all: two ranks must not resume from different steps, and none may wait for one that
    # has given up.
    failure = group.broadcast_text(failure)
    if failure:
        raise CheckpointError(failure)
    name = group.broadcast_text(found.name if found is not None else "")
    if not name:
        return None
    return _load(folder / name, group, model, state, layout, logbook)


def _require_sound(former: Path, group: ProcessGroup, *, begun: bool) -> None:
    """Compare ``former`` with its checksums where the run has ``begun``, maybe days ago; whoever makes a run compares
    them just before. Rank 0 reads, for all."""
    reason = damage(former) if begun and group.is_main else None
    failure = group.broadcast_text(f"{former} is no sound checkpoint: {reason}" if reason is not None else "")
    if failure:
        raise CheckpointError(failure)


def _load(
    path: Path,
    group: ProcessGroup,
    model: ModelConfig,
    state: HeldState,
    layout: Mapping[str, object],
    logbook: Logbook,
) -> LoadedCheckpoint:
    """Load ``path``, and say where its random numbers end."""
    checkpoint = load_checkpoint(path, model, state, agreement=agreement_over(group), layout=layout)
    logbook.say(f"continuing from checkpoint {path.name}")
    if checkpoint.random_state is None:
        logbook.warn(
            f"{path.name} was saved by {checkpoint.world_size} ranks and is continued by {group.size}"
            f"{' in another layout' if checkpoint.world_size == group.size else ''}: what the ranks draw at random "
            "begins anew here"
        )
    return checkpoint


def _enforce_memory_limit(
    optimisations: Optimisations,
    corpus: Corpus,
    local: LocalModel,
    optimizer: torch.optim.AdamW,
    group: ProcessGroup,
    mesh: Mesh,
    logbook: Logbook,
) -> None:
    """Hold ``memory.device_memory_limit_bytes``: on CUDA by the allocator, on a CPU by counting one step.

    All micro-batches have one shape, so one untimed step that leaves no trace stands for every step.
    """
    config, device = optimisations.building.config, optimisations.building.device
    limit_bytes = config.memory.device_memory_limit_bytes
    if limit_bytes is None:
        return
    if device.type == "cuda":
        apply_cuda_limit(limit_bytes, device.torch_device)
        return
    require_countable_step(config, group.size, device.type)
    microbatches = min(2, microbatches_per_rank(config, mesh.size("dp")))
    with BatchLoader(
        config,
        corpus,
        "train",
        rank=mesh.index("dp"),
        world_size=mesh.size("dp"),
        start_sample=0,
        num_samples=config.training.global_batch_size,
        num_workers=0,
    ) as loader:
        # Two stand for any number: from the second on, the gradients of the one before are alive.
        batches = [next(loader).to(device.torch_device) for _ in range(microbatches)]

    def one_step() -> None:
        for batch in batches:
            (local.decoder.loss_sum(batch) / max(batch.num_valid_tokens, 1)).backward()
        clip_gradients(local.decoder.parameters(), config.training.clip_grad)
        optimizer.step()

    count = count_step(one_step, decoder=local.decoder, optimizer=optimizer, limit_bytes=limit_bytes)
    # These calls trained nothing, and these copies belong to no step.
    optimisations.building.operators.served.clear()
    if optimisations.building.offload is not None:
        optimisations.building.offload.take()
    unseen = f"; {unseen_with_compile()}" if optimisations.is_active("compile") else ""
    if group.size > 1:
        unseen += "; gradient buckets of data parallelism are not counted"
    logbook.say(f"memory: {count.peak_bytes:,} of {limit_bytes:,} bytes live at the peak{unseen}")
    logbook.event(
        "window",
        what="memory_count",
        limit_bytes=limit_bytes,
        peak_bytes=count.peak_bytes,
        by_category=dict(count.by_category),
        unseen=unseen.lstrip("; ") or None,
    )
