"""How other tools count the FLOPs of training, and what each rule is worth.

The same speed appears in public tables under at least six rules. Each is a record here: the rule, who uses
it, its FLOPs per token, and a verdict for a given model and length beside our own count
(``drivetrain.measure.flops``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from drivetrain.config.model import ModelConfig
from drivetrain.measure.flops import hardware_flops, model_flops
from drivetrain.measure.parameters import parameter_count

__all__ = ["RULES_OF_OTHERS", "RuleOfOthers", "Verdict", "judge"]

Quantity = Literal["model", "hardware"]
Verdict = Literal["right", "approximation", "wrong"]

_RIGHT_WITHIN = 0.005
"""Relative deviation below which an approximation is as good as the exact count: published figures have
two or three digits."""


@dataclass(frozen=True, slots=True)
class RuleOfOthers:
    """One way to count the FLOPs of one token in training."""

    name: str
    text: str
    """The rule in full."""
    used_by: str
    quantity: Quantity
    """``model``: meant as MFU. ``hardware``: counts recomputation, to be compared with HFU only."""
    flops_per_token: Callable[[ModelConfig, int], float]
    """FLOPs per token from the model and the sequence length in tokens."""
    wrong_because: str = ""
    """Empty unless the rule cannot be right for any model."""
    why_it_deviates: str = ""
    """What the rule leaves out or counts twice."""


def _exact(model: ModelConfig, seq_length: int, causal: bool) -> float:
    squared = seq_length * seq_length
    count = model_flops(model, tokens=seq_length, sum_squared_lengths=squared, causal=causal)
    return count.total / seq_length


def _per_parameter(factor: int, embeddings: bool = True) -> Callable[[ModelConfig, int], float]:
    """So many FLOPs per token and parameter, whatever the length."""

    def flops_per_token(model: ModelConfig, _: int) -> float:
        count = parameter_count(model)
        return float(factor * (count.total if embeddings else count.non_embedding))

    return flops_per_token


def _full_attention(model: ModelConfig, seq_length: int) -> float:
    """12 x layers x (heads x head width) x length: both products over the whole square, three passes."""
    return 12.0 * model.num_layers * model.num_attention_heads * model.head_size * seq_length


def _palm(model: ModelConfig, seq_length: int) -> float:
    count = parameter_count(model)
    tied_head = 0 if model.untie_embeddings_and_output_weights else count.output_product
    return 6.0 * (count.non_embedding + tied_head) + _full_attention(model, seq_length)


def _closed_form(model: ModelConfig, seq_length: int, recompute: bool) -> float:
    """Narayanan et al., eq. 3 (with full recompute) and its counterpart without, per token."""
    layers, width, vocabulary = model.num_layers, model.hidden_size, model.vocab_size
    factor, share = (96.0, 16.0) if recompute else (72.0, 12.0)
    bracket = 1 + seq_length / (6 * width) + vocabulary / (share * layers * width)
    return factor * layers * width**2 * bracket


RULES_OF_OTHERS: tuple[RuleOfOthers, ...] = (
    RuleOfOthers(
        name="6N",
        text="6 FLOPs per token for each of all parameters",
        used_by="Kaplan et al. 2020 as commonly quoted, back-of-envelope budgets",
        quantity="model",
        flops_per_token=_per_parameter(6),
        why_it_deviates="it leaves attention out, and counts a separate embedding table as a product",
    ),
    RuleOfOthers(
        name="6N (without embeddings)",
        text="6 FLOPs per token for each parameter that is not in an embedding table",
        used_by="Kaplan et al. 2020, the total_flos of the Hugging Face Trainer",
        quantity="model",
        flops_per_token=_per_parameter(6, embeddings=False),
        why_it_deviates="it leaves attention out, and the logits where the output matrix is tied",
    ),
    RuleOfOthers(
        name="6N + full attention",
        text="6N without the lookup tables, plus 12 x layers x heads x head width x length",
        used_by="PaLM, nanoGPT, llm-foundry and torchtitan, with small differences in N",
        quantity="model",
        flops_per_token=_palm,
        why_it_deviates="it counts the masked half of causal attention",
    ),
    RuleOfOthers(
        name="exact products, full attention",
        text="3 x forward from shapes, attention over the whole square",
        used_by="Megatron-LM before core_v0.12 and NeMo 24.07",
        quantity="model",
        flops_per_token=lambda model, seq: _exact(model, seq, causal=False),
        why_it_deviates="it counts the masked half of causal attention",
    ),
    RuleOfOthers(
        name="exact products, causal half",
        text="3 x forward from shapes, attention over half of the square",
        used_by="Megatron-LM since core_v0.12, MaxText since July 2025, and ourselves",
        quantity="model",
        flops_per_token=lambda model, seq: _exact(model, seq, causal=True),
    ),
    RuleOfOthers(
        name="72BLsh²(1 + s/6h + V/12Lh)",
        text="closed form for GELU, f = 4h, one key head per query head; full attention",
        used_by="Megatron-LM papers, without recomputation",
        quantity="model",
        flops_per_token=lambda model, seq: _closed_form(model, seq, recompute=False),
        why_it_deviates="it assumes f = 4h without a gate and as many key as query heads, and counts the "
        "masked half of causal attention",
    ),
    RuleOfOthers(
        name="96BLsh²(1 + s/6h + V/16Lh)",
        text="the same closed form with every block computed twice forward",
        used_by="Narayanan et al. 2021, MT-NLG, BLOOM: their TFLOP/s and percentages",
        quantity="hardware",
        flops_per_token=lambda model, seq: _closed_form(model, seq, recompute=True),
        why_it_deviates="it assumes f = 4h without a gate and as many key as query heads, and counts the "
        "masked half of causal attention",
    ),
    RuleOfOthers(
        name="8N",
        text="6N for the step and 2N for computing every block forward again",
        used_by="trainers that report TFLOP/s with full recomputation on",
        quantity="hardware",
        flops_per_token=_per_parameter(8),
        why_it_deviates="it leaves attention out and repeats the logits, which recomputation does not",
    ),
    RuleOfOthers(
        name="18N",
        text="'forward is 6N, so a step is 18N'",
        used_by="articles that confuse a step with its forward pass",
        quantity="model",
        flops_per_token=_per_parameter(18),
        wrong_because="forward is 2N and backward 4N, so 6N is already the whole step: three times too high",
    ),
    RuleOfOthers(
        name="2N",
        text="'a token costs 2N' for a training step",
        used_by="articles that quote the forward pass for the step",
        quantity="model",
        flops_per_token=_per_parameter(2),
        wrong_because="2N is the forward pass alone, backward is twice that: three times too low",
    ),
)
"""All rules, in the order in which they are shown."""


def judge(rule: RuleOfOthers, model: ModelConfig, seq_length: int) -> tuple[Verdict, str]:
    """What `rule` is worth for this model and length: a word, and a sentence that begins with it.

    A rule for hardware FLOPs is compared with our count under full recomputation, and is wrong as MFU.
    """
    squared = seq_length * seq_length
    counted = rule.flops_per_token(model, seq_length)
    if rule.quantity == "hardware":
        exact = (
            hardware_flops(model, tokens=seq_length, sum_squared_lengths=squared, recompute="full").total
            / seq_length
        )
        return "wrong", (
            "wrong as MFU: it counts recomputation, so compare it with HFU under full recomputation "
            f"({counted / exact - 1:+.1%} there: {rule.why_it_deviates})"
        )
    deviation = counted / _exact(model, seq_length, causal=True) - 1
    if rule.wrong_because:
        return "wrong", f"wrong: {rule.wrong_because} ({deviation:+.1%} here)"
    if abs(deviation) <= _RIGHT_WITHIN:
        close = "" if deviation == 0 else f" ({deviation:+.1%} here)"
        return "right", f"right{close}"
    return "approximation", f"approximation: {deviation:+.1%} here, because {rule.why_it_deviates}"
