"""A process group serves what its description says; else what its ranks say; else nothing is claimed."""

from typing import Any

import pytest

from drivetrain.trace.groups import (
    ProcessGroup,
    group_label,
    label_of_ranks,
    labels_of_groups,
    process_groups,
)
from drivetrain.trace.name_table import NameTable

TABLE = NameTable.load()


def _info(*groups: dict[str, Any], world_size: int = 8) -> dict[str, Any]:
    return {
        "distributedInfo": {
            "rank": 0,
            "world_size": world_size,
            "pg_count": len(groups),
            "pg_config": list(groups),
        }
    }


def _group(name: str, description: str, ranks: list[int]) -> dict[str, Any]:
    return {"pg_name": name, "pg_desc": description, "pg_size": len(ranks), "ranks": ranks}


@pytest.mark.parametrize(
    ("description", "label"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("EXPERT_DATA_PARALLEL_GROUP", "dp"),
        ("EMBEDDING_GROUP", "pp"),
        ("mesh_dp_shard", "dp"),
        ("mesh_dp_shard_cp", "dp"),
        ("mesh_dp_replicate", "dp"),
        ("mesh_tp", "tp"),
        ("mesh_pp", "pp"),
        ("mesh_cp", "cp"),
        ("mesh_ep", "ep"),
        ("tp", "tp"),
        ("tp:0", "tp"),
        ("pp", "pp"),
        ("fsdp", "dp"),
        ("default_pg", "world"),
        ("undefined", "unknown"),
        ("adapter", "unknown"),
        ("step_prep", "unknown"),
    ],
)
def test_descriptions_of_known_trainers(description: str, label: str) -> None:
    group = process_groups(_info(_group("7", description, [0, 4])))[0]
    assert group_label(group, TABLE, 8) == label


def test_all_ranks_of_the_job_are_the_world_even_without_a_description() -> None:
    groups = process_groups(_info(_group("1", "undefined", list(range(8)))))
    assert group_label(groups[0], TABLE, 8) == "world"


def test_a_description_beats_the_rank_set() -> None:
    groups = process_groups(_info(_group("1", "mesh_dp", list(range(8)))))
    assert group_label(groups[0], TABLE, 8) == "dp"


LAYOUT = {"tp": 2, "cp": 1, "dp": 2, "pp": 2}


@pytest.mark.parametrize(
    ("ranks", "label"),
    [
        ([0, 1], "tp"),
        ([6, 7], "tp"),
        ([0, 2], "dp"),
        ([5, 7], "dp"),
        ([0, 4], "pp"),
        ([3, 7], "pp"),
        ([1, 2], "unknown"),
        ([0], "unknown"),
        (list(range(8)), "world"),
        ([4, 0], "pp"),
    ],
)
def test_ranks_that_differ_in_one_dimension_of_a_known_layout_serve_it(ranks: list[int], label: str) -> None:
    assert label_of_ranks(ranks, 8, LAYOUT) == label


def test_without_a_layout_a_part_of_the_ranks_tells_nothing() -> None:
    assert label_of_ranks([0, 1], 8) == "unknown"


def test_a_dimension_that_is_the_whole_job_is_that_dimension() -> None:
    assert label_of_ranks(range(4), 4, {"tp": 1, "dp": 4, "pp": 1}) == "dp"


def test_events_find_their_group_by_name_and_take_what_the_file_says_of_it() -> None:
    metadata = _info(
        _group("0", "default_pg", list(range(8))), _group("3", "mesh_tp", [0, 1]), _group("4", "", [0, 2])
    )
    labels, without = labels_of_groups(
        ["3|", "0|default_pg", "4|undefined", "9|mesh_pp", "9|"], metadata, TABLE, 8
    )
    assert labels == ["tp", "world", "unknown", "pp", "unknown"]
    assert without == "unknown"


def test_a_record_without_a_group_belongs_to_the_only_one() -> None:
    _, without = labels_of_groups([], _info(_group("0", "default_pg", [0, 1]), world_size=2), TABLE, 2)
    assert without == "world"
    assert labels_of_groups([], {}, TABLE, None) == ([], "unknown")


@pytest.mark.parametrize(
    "info",
    [None, "{'rank': 0}", {"pg_config": "[{..."}, {"pg_config": [3, {"pg_name": "0", "ranks": "0-7"}]}],
)
def test_odd_metadata_is_no_error(info: object) -> None:
    groups = process_groups({"distributedInfo": info})
    assert all(group.ranks == () for group in groups)


def test_a_group_known_by_size_alone_is_the_world_when_it_has_all_ranks() -> None:
    assert group_label(ProcessGroup("5", "", (), 8), TABLE, 8) == "world"
    assert group_label(ProcessGroup("5", "", (), 4), TABLE, 8) == "unknown"
    assert group_label(ProcessGroup("5", "", (), 1), TABLE, 1) == "unknown"
    assert group_label(ProcessGroup("5", "", (), 4), TABLE, None) == "unknown"
