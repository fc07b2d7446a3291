"""Parameters of a model, from its configuration alone: exact, and equal to the module's own count."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drivetrain.config.model import ModelConfig

__all__ = ["ParameterCount", "parameter_count"]


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Numbers of parameters, by component. The parts do not overlap and sum to ``total``.

    Biases are counted with the matrix they belong to. A tied output matrix is the embedding: ``output``
    is 0 then, while ``output_product`` still says how many weights multiply to give the logits.
    """

    token_embedding: int
    """Rows x width of the embedding table."""
    position_embedding: int
    """Learned positions x width; 0 with rotary embedding."""
    attention: int
    """Query, key, value and output projections of all layers, with biases and query/key norms."""
    mlp: int
    """All MLP matrices of all layers, with biases."""
    normalization: int
    """Norms before attention, before the MLP and before the output layer."""
    output: int
    """A separate output matrix; 0 when it is tied to the embedding."""
    output_product: int
    """Weights of the product that gives the logits: vocab_size x hidden_size, tied or not."""
    block_matrices: int
    """Weights of the matrix products of all layers (no bias, no norm): 2 FLOPs each per token forward."""

    @property
    def embedding(self) -> int:
        """Token and position tables, which are looked up and not multiplied."""
        return self.token_embedding + self.position_embedding

    @property
    def non_embedding(self) -> int:
        """Everything but the lookup tables: the N of Kaplan et al. (arXiv 2001.08361)."""
        return self.total - self.embedding

    @property
    def total(self) -> int:
        """All parameters of the model, a tied matrix counted once."""
        return (
            self.token_embedding
            + self.position_embedding
            + self.attention
            + self.mlp
            + self.normalization
            + self.output
        )


def parameter_count(model: "ModelConfig") -> ParameterCount:
    """Count the parameters of `model` without building it."""
    width, layers, head = model.hidden_size, model.num_layers, model.head_size
    query_width = model.num_attention_heads * head
    key_width = model.query_groups * head
    attention_matrices = width * (query_width + 2 * key_width) + query_width * width
    attention_biases = (query_width + 2 * key_width + width) if model.add_bias_linear else 0
    query_key_norms = 2 * head if model.qk_layernorm else 0

    inner_widths = (2 if model.activation_func == "swiglu" else 1) * model.ffn_size
    mlp_matrices = width * inner_widths + model.ffn_size * width
    mlp_biases = (inner_widths + width) if model.add_bias_linear else 0

    norm = width * (2 if model.normalization == "LayerNorm" else 1)
    table = model.vocab_size * width
    learned = model.position_embedding_type == "learned_absolute"
    return ParameterCount(
        token_embedding=table,
        position_embedding=model.max_positions * width if learned else 0,
        attention=layers * (attention_matrices + attention_biases + query_key_norms),
        mlp=layers * (mlp_matrices + mlp_biases),
        normalization=(2 * layers + 1) * norm,
        output=table if model.untie_embeddings_and_output_weights else 0,
        output_product=table,
        block_matrices=layers * (attention_matrices + mlp_matrices),
    )
