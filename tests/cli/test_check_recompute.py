"""A memory budget through the command line: checked, refused with what works, trained within, recorded."""

import json
from typing import Any

import pytest

from runs_on_the_spot import Tiny

BUDGET = "memory.recompute_granularity=budget"


def checked(tiny: Tiny, budget_bytes: int) -> tuple[int, dict[str, Any]]:
    done = tiny.run("check", str(tiny.file), BUDGET, f"memory.budget_bytes={budget_bytes}", "--json")
    return done.returncode, json.loads(done.stdout)


@pytest.mark.long
def test_a_budget_is_planned_refused_where_nothing_fits_and_trained_within(tiny: Tiny) -> None:
    code, document = checked(tiny, 1000)
    assert code == 1
    (violation,) = document["violations"]
    assert violation["rule"] == "recompute-budget-suffices"
    least = int(violation["message"].rsplit(" ", 1)[1])
    code, document = checked(tiny, least)
    assert code == 0
    (stage,) = document["recompute"]["stages"]
    assert stage["peak_bytes"] <= least < stage["peak_bytes_without"]
    assert set(stage["layers"]) == {"0", "1"}

    refused = tiny.run("train", str(tiny.file), BUDGET, "memory.budget_bytes=1000")
    assert refused.returncode == 2
    assert str(least) in refused.stderr
    assert not tiny.runs.exists()

    plain = tiny.train("training.train_iters=2")
    budget = (least + stage["peak_bytes_without"]) // 2
    # The limit counts a real step, and ends the run where it is exceeded.
    limited = [f"memory.{name}={budget}" for name in ("budget_bytes", "device_memory_limit_bytes")]
    summary = tiny.train("training.train_iters=2", BUDGET, *limited)
    assert summary["final_loss"] == plain["final_loss"]
    assert summary["recompute"]["peak_bytes"] <= budget
    assert plain["recompute"] is None
    (record,) = [one for one in summary["optimisations"] if one["name"] == "recompute"]
    assert record["active"]
