"""Every rule decides its own examples, real kernel names keep their classes, and a wrong rules file is refused."""

from pathlib import Path

import pytest

from drivetrain.errors import DataError
from drivetrain.trace.classes import CLASSES
from drivetrain.trace.name_table import SIDES, NameTable, Rule, table_versions

TABLE = NameTable.load()
RULES = [(side, rule) for side, rules in TABLE.rules.items() for rule in rules]
KERNEL_NAMES = Path(__file__).parent / "data" / "kernel_names.tsv"

COMMUNICATION = [
    ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "all_reduce"),
    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
    ("ncclDevKernel_AllReduce_Sum_f32_TREE_LL128(ncclDevKernelArgsStorage<4096ul>)", "all_reduce"),
    ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "all_gather"),
    ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce_scatter"),
    ("ncclDevKernel_Reduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "reduce"),
    ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "broadcast"),
    ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", "send_recv"),
    ("ncclDevKernel_Generic_2(ncclDevKernelArgsStorage<4096ul>)", None),
    ("void dpsk::ep::internode::dispatch<false, 4, false, 131072>(int4*)", "all_to_all"),
    ("void deep_ep::internode_ll::combine<7168, 9>(void*)", "all_to_all"),
    ("void dpsk::ep::internode::notify_dispatch<false, 4>(int const*)", None),
    ("void dpsk::ep::internode::cached_notify<false, 4>(int)", None),
    (
        "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)",
        "all_reduce",
    ),
    ("void (anonymous namespace)::two_shot_all_reduce_kernel<float, 16, 8>(float**)", "all_reduce"),
    ("one_shot_all_reduce_kernel", "all_reduce"),
    ("void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)", "all_reduce"),
    ("nvshmemi_proxy_quiet_entrypoint", None),
    ("void mscclpp::allreduce7<__half>(__half*)", "all_reduce"),
    ("c10d::symmetric_memory::put_signal_kernel(unsigned int**)", None),
    ("void userbuffers_fp16_sum_inplace_gpu_rw<8>(int)", None),
    ("hcom_allGather__680_0_1", "all_gather"),
    ("hcom_batchSendRecv_", "send_recv"),
]


@pytest.mark.parametrize(("side", "rule"), RULES, ids=[f"{rule.source}-{rule.label}" for _, rule in RULES])
def test_every_rule_has_examples_and_decides_them(side: str, rule: Rule) -> None:
    assert rule.examples, "a rule without an example may be out of reach"
    for example in rule.examples:
        found = TABLE.find(side, example)
        assert found is rule, f"{example} is decided by {found.source if found else None}"


def test_every_context_matches_its_examples() -> None:
    for context in TABLE.contexts:
        assert context.examples
        for example in context.examples:
            assert context.pattern.search(example), example


def test_kernel_names_of_public_traces_have_their_classes() -> None:
    rows = [line.split("\t") for line in KERNEL_NAMES.read_text().splitlines()]
    assert len(rows) > 400
    wrong = [
        (expected, TABLE.label("device", name), name[:100])
        for expected, name in rows
        if TABLE.label("device", name) != expected
    ]
    assert not wrong


@pytest.mark.parametrize(("name", "kind"), COMMUNICATION)
def test_communication_libraries_are_known_with_their_collective(name: str, kind: str | None) -> None:
    rule = TABLE.find("device", name)
    assert rule is not None
    assert (rule.label, rule.kind) == ("communication", kind)


@pytest.mark.parametrize(
    "name",
    [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >()",
        "hipLaunchKernel_something",
        "dma_like_compute_Sync_kernel",
        "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)",
        "void at::native::(anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, true>(float*)",
    ],
)
def test_names_that_only_look_like_it_are_no_communication(name: str) -> None:
    assert TABLE.label("device", name) != "communication"


def test_a_masked_softmax_is_no_loss_and_a_log_softmax_is() -> None:
    softmax = (
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, {}>(float*, float const*)"
    )
    assert TABLE.label("device", softmax.format("false, true")) == "compute.attention"
    assert TABLE.label("device", softmax.format("true, false")) == "compute.loss"


def test_every_compute_class_is_given_by_some_kernel_rule() -> None:
    given = {rule.label for rule in TABLE.rules["device"]}
    assert {name for name in CLASSES if name.startswith("compute.")} <= given


def test_user_rules_come_first_and_change_the_identity(tmp_path: Path) -> None:
    user_file = tmp_path / "rules.toml"
    user_file.write_text(
        '[[rule]]\nclass = "communication"\nkind = "all_reduce"\npattern = "^my_ring_"\n'
        '[[rule]]\nclass = "compute.attention"\npattern = "^volta_sgemm_special"\n'
        '[[rule]]\nside = "host"\nclass = "compute.norm"\npattern = "^mylib::norm$"\n'
    )
    table = NameTable.load(user_file=user_file)
    rule = table.find("device", "my_ring_kernel<3>")
    assert rule is not None
    assert (rule.label, rule.kind, rule.library) == ("communication", "all_reduce", "user")
    assert table.label("device", "volta_sgemm_special_nt") == "compute.attention"
    assert table.label("device", "volta_sgemm_128x32_nt") == "compute.matmul"
    assert table.label("host", "mylib::norm") == "compute.norm"
    assert table.identity != TABLE.identity
    assert NameTable.load().identity == TABLE.identity


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[[rule]]\nclass = "compute.matmull"\npattern = "x"\n', "did you mean 'compute.matmul'"),
        (
            '[[rule]]\nclass = "communication"\nkind = "allreduce"\npattern = "x"\n',
            "did you mean 'all_reduce'",
        ),
        ('[[rule]]\nclass = "communication"\npatern = "x"\n', "did you mean 'pattern'"),
        ('[[rule]]\nclass = "communication"\n', "pattern is missing"),
        ('[[rule]]\nclass = "communication"\npattern = "("\n', "no regular expression"),
        ('rule = "communication"\n', "[[rule]]"),
        ('[[rule]]\nclass = "communication"\npattern = "x"\nexamples = "y"\n', "no list of texts"),
        ('side = "cause"\n[[rule]]\nclass = "host.launch"\npattern = "x"\n', "did you mean"),
        ('side = "devise"\n', "did you mean 'device'"),
        ("schema = 2\n", "schema 2"),
        ("[[rule]\n", "not TOML"),
        ('[[context]]\nclass = "compute.norm"\npattern = "x"\ncovers = ["compute"]\n', "covers"),
        ('[[rule]]\nclass = "communication"\npattern = "x"\nflags = "m"\n', "flags"),
    ],
)
def test_a_wrong_rules_file_is_refused_in_words(tmp_path: Path, text: str, said: str) -> None:
    user_file = tmp_path / "rules.toml"
    user_file.write_text(text)
    with pytest.raises(DataError) as caught:
        NameTable.load(user_file=user_file)
    assert said in str(caught.value)
    assert "rules.toml" in str(caught.value)


def test_a_missing_rules_file_and_an_unknown_version_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.toml"):
        NameTable.load(user_file=tmp_path / "nowhere.toml")
    with pytest.raises(DataError, match=r"'99'.*there are: 1"):
        NameTable.load("99")
    assert table_versions()[0] == "1"


def test_every_side_has_rules() -> None:
    assert all(TABLE.rules[side] for side in SIDES)
