"""Jobs for the tests, and text of every kind."""

import dataclasses
from typing import Any

from hypothesis import strategies as st

from drivetrain.launch import Job, Volume

__all__ = ["ANY_TEXT", "job_of"]

ANY_TEXT = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40
) | st.sampled_from(
    [
        "",
        "'",
        '"',
        "\\",
        "$(reboot)",
        "`id`",
        "$HOME",
        "a\nb",
        "a\r\nb",
        "#SBATCH --x",
        "!!",
        "~",
        "$$(POD_NAME)",
        "-",
        "\x7f",
    ]
)
"""What a process can be given."""

_JOB = Job(
    name="first-3f2a",
    nodes=2,
    per_node=4,
    config="llama-2m",
    overrides=("run.name=first-3f2a", "run.device=cuda"),
    runs_dir="/data/runs",
    gpus_per_node=4,
    max_restarts=3,
    grace_seconds=120,
    container="registry.example/drivetrain:1.0",
    volumes=(Volume("training", "/data"),),
)


def job_of(**changes: Any) -> Job:
    """A job of two hosts with four processes each, but for ``changes``."""
    return dataclasses.replace(_JOB, **changes)
