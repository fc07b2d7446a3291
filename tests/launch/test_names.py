"""Names, limits and variables that a scheduler would refuse are refused before a file is written."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.errors import DrivetrainError
from drivetrain.launch.names import (
    environment_of,
    kubernetes_name_like,
    require_absolute_path,
    require_claim,
    require_image,
    require_kubernetes_name,
    require_namespace,
    require_slurm_word,
    slurm_seconds,
)

DNS_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
"""RFC 1123, as Kubernetes checks it."""


@given(
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True),
    st.sampled_from(["-1", "-worker-99999"]),
)
def test_a_name_that_is_accepted_makes_legal_pods_and_a_refused_one_has_a_legal_neighbour(
    name: str, suffix: str
) -> None:
    try:
        require_kubernetes_name("--name", name, suffix)
    except DrivetrainError:
        neighbour = kubernetes_name_like(name, 63 - len(suffix))
        require_kubernetes_name("--name", neighbour, suffix)
    else:
        assert DNS_LABEL.fullmatch(name + suffix)
        assert len(name + suffix) <= 63
        assert name[0].isalpha(), "a Service begins with a letter"


@pytest.mark.parametrize("name", ["Run", "run_1", "run.1", "-run", "run-", "1run", "", "r" * 62, "grün"])
def test_what_is_no_label_is_refused_with_one_that_is(name: str) -> None:
    with pytest.raises(DrivetrainError, match="would do"):
        require_kubernetes_name("--name", name, "-1")


def test_namespaces_claims_images_and_paths() -> None:
    for good in ("team", "1st", "a-b"):
        require_namespace(good)
    for bad in ("", "Team", "a.b", "a" * 64):
        with pytest.raises(DrivetrainError, match="--namespace"):
            require_namespace(bad)
    for good in ("data", "a.b-c", "1"):
        require_claim(good)
    for bad in ("", "a..b", "A", "a_b"):
        with pytest.raises(DrivetrainError, match="PersistentVolumeClaim"):
            require_claim(bad)
    require_image("registry.example:5000/team/drivetrain@sha256:0")
    for bad in ("", "a b", "a\n"):
        with pytest.raises(DrivetrainError, match="--container"):
            require_image(bad)
    require_absolute_path("--volume", "/a b/c")
    for bad in ("", "data", "/a:b", "/a,b", "/a/../b", "/a\nb"):
        with pytest.raises(DrivetrainError, match="cannot be mounted"):
            require_absolute_path("--volume", bad)


@pytest.mark.parametrize("value", ["", "-x", "a b", "a#b", "a'b", 'a"b', "a\\b", "a\nb", "a%j"])
def test_a_line_of_sbatch_takes_no_word_that_it_would_cut_or_expand(value: str) -> None:
    with pytest.raises(DrivetrainError, match="#SBATCH"):
        require_slurm_word("--account", value)


def test_words_that_accounts_and_partitions_are_made_of() -> None:
    for good in ("a100,h100", "proj_1@gpu", "team.sub-1"):
        assert require_slurm_word("--partition", good) == good


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 5400),
        ("90:30", 5430),
        ("04:00:30", 14430),
        ("1-12", 129600),
        ("1-12:30", 131400),
        ("1-12:30:15", 131415),
        ("0", 0),
    ],
)
def test_the_six_forms_of_a_time_limit(text: str, seconds: int) -> None:
    assert slurm_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "4h", "1-", "1:2:3:4", "-1", "1.5", "1-2:3:4:5", " 90", "٣"])
def test_what_is_no_time_limit_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(DrivetrainError, match="days-hours"):
        slurm_seconds(text)


def test_variables_of_the_processes() -> None:
    assert environment_of(["NCCL_DEBUG=WARN", "A=b=c", "EMPTY="]) == {
        "NCCL_DEBUG": "WARN",
        "A": "b=c",
        "EMPTY": "",
    }


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        (["NCCL_DEBUG"], "expected KEY=VALUE"),
        (["=x"], "expected KEY=VALUE"),
        (["A B=x"], "expected KEY=VALUE"),
        (["A;reboot=x"], "expected KEY=VALUE"),
        (["A=1", "A=2"], "given twice"),
        (["RANK=0"], "sets it in every process"),
        (["WORLD_SIZE=8"], "sets it in every process"),
        (["PET_NNODES=2"], "sets it in every process"),
        (["TORCHELASTIC_RUN_ID=x"], "sets it in every process"),
        (["A=\0"], "null character"),
    ],
)
def test_variables_that_are_none_or_are_set_by_others_are_refused(pairs: list[str], words: str) -> None:
    with pytest.raises(DrivetrainError, match=words):
        environment_of(pairs)
