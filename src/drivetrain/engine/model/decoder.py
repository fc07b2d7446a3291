"""The decoder-only transformer: the Llama and the GPT family are settings of one class."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drivetrain.config.model import ModelConfig
from drivetrain.engine.model.attention import Attention, DocumentLayout, attend
from drivetrain.engine.model.batch import Batch
from drivetrain.engine.model.dropout import AttentionFactors, Dropout
from drivetrain.engine.model.linear import Linear
from drivetrain.engine.model.loss import OutputHead
from drivetrain.engine.model.mlp import make_mlp
from drivetrain.engine.model.norm import LayerNorm, RMSNorm, make_norm
from drivetrain.engine.model.operators import UsesOperators, single
from drivetrain.engine.model.parts import HasParts
from drivetrain.engine.model.rotary import Rotation, rotation
from drivetrain.engine.ops import bias_dropout_add
from drivetrain.engine.ops.selection import Selection

__all__ = ["Block", "Decoder", "Embedding", "RunLayers"]

RunLayers = Callable[[Sequence[str], Callable[[str, Tensor], Tensor], Tensor], Tensor]
"""From names of neighbouring layers, a function that runs one of them on (T, D), and what enters the first, to what
leaves the last."""


class Embedding(nn.Module):
    """One learned vector for each row number. Parameters are left uninitialised."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))

    def forward(self, rows_T: Tensor) -> Tensor:
        """(T,) int64 to (T, width), in the dtype of the masters."""
        return F.embedding(rows_T, self.weight)


class Block(HasParts, UsesOperators, nn.Module):
    """One layer, pre-norm: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

    Attributes:
        attention_factors: draws the dropout of attention weights where it is not torch's own.
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention_dropout = model.attention_dropout
        self.attention_factors: AttentionFactors | None = None
        self.attention_norm = make_norm(model, model.hidden_size)
        self.attention = Attention(model)
        self.mlp_norm = make_norm(model, model.hidden_size)
        self.mlp = make_mlp(model)
        self.after_attention = Dropout(model.hidden_dropout)
        self.after_mlp = Dropout(model.hidden_dropout)

    def forward(self, x_TD: Tensor, layout: DocumentLayout, turn: Rotation | None) -> Tensor:
        """(T, D) to (T, D) in the same dtype."""
        normed_TD = self.part("norm", self.attention_norm, x_TD)
        q_THK, k_TGK, v_TGK = self.attention.project(normed_TD, turn)
        dropout = self.attention_dropout if self.training else 0.0
        settings = (layout, dropout, self.attention_factors, self.serving("attention"))
        out_THK: Tensor = self.way("core_attn", attend)(q_THK, k_TGK, v_TGK, *settings)
        change_TD = self.attention.output(out_THK.flatten(1))
        if (serving := self._serving_dropout()) is not None:
            x_TD = _added(serving, change_TD, x_TD, self.after_attention.probability)
            normed_TD = self.part("norm", self.mlp_norm, x_TD)
            return _added(serving, self.part("mlp", self.mlp, normed_TD), x_TD, self.after_mlp.probability)
        normed_TD, x_TD = self.part("norm", self.mlp_norm.add, self.after_attention(change_TD), x_TD)
        out_TD: Tensor = x_TD + self.after_mlp(self.part("mlp", self.mlp, normed_TD))
        return out_TD

    def _serving_dropout(self) -> Selection | None:
        """Without dropout nothing but an addition is left, which ``add_rms_norm`` does together with the norm."""
        if not self.training or not self.after_attention.probability:
            return None
        return self.serving("bias_dropout_add")


def _added(serving: Selection, x_TD: Tensor, residual_TD: Tensor, probability: float) -> Tensor:
    """``residual + dropout(x)``; what is dropped is decided by a seed from torch's generator."""
    seed = torch.randint(2**62, (), device=x_TD.device)
    given = {"x": x_TD, "residual": residual_TD, "seed": seed, "probability": probability}
    return single(serving.call(bias_dropout_add.OPERATOR, **given))


class Decoder(nn.Module):
    """Token ids to logits.

    Parameters are fp32 masters (fp64 when ``compute_dtype`` is fp64) and are cast to the dtype of their input
    where they are used; activations have ``compute_dtype`` from the embedding on. Parameters are created
    uninitialised: call ``initialize`` or load weights. Under ``torch.device("meta")`` none is allocated.

    Attributes:
        model: the configuration it was built from.
        compute_dtype: dtype of activations and logits.
        blocks: the layers, ``"0"`` to ``str(num_layers - 1)``; those that are left after ``keep_part``.
        embedding, final_norm: None where ``keep_part`` has dropped them.
        blocks_are_compiled: whether ``compile_blocks`` was called.
        before_use: called with a part of the model each time before its parameters are read; None: nobody wants to
            know. (No forward hooks of torch: compiled blocks would have them in their graphs.)
        run_layers: runs layers in another way than one after the other; None: just so.
        look_up: from a batch to its rows of the embedding, (T, D), where these are elsewhere; None: they are here.
    """

    def __init__(self, model: ModelConfig, compute_dtype: torch.dtype) -> None:
        super().__init__()
        assert not model.qk_layernorm or model.normalization == "RMSNorm", "qk_layernorm needs RMSNorm"
        assert model.num_attention_heads % model.query_groups == 0, "heads do not divide into query groups"
        self.model = model
        self.compute_dtype = compute_dtype
        width = model.hidden_size
        learned = model.position_embedding_type == "learned_absolute"
        untied = model.untie_embeddings_and_output_weights
        self.embedding: Embedding | None = Embedding(model.vocab_size, width)
        self.position_embedding = Embedding(model.max_positions, width) if learned else None
        self.blocks = nn.ModuleDict({str(index): Block(model) for index in range(model.num_layers)})
        self.final_norm: RMSNorm | LayerNorm | None = make_norm(model, width)
        self.output = Linear(width, model.vocab_size, bias=False) if untied else None
        self.after_embedding = Dropout(model.hidden_dropout)
        self.head = OutputHead()
        self.blocks_are_compiled = False
        self.before_use: Callable[[nn.Module], None] | None = None
        self.run_layers: RunLayers | None = None
        self.look_up: Callable[[Batch], Tensor] | None = None
        if compute_dtype == torch.float64:
            self.double()

    def forward(self, batch: Batch, input_embeddings: Tensor | None = None) -> Tensor:
        """Logits of every place.

        Args:
            batch: on the device of the parameters (``cu_seqlens`` on the CPU).
            input_embeddings: (B, S, D), used instead of the token embeddings; positions are still added.

        Returns:
            (B, S, V) in the compute dtype.
        """
        hidden_TD = self.hidden_states(batch, input_embeddings)
        logits_TV = self.head.logits(hidden_TD, self._output_weight())
        return logits_TV.view(*batch.token_ids.shape, -1)

    def loss_sum(self, batch: Batch, input_embeddings: Tensor | None = None) -> Tensor:
        """Cross-entropy summed over the tokens with loss: a scalar, fp32 (fp64 in an fp64 model).

        Same arguments as ``forward``. Divide by the number of valid tokens of the *global* batch: then the
        gradient does not depend on how the batch is split.
        """
        return self.loss_of(self.run_blocks(self.embed(batch, input_embeddings), batch), batch)

    def hidden_states(self, batch: Batch, input_embeddings: Tensor | None = None) -> Tensor:
        """Output of the final norm, (T, D) in the compute dtype."""
        return self._normed(self.run_blocks(self.embed(batch, input_embeddings), batch))

    def embed(self, batch: Batch, input_embeddings: Tensor | None = None) -> Tensor:
        """What enters the first block, (T, D) in the compute dtype; same arguments as ``forward``."""
        self._about_to_use(self.embedding if input_embeddings is None else None, self.position_embedding)
        if input_embeddings is None:
            assert self.embedding is not None, "this part of the model has no embedding"
            look_up = self.look_up
            x_TD = self.embedding(batch.token_ids.flatten()) if look_up is None else look_up(batch)
        else:
            x_TD = input_embeddings.flatten(0, 1)
        if self.position_embedding is not None:
            x_TD = x_TD + self.position_embedding(batch.position_ids.flatten())
        out_TD: Tensor = self.after_embedding(x_TD).to(self.compute_dtype)
        return out_TD

    def run_blocks(self, x_TD: Tensor, batch: Batch, layers: Collection[str] | None = None) -> Tensor:
        """(T, D) through ``layers``, names in ``blocks`` in model order; through all that are here when absent."""
        turn = None
        if self.model.position_embedding_type == "rope":
            turn = rotation(self.model, batch.position_ids.flatten(), self.compute_dtype)
        layout = DocumentLayout(batch.cu_seqlens)

        def run(name: str, x_TD: Tensor) -> Tensor:
            self._about_to_use(self.blocks[name])
            out_TD: Tensor = self.blocks[name](x_TD, layout, turn)
            return out_TD

        names = tuple(self.blocks if layers is None else layers)
        if self.run_layers is not None:
            return self.run_layers(names, run, x_TD)
        for name in names:
            x_TD = run(name, x_TD)
        return x_TD

    def loss_of(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """``loss_sum`` from the output of the last block, (T, D)."""
        labels_T, mask_T = batch.labels.flatten(), batch.loss_mask.flatten()
        return self.head.cross_entropy_sum(self._normed(x_TD), self._output_weight(), labels_T, mask_T)

    def use_operators(self, selection: Selection) -> None:
        """Compute by ``selection``, from here on, what it was asked to serve: what is in its ``requested``.

        After tensor parallelism has spread the modules, and before they are compiled.
        """
        for module in self.modules():
            if isinstance(module, UsesOperators):
                module.take_operators(selection)
        self.head.take_operators(selection)

    def keep_part(self, layers: Collection[str], *, first: bool, last: bool) -> None:
        """Drop in place all that a part of the model does not need; what stays keeps its names.

        Args:
            layers: the names in ``blocks`` that stay.
            first: keep what ``embed`` needs.
            last: keep what ``loss_of`` needs, the embedding if it is the output matrix too.
        """
        for name in [name for name in self.blocks if name not in layers]:
            del self.blocks[name]
        if not first:
            self.position_embedding = None
        if not first and not (last and self.output is None):
            self.embedding = None
        if not last:
            self.final_norm = None
            self.output = None

    def compile_blocks(
        self, backend: str | Callable[..., Any] = "inductor", *, name_kernels: bool = False
    ) -> None:
        """Compile each block in place with torch.compile, on its first call.

        Blocks share their code, so the work is done once and not per layer. Attention is left out of the
        graphs: a new packing of documents compiles nothing. A second size of T (another micro-batch, text
        generation) compiles once more, for any T.

        Args:
            name_kernels: each generated CPU kernel shows in a profile under its own name. Without it a profile
                has nothing but the call of the whole graph.
        """
        options = {"cpp.enable_kernel_profile": True} if name_kernels else None
        for block in self.blocks.values():
            block.compile(backend=backend, options=options)
        self.blocks_are_compiled = True

    def _about_to_use(self, *parts: nn.Module | None) -> None:
        if self.before_use is None:
            return
        for part in parts:
            if part is not None:
                self.before_use(part)

    def _normed(self, x_TD: Tensor) -> Tensor:
        assert self.final_norm is not None, "this part of the model has no output"
        self._about_to_use(self.final_norm)
        out_TD: Tensor = self.final_norm(x_TD)
        return out_TD

    def _output_weight(self) -> Tensor:
        owner = self.embedding if self.output is None else self.output
        assert owner is not None, "this part of the model has no output"
        self._about_to_use(owner)
        return owner.weight.to(self.compute_dtype)
