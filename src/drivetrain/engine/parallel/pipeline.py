"""Pipeline parallelism: consecutive layers on consecutive ranks, micro-batches flowing through them.

Torch's ``torch.distributed.pipelining`` runs the schedules. What is added:

* **Stages are parts of the one Decoder**, not a second model: names, initial weights and code stay.
* **Only hidden states travel.** Every rank of the pipeline is given the same micro-batches and looks up document
  borders, positions and labels by the micro-batch's number, which is all that torch is handed. So nothing is ever
  cut along the batch, and a batch can't fail to divide.
* **Messages leave early**, where a schedule would wait for each (:mod:`drivetrain.engine.parallel.early_messages`).
* **Shapes are declared and not inferred**: torch would run a stage once to learn them. They hold for one size of
  micro-batch, so another size gets another schedule (``run`` builds it).
* **Gradients are summed.** The loss is divided by the valid tokens of the global batch; torch would divide by the
  number of micro-batches again.
* **A tied embedding** on the first and the last rank ends a step with the sum of both gradients on both. Where both
  ends are on one rank (a V) it is one parameter.

The gradients of the weights are complete when ``run`` returns, and not before: a reduction over data-parallel ranks
comes after it. Zero-bubble schedules go through a stage's backward twice, for activations and for weights, and add to
``.grad`` without calling the hooks of parameters. A node of autograd's graph runs whole both times, and compiled code
is one: compiled stages get all gradients in the first pass, and no second one to compute them all again.

Dropout masks come from the generator of the rank that holds the layer. They are another sample of the same
distribution than one process would draw, and no two layers may share one: seed the ranks of a pipeline differently.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.tensor import DTensor

from drivetrain.config.model import ModelConfig
from drivetrain.config.stages import (
    ZERO_BUBBLE,
    Schedule,
    StagePlan,
    check_micro_batches,
    legal_micro_batches,
)
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.decoder import Decoder, Embedding
from drivetrain.engine.parallel.early_messages import CountedStage, EarlyStage, early
from drivetrain.engine.parallel.flights import flown
from drivetrain.engine.parallel.mesh import Mesh
from drivetrain.engine.parallel.pipeline_schedules import build_schedule, join_backward, leave_out_backward
from drivetrain.engine.parallel.placement import Placement
from drivetrain.engine.parallel.traffic import Traffic
from drivetrain.errors import DataError

__all__ = ["CountedStage", "Pipeline", "StageModule", "decoder_of_rank", "payload_bytes"]

_TIED = "embedding.weight"


def decoder_of_rank(
    model: ModelConfig, compute_dtype: torch.dtype, plan: StagePlan, rank: int, device: torch.device
) -> Decoder:
    """All that ``rank`` of the pipeline holds, as one Decoder: uninitialised, and nothing else was ever allocated."""
    first, last = plan.ranks_of_ends
    with torch.device("meta"):
        decoder = Decoder(model, compute_dtype)
    decoder.keep_part(plan.layers_on(rank), first=rank == first, last=rank == last)
    return decoder.to_empty(device=device)


def payload_bytes(
    plan: StagePlan,
    rank: int,
    num_microbatches: int,
    hidden_bytes: int,
    tied_bytes: int,
    loss_bytes: int,
    *,
    backward: bool = True,
) -> Mapping[tuple[str, str], int]:
    """What ``rank`` hands to the collectives of its pipeline in one step: the closed form of its ``Traffic``.

    Torch's own messages of 4 bytes at the first step of a shape, and on a change between training and evaluation, by
    which it finds its neighbours, are not counted.

    Args:
        hidden_bytes: of the hidden states of one micro-batch (T x D elements, by tp fewer under sequence parallelism).
        tied_bytes: of the tied embedding's gradient on this rank; 0 where there is none, or both ends are on one rank.
        loss_bytes: of the loss, a scalar.
    """
    sent = plan.messages_sent(rank, num_microbatches, backward=backward) * hidden_bytes
    if backward and rank in plan.ranks_of_ends:
        sent += tied_bytes
    expected = {("pp", "all_reduce"): loss_bytes}
    return {**expected, ("pp", "send"): sent} if sent else expected


class _Feed:
    """The micro-batches of the step that is running."""

    def __init__(self) -> None:
        self.batches: Sequence[Batch] = ()

    def __getitem__(self, index: int) -> Batch:
        return self.batches[index]


class StageModule(nn.Module):
    """One stage: a view of the decoder's own submodules, to be called with a micro-batch's number."""

    def __init__(self, decoder: Decoder, plan: StagePlan, stage: int, feed: _Feed) -> None:
        super().__init__()
        self.stage = stage
        self.layers = plan.layers(stage)
        self.is_first = stage == 0
        self.is_last = stage == plan.num_stages - 1
        self.feed = feed
        # Registered so that torch finds this stage's parameters, and no other's.
        self.blocks = nn.ModuleDict({name: decoder.blocks[name] for name in self.layers})
        tied = self.is_last and decoder.output is None
        self.embedding = decoder.embedding if self.is_first or tied else None
        self.position_embedding = decoder.position_embedding if self.is_first else None
        self.final_norm = decoder.final_norm if self.is_last else None
        self.output = decoder.output if self.is_last else None
        # Bound methods are not registered: the decoder does not become a part of each of its stages.
        self._embed, self._run_blocks, self._loss_of = decoder.embed, decoder.run_blocks, decoder.loss_of

    def forward(self, *received: Tensor, index: Tensor) -> Tensor:
        """Hidden states (T, D) to the next stage's, or to the summed loss of the micro-batch.

        Args:
            received: the previous stage's output; nothing in the first stage.
            index: (1,) int64 on the CPU, number of the micro-batch.
        """
        batch = self.feed[int(index)]
        (x_TD,) = (self._embed(batch),) if self.is_first else received
        x_TD = self._run_blocks(x_TD, batch, self.layers)
        return self._loss_of(x_TD, batch) if self.is_last else x_TD


class Pipeline:
    """Forward and backward of a step over the ranks of a pipeline.

    Attributes:
        plan: which layers lie where.
        modules: this rank's stages, in model order; ``fully_shard`` and ``compile`` work on them as on any module.
        traffic: what this rank has handed to collectives.
        stage_type: what torch's schedules run; of other type where the neighbours are not there.
        early_stage_type: the same where messages leave early; None: none do.
    """

    stage_type: type[CountedStage] = CountedStage
    early_stage_type: type[EarlyStage] | None = EarlyStage

    def __init__(
        self,
        decoder: Decoder,
        plan: StagePlan,
        schedule: Schedule,
        mesh: Mesh,
        device: torch.device,
        traffic: Traffic,
        *,
        sequence_shards: int = 1,
    ) -> None:
        """Collective over the pipeline, which checks that it holds the whole model, each part once.

        Args:
            decoder: what ``decoder_of_rank`` made of the model, its submodules already replaced by their
                tensor-parallel forms.
            sequence_shards: ranks over which the T tokens of a hidden state are spread (sequence parallelism).
        """
        group = mesh.group("pp")
        assert group is not None, "a pipeline has at least two ranks"
        assert mesh.size("pp") == plan.pp, f"{plan.pp} stages' ranks on {mesh.size('pp')} ranks"
        self.plan = plan
        self.traffic = traffic
        self._schedule_name = schedule
        self._rank = mesh.index("pp")
        self._group = group
        self._device = device
        self._sequence_shards = sequence_shards
        self._hidden_size = decoder.model.hidden_size
        self._hidden_dtype = decoder.compute_dtype
        self._loss_dtype = torch.promote_types(decoder.compute_dtype, torch.float32)
        self._feed = _Feed()
        self._decoder = decoder
        self._assert_whole_model(decoder)
        self.modules = [StageModule(decoder, plan, stage, self._feed) for stage in plan.stages_on(self._rank)]
        self._tied = self._tied_embedding(decoder)
        # For training and for evaluation the latest one, with the number and the tokens of its micro-batches, and
        # whether the blocks are compiled.
        self._built: dict[
            bool, tuple[tuple[int, int, bool], PipelineScheduleSingle | PipelineScheduleMulti]
        ] = {}
        self._built_stages: list[Any] = []
        self._early: dict[bool, list[EarlyStage]] = {}
        self._per_valid_token = 1.0
        self._loss_sum = torch.zeros((), dtype=self._loss_dtype, device=device)

    def run(self, batches: Sequence[Batch], valid_tokens: int, *, loss_scale: float = 1.0) -> Tensor:
        """Forward and backward of a step's micro-batches; gradients are added to ``.grad``.

        Args:
            batches: the micro-batches, on the device, the same on every rank of the pipeline.
            valid_tokens: of the global batch, over all data-parallel ranks.
            loss_scale: factor of the gradients.

        Returns:
            Cross-entropy summed over the valid tokens of ``batches``: a scalar, on every rank of the pipeline.

        Raises:
            ConfigurationError: the schedule cannot run that many micro-batches.
            DataError: micro-batches differ in size. Both before any message is sent.
        """
        self._per_valid_token = loss_scale / max(valid_tokens, 1)
        schedule = self._prepare(batches, training=True)
        before = None
        if self._tied is not None:
            # Apart, so that what earlier runs left there is not exchanged again.
            before, self._tied.weight.grad = self._tied.weight.grad, None
        schedule.step(**self._arguments(len(batches)), return_outputs=False)
        self._end_step(training=True)
        self._sum_tied_gradients(before)
        return self._shared_loss()

    def evaluate(self, batches: Sequence[Batch]) -> Tensor:
        """The same loss without gradients, of any number of batches. Put the decoder into evaluation mode first.

        Where the schedule cannot run that many, batches without loss follow.
        """
        silent = replace(batches[-1], loss_mask=torch.zeros_like(batches[-1].loss_mask), num_valid_tokens=0)
        batches = list(batches)
        while not legal_micro_batches(self._schedule_name, self.plan.pp, len(batches)):
            batches.append(silent)
        schedule = self._prepare(batches, training=False)
        with torch.no_grad():
            schedule.eval(**self._arguments(len(batches)), return_outputs=False)
        self._end_step(training=False)
        return self._shared_loss()

    def placements(self, placements: Mapping[str, Placement]) -> Mapping[str, Placement]:
        """``placements`` of the decoder, where an embedding that two ranks hold says so."""
        if self._tied is None:
            return placements
        return {**placements, _TIED: placements[_TIED].replicated_over("pp")}

    def _prepare(
        self, batches: Sequence[Batch], *, training: bool
    ) -> PipelineScheduleSingle | PipelineScheduleMulti:
        check_micro_batches(self._schedule_name, self.plan.pp, len(batches))
        tokens = batches[0].token_ids.numel()
        for number, batch in enumerate(batches):
            if batch.token_ids.numel() != tokens:
                raise DataError(
                    f"micro-batch {number} has {batch.token_ids.numel()} tokens and micro-batch 0 has {tokens}: "
                    "the micro-batches of one step must be equally large"
                )
        self._feed.batches = batches
        self._loss_sum = torch.zeros_like(self._loss_sum)
        wanted = (len(batches), tokens, self._decoder.blocks_are_compiled)
        built_for, schedule = self._built.get(training, (None, None))
        if schedule is None or built_for != wanted:
            schedule = self._build(len(batches), tokens)
            self._early[training] = [stage for stage in self._built_stages if isinstance(stage, EarlyStage)]
            if isinstance(schedule, PipelineScheduleMulti):
                if not training:
                    leave_out_backward(schedule)
                elif self._decoder.blocks_are_compiled:
                    join_backward(schedule)
            self._built[training] = (wanted, schedule)
        return schedule

    def _end_step(self, *, training: bool) -> None:
        for stage in self._early[training]:
            stage.end_step()

    def _build(self, num_microbatches: int, tokens: int) -> PipelineScheduleSingle | PipelineScheduleMulti:
        rows, rest = divmod(tokens, self._sequence_shards)
        assert rest == 0, f"{self._sequence_shards} ranks share {tokens} tokens"
        hidden_TD = torch.empty(
            rows, self._hidden_size, dtype=self._hidden_dtype, device="meta", requires_grad=True
        )
        loss = torch.empty((), dtype=self._loss_dtype, device="meta", requires_grad=True)
        early_type = self.early_stage_type if early(self._schedule_name, self._device) else None
        make: Callable[..., CountedStage] = (
            self.stage_type if early_type is None else partial(early_type, num_microbatches=num_microbatches)
        )
        stages: list[Any] = [
            make(
                self.traffic,
                module,
                module.stage,
                self.plan.num_stages,
                self._device,
                input_args=() if module.is_first else (hidden_TD,),
                output_args=(loss if module.is_last else hidden_TD,),
                group=self._group,
            )
            for module in self.modules
        ]
        if self._schedule_name in ZERO_BUBBLE:
            self._keep_unsharded()
        self._built_stages = stages
        return build_schedule(self._schedule_name, stages, num_microbatches, self._loss_per_valid_token)

    def _keep_unsharded(self) -> None:
        """Zero-bubble schedules go through a stage's backward twice. Parameters that FSDP has sharded again by the
        second time get a wrong gradient or none, without a word."""
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_reshard_after_forward(False, recurse=False)

    def _arguments(self, num_microbatches: int) -> dict[str, Any]:
        """What torch cuts into micro-batches: their numbers. ``target`` is what it hands to the loss function."""
        numbers = torch.arange(num_microbatches)
        return {"index": numbers, "target": numbers if any(m.is_last for m in self.modules) else None}

    def _loss_per_valid_token(self, loss_sum: Tensor, _number: Tensor) -> Tensor:
        """What is differentiated; called for each micro-batch where the last stage is."""
        self._loss_sum += loss_sum.detach()
        return loss_sum * self._per_valid_token

    def _shared_loss(self) -> Tensor:
        """The loss is known to the last stage alone, elsewhere it is 0: the sum is the loss, to the bit."""
        self._feed.batches = ()
        flight = self.traffic.begin("pp", "all_reduce", self._loss_sum.nbytes, self._group)
        flown(lambda go_on: dist.all_reduce(self._loss_sum, group=self._group, async_op=go_on), flight)
        return self._loss_sum.clone()

    def _tied_embedding(self, decoder: Decoder) -> Embedding | None:
        """This rank's copy, where two ranks hold one. The module and not its weight, which FSDP replaces."""
        first, last = self.plan.ranks_of_ends
        untied = decoder.model.untie_embeddings_and_output_weights
        if untied or first == last or self._rank not in (first, last):
            return None
        assert decoder.embedding is not None
        return decoder.embedding

    def _sum_tied_gradients(self, before: Tensor | None) -> None:
        """Both ends exchange what they have found and add it; a + b = b + a, so both get the same bits."""
        if self._tied is None:
            return
        weight = self._tied.weight
        gradient = weight.grad
        assert gradient is not None, "the tied embedding has no gradient"
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        first, last = self.plan.ranks_of_ends
        other = last if self._rank == first else first
        theirs = torch.empty_like(local)
        self.traffic.record("pp", "send", local.nbytes)
        exchange = [
            dist.P2POp(dist.isend, local.contiguous(), group=self._group, group_peer=other),
            dist.P2POp(dist.irecv, theirs, group=self._group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        local += theirs
        if before is not None:
            before += gradient
            weight.grad = before

    def _assert_whole_model(self, decoder: Decoder) -> None:
        """What was really built, counted over all ranks: each layer, the entry and the exit exactly once.

        All ranks learn of it together, and none is left waiting for the one that found it.
        """
        first, _ = self.plan.ranks_of_ends
        built = torch.zeros(decoder.model.num_layers + 2, dtype=torch.int32, device=self._device)
        for name in decoder.blocks:
            built[int(name)] += 1
        built[-2] += self._rank == first and decoder.embedding is not None
        built[-1] += decoder.final_norm is not None
        dist.all_reduce(built, group=self._group)
        held, wanted = tuple(decoder.blocks), self.plan.layers_on(self._rank)
        assert built.eq(1).all(), (
            f"layers, entry and exit are built {built.tolist()} times over the pipeline, and should be once each; "
            f"rank {self._rank} holds layers {', '.join(held)} and should hold {', '.join(wanted)}"
        )
        assert held == wanted, f"rank {self._rank} holds layers {held} and should hold {wanted}"
