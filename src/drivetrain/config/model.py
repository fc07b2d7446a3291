"""The shape of the decoder. Megatron's names."""

from typing import Literal

from pydantic import Field

from drivetrain.config.base import Count, Section

__all__ = ["ModelConfig"]


class ModelConfig(Section):
    """One decoder-only transformer: the Llama family and the GPT family are settings of the same fields."""

    num_layers: Count = Field(ge=1, le=1024)
    """Number of transformer blocks."""
    hidden_size: Count = Field(ge=1, le=1_048_576)
    """Width of the residual stream."""
    ffn_hidden_size: Count | None = Field(default=None, ge=1, le=8_388_608)
    """Width of the MLP. Derived when absent: 4 x hidden_size with gelu; with swiglu two thirds of that,
    rounded up to a multiple of 64."""
    num_attention_heads: Count = Field(ge=1, le=4096)
    """Number of query heads."""
    num_query_groups: Count | None = Field(default=None, ge=1, le=4096)
    """Number of key/value heads (grouped-query attention). Derived when absent: num_attention_heads."""
    kv_channels: Count | None = Field(default=None, ge=1, le=65_536)
    """Width of one head. Derived when absent: hidden_size / num_attention_heads."""
    seq_length: Count = Field(ge=1, le=16_777_216)
    """Tokens in one training sequence."""
    vocab_size: Count = Field(ge=2, le=16_777_216)
    """Rows of the embedding. Every token id of the corpus must be below it."""
    max_position_embeddings: Count | None = Field(default=None, ge=1, le=16_777_216)
    """Longest position the model knows. Derived when absent: seq_length."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    """Kind of norm before attention, before the MLP and before the output layer."""
    norm_epsilon: float = Field(default=1e-5, gt=0, le=0.1)
    """Added to the variance inside each norm."""
    position_embedding_type: Literal["rope", "learned_absolute"] = "rope"
    """Rotary embedding of queries and keys, or a learned vector added to each token's embedding."""
    rotary_base: float = Field(default=10_000.0, gt=1, le=1e12)
    """Base of the rotary frequencies (theta)."""
    use_rope_scaling: bool = False
    """Llama-3 scaling of the rotary frequencies for longer contexts."""
    rope_scaling_factor: float = Field(default=8.0, ge=1, le=1024)
    """How much the low frequencies are slowed down when use_rope_scaling is on."""
    rope_scaling_low_freq_factor: float = Field(default=1.0, gt=0, le=1024)
    """Wavelengths longer than the original context divided by this are slowed down by the full factor."""
    rope_scaling_high_freq_factor: float = Field(default=4.0, gt=0, le=1024)
    """Wavelengths shorter than the original context divided by this are left alone."""
    rope_scaling_original_max_position_embeddings: Count = Field(default=8192, ge=1, le=16_777_216)
    """Context length before scaling."""
    activation_func: Literal["swiglu", "gelu"] = "swiglu"
    """Gated SiLU (three matrices in the MLP), or GELU in its tanh form (two matrices)."""
    add_bias_linear: bool = False
    """Bias in every linear layer of the blocks."""
    qk_layernorm: bool = False
    """Norm of each query and key head before the rotary embedding (RMSNorm models only)."""
    untie_embeddings_and_output_weights: bool = False
    """Separate output matrix. Off: the embedding is used for both ends."""
    hidden_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout after the embedding, after attention and after the MLP."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of attention probabilities."""
    init_method_std: float = Field(default=0.02, gt=0, le=1)
    """Standard deviation of initial weights; output projections of a block are divided by
    sqrt(2 x num_layers)."""

    @property
    def ffn_size(self) -> int:
        """ffn_hidden_size, or the value derived for it."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        if self.activation_func == "gelu":
            return 4 * self.hidden_size
        return -(-8 * self.hidden_size // (3 * 64)) * 64

    @property
    def query_groups(self) -> int:
        """num_query_groups, or the value derived for it."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups

    @property
    def head_size(self) -> int:
        """kv_channels, or the value derived for it."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def max_positions(self) -> int:
        """max_position_embeddings, or the value derived for it."""
        return self.seq_length if self.max_position_embeddings is None else self.max_position_embeddings
