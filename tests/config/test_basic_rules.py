"""Each rule refuses its violation with the nearest legal values, and lets a right configuration through."""

import pytest
from hypothesis import Phase, given, settings
from pydantic import ValidationError

from configuration_strategies import configurations, schema_valid_configs
from drivetrain.config import BASIC_RULES, LaunchFacts, Rule, RunConfig, leaves, load_config, violations
from drivetrain.config.parallel_rules import PARALLEL_RULES
from drivetrain.config.precision_rules import PRECISION_RULES
from drivetrain.config.recompute_rules import RECOMPUTE_RULES

# rule: overrides of llama-2m that break it and it alone, the message, overrides that come close but keep it
EXAMPLES: dict[str, tuple[list[str], str, list[str]]] = {
    "heads-divide-hidden": (
        ["model.num_attention_heads=5"],
        "model.hidden_size: 128 is not divisible by num_attention_heads = 5; nearest legal values: "
        "hidden_size = 120 or 130; num_attention_heads = 4 or 8; or give kv_channels",
        ["model.num_attention_heads=5", "model.kv_channels=32"],
    ),
    "query-groups-divide-heads": (
        ["model.num_query_groups=3"],
        "model.num_query_groups: 3 does not divide num_attention_heads = 4; nearest legal values: 2 or 4",
        ["model.num_query_groups=2"],
    ),
    "rope-needs-even-heads": (
        ["model.num_attention_heads=128"],
        "model.kv_channels: a head of 1 channels can't be rotated: rope turns pairs; nearest legal "
        "values: kv_channels = 2; num_attention_heads = 64",
        ["model.num_attention_heads=128", "model.position_embedding_type=learned_absolute"],
    ),
    "rope-scaling-needs-rope": (
        ["model.use_rope_scaling=true", "model.position_embedding_type=learned_absolute"],
        "model.use_rope_scaling: position_embedding_type = learned_absolute has no rotary embedding "
        "to scale; use use_rope_scaling = false or position_embedding_type = rope",
        ["model.use_rope_scaling=true"],
    ),
    "rope-scaling-factors-ordered": (
        ["model.use_rope_scaling=true", "model.rope_scaling_low_freq_factor=4"],
        "model.rope_scaling_low_freq_factor: 4 must be below rope_scaling_high_freq_factor = 4: the "
        "scaling is blended between the two; Llama 3 uses 1 and 4",
        ["model.rope_scaling_low_freq_factor=4"],
    ),
    "positions-cover-sequence": (
        ["model.max_position_embeddings=255"],
        "model.max_position_embeddings: 255 is below seq_length = 256; nearest legal values: "
        "max_position_embeddings = 256; seq_length = 255",
        ["model.max_position_embeddings=256"],
    ),
    "qk-norm-needs-rms-norm": (
        ["model.qk_layernorm=true", "model.normalization=LayerNorm"],
        "model.qk_layernorm: exists for RMSNorm only, not for normalization = LayerNorm; use "
        "qk_layernorm = false or normalization = RMSNorm",
        ["model.qk_layernorm=true"],
    ),
    "vocabulary-holds-bytes": (
        ["model.vocab_size=256"],
        "model.vocab_size: 256 is too small for the byte-level tokenizer of the default corpus (256 "
        "bytes and the end-of-document token); the nearest legal value is 257, or give data.data_path",
        ["model.vocab_size=2", "data.data_path=corpus"],
    ),
    "global-batch-divides": (
        ["training.global_batch_size=40"],
        "training.global_batch_size: 40 is not divisible by micro_batch_size x data-parallel size = "
        "16 x 1 = 16; nearest legal values: 32 or 48; micro_batch_size = 10 or 20",
        ["training.global_batch_size=48"],
    ),
    "tokens-are-countable": (
        ["training.train_iters=1e9", "training.global_batch_size=16777216", "model.seq_length=16777216"],
        "training.train_iters: 1000000000 steps of 281474976710656 tokens do not fit a 64-bit count; "
        "the nearest legal value is 32767",
        ["training.train_iters=32767", "training.global_batch_size=16777216", "model.seq_length=16777216"],
    ),
    "min-lr-below-lr": (
        ["lr_schedule.min_lr=4e-3"],
        "lr_schedule.min_lr: 0.004 is above optimizer.lr = 0.003; the nearest legal value is 0.003",
        ["lr_schedule.min_lr=3e-3"],
    ),
    "warmup-before-decay": (
        ["lr_schedule.lr_warmup_tokens=1433600"],
        "lr_schedule.lr_warmup_tokens: 1433600 leaves no room for the decay, which ends at 1433600 "
        "(the tokens of the run); the nearest legal value is 1433599; a twentieth would be 71680",
        ["lr_schedule.lr_warmup_tokens=1433600", "lr_schedule.lr_decay_style=constant"],
    ),
    "wsd-decay-fits": (
        ["lr_schedule.lr_decay_style=WSD", "lr_schedule.lr_wsd_decay_tokens=1361921"],
        "lr_schedule.lr_wsd_decay_tokens: 1361921 does not fit between the end of warm-up at 71680 "
        "and the end of the decay at 1433600; the nearest legal value is 1361920",
        ["lr_schedule.lr_decay_style=WSD", "lr_schedule.lr_wsd_decay_tokens=1361920"],
    ),
    "split-trains": (
        ["data.split=0,5"],
        "data.split: 0,5 leaves nothing to train on; use for example 95,5",
        ["data.split=0.1,5"],
    ),
    "split-validates": (
        ["data.split=95,0"],
        "data.split: 95,0 holds nothing back for training.eval_iters = 8; use for example 95,5, or "
        "training.eval_iters = 0",
        ["data.split=95,0", "training.eval_iters=0"],
    ),
    "transform-is-a-path": (
        ["data.transform=a..b"],
        "data.transform: 'a..b' is no dotted path of a callable; write package.module.function",
        ["data.transform=a.b:c"],
    ),
    "blend-is-weights-and-corpora": (
        ["data.data_path=0.5 corpora/a 0.5"],
        "data.data_path: 3 words, which are no pairs of weight and prefix; write 0.3 corpora/a 0.7 corpora/b",
        ["data.data_path=0.5 corpora/a 0.5 corpora/b"],
    ),
    "url-without-password": (
        ["data.data_path=1 https://me:secret@host/a 2 b"],
        "data.data_path: a URL holds a password: it would be shown in messages and kept in records; give it in "
        "fsspec's configuration files or environment variables, or as the protocol's own package reads it; the "
        "nearest legal value is the URL without it",
        ["data.data_path=1 https://me@host/a 2 b"],
    ),
    "profile-window-not-empty": (
        ["profiler.profile=true", "profiler.profile_step_start=20", "profiler.profile_step_end=20"],
        "profiler.profile_step_end: 20 ends the window before it begins: profile_step_start = 20, and the end "
        "is not part of it; the nearest legal value is 21",
        ["profiler.profile_step_start=20", "profiler.profile_step_end=20"],
    ),
    "profile-window-inside-run": (
        ["profiler.profile=true", "profiler.profile_step_start=350", "profiler.profile_step_end=352"],
        "profiler.profile_step_end: 352 is beyond the run's last step, 350; nearest legal values: "
        "training.train_iters = 351; profile_step_end = 351",
        ["profiler.profile=true", "profiler.profile_step_start=350", "profiler.profile_step_end=351"],
    ),
    "profile-ranks-exist": (
        ["profiler.profile=true", "profiler.profile_ranks=0,1"],
        "profiler.profile_ranks: rank 1 does not exist: the only rank is 0; the nearest legal value is 0, or "
        "use all",
        ["profiler.profile=true", "profiler.profile_ranks=all"],
    ),
}


def broken(*overrides: str, world_size: int = 1) -> dict[str, str]:
    found = violations(load_config("llama-2m", [*RUN, *overrides]).config, LaunchFacts(world_size))
    return {violation.rule: str(violation) for violation in found}


def test_every_rule_has_an_example() -> None:
    elsewhere = {rule.id for rule in (*PARALLEL_RULES, *PRECISION_RULES, *RECOMPUTE_RULES)}
    assert [rule.id for rule in BASIC_RULES if rule.id not in elsewhere] == list(EXAMPLES)


# The run whose numbers the messages below hold: 350 steps of 16 x 256 tokens.
RUN = ["training.train_iters=350", "lr_schedule.lr_warmup_tokens=71680"]


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_violation_is_told_with_the_nearest_legal_values(rule: str) -> None:
    overrides, message, _ = EXAMPLES[rule]
    assert broken(*overrides) == {rule: message}


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_right_configuration_passes(rule: str) -> None:
    assert broken(*EXAMPLES[rule][2]) == {}


@pytest.mark.parametrize("rule", BASIC_RULES, ids=lambda rule: rule.id)
def test_a_rule_names_leaves_that_exist_and_says_what_it_is(rule: Rule) -> None:
    assert rule.fields
    assert set(rule.fields) <= set(leaves())
    assert rule.doc.endswith(".")


def test_all_violations_are_told_together() -> None:
    found = broken("model.num_query_groups=3", "data.split=0,5", "training.global_batch_size=5")
    assert set(found) == {"query-groups-divide-heads", "split-trains", "global-batch-divides"}


def test_the_number_of_processes_counts_in_the_batch() -> None:
    assert broken("training.global_batch_size=48", world_size=3) == {}
    message = broken("training.global_batch_size=48", world_size=2)["global-batch-divides"]
    assert "16 x 2 = 32; nearest legal values: 32 or 64; micro_batch_size = 12 or 24" in message


def test_a_derived_final_decay_that_does_not_fit_is_told_as_derived() -> None:
    found = broken("lr_schedule.lr_decay_style=WSD", "lr_schedule.lr_warmup_tokens=1200000")
    assert "286720 (one fifth of lr_decay_tokens) does not fit" in found["wsd-decay-fits"]


def test_a_rule_of_somebody_else_is_tried_with_the_basic_ones() -> None:
    odd = Rule(
        "odd-seed", ("run.seed",), lambda config, facts: f"{config.run.seed} is even; use 3", "Odd seeds."
    )
    found = violations(load_config("llama-2m", ["data.split=0,5"]).config, rules=(*BASIC_RULES, odd))
    assert [str(violation) for violation in found][1:] == ["run.seed: 1234 is even; use 3"]


@given(config=schema_valid_configs())
@settings(max_examples=50)
def test_no_rule_stumbles_over_anything_the_schema_accepts(config: RunConfig) -> None:
    for violation in violations(config, LaunchFacts(3)):
        assert violation.message


def test_random_configurations_are_often_right_and_wrong_in_many_ways() -> None:
    valid: list[bool] = []
    rules: set[str] = set()
    sections: set[str] = set()

    @settings(max_examples=200, derandomize=True, database=None, phases=[Phase.generate])
    @given(drawn=configurations())
    def draw(drawn: tuple[dict[str, dict[str, object]], int]) -> None:
        values, world_size = drawn
        try:
            found = violations(RunConfig.model_validate(values), LaunchFacts(world_size))
        except ValidationError as error:
            sections.update(str(item["loc"][0]) for item in error.errors())
            valid.append(False)
        else:
            rules.update(violation.rule for violation in found)
            valid.append(not found)

    draw()
    share = sum(valid) / len(valid)
    assert 0.4 < share < 0.7, f"{share:.0%} of the drawn configurations are right"
    assert len(rules) >= 9, sorted(rules)
    assert len(sections) >= 6, sorted(sections)
