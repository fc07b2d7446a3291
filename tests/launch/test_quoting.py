"""A value comes out of bash, and out of a container's arguments, as it went in."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_samples import ANY_TEXT
from kubernetes_types import expanded

from drivetrain.errors import DrivetrainError
from drivetrain.launch.quoting import bash_word, kubernetes_text, require_text


@given(st.lists(ANY_TEXT, min_size=1, max_size=20))
def test_words_of_bash_arrive_unchanged_and_stay_on_one_line(values: list[str]) -> None:
    words = [bash_word(value) for value in values]
    assert not any(character in word for word in words for character in "\n\r")
    script = "words=(\n" + "\n".join(words) + "\n)\nprintf '%s\\0' \"${words[@]}\""
    done = subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=240)
    assert done.stdout.decode().split("\0")[:-1] == values


@given(ANY_TEXT)
def test_arguments_of_a_container_arrive_unchanged(value: str) -> None:
    assert expanded(kubernetes_text(value), {"POD_NAME": "pod", "HOME": "/root"}) == value


def test_what_no_process_can_be_given_is_refused() -> None:
    with pytest.raises(DrivetrainError, match="null character"):
        require_text("an override", "a\0b")
    with pytest.raises(DrivetrainError, match="not UTF-8"):
        require_text("an override", "a\udcffb")
    assert require_text("an override", "grün\n") == "grün\n"
