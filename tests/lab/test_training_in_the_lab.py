"""``drivetrain train`` on two hosts of a lab is the training that two processes of one machine do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.archive.listing import list_runs
from drivetrain.lab import Lab, missing

STEPS = 4


@pytest.mark.long
@pytest.mark.timeout(1800)  # it may have to wait for the labs of other tests
@pytest.mark.usefixtures("only_labs_here")
def test_two_hosts_train_as_two_processes_do_and_their_gradients_pass_the_link(tmp_path: Path) -> None:
    reason = missing(tmp_path / "labs")
    if reason is not None:
        pytest.skip(reason)
    command = [
        *(sys.executable, "-m", "drivetrain", "train", "llama-2m", "--json"),
        f"training.train_iters={STEPS}",
        "training.micro_batch_size=2",
        "training.global_batch_size=4",
        "training.eval_iters=0",
        "model.seq_length=64",
        "lr_schedule.lr_warmup_tokens=100",
        "run.num_threads=1",
        "run.deterministic=true",
    ]
    with Lab(2, 1, "500mbit", folder=tmp_path / "labs") as lab:
        in_lab = [*command, f"run.runs_dir={tmp_path / 'lab'}"]
        done = lab.run(in_lab, folder=tmp_path, time_limit_s=240).check()
        sent = [host.sent for host in lab.wire_bytes()]
    summary = json.loads(done.ranks[0].stdout)
    assert summary["status"] == "finished"
    assert done.ranks[1].stdout == ""
    # Two ranks: each sends what it hands over once, and headers.
    payload = STEPS * sum(summary["communication_bytes_per_step"].values())
    assert all(payload < bytes < 1.2 * payload + 1_000_000 for bytes in sent), (payload, sent)
    subprocess.run(
        [*command, f"run.runs_dir={tmp_path / 'here'}", "--nproc", "2"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=600,
    )
    losses = []
    for folder in ("lab", "here"):
        (run,) = list_runs(tmp_path / folder)
        losses.append([line["train/loss"] for line in run.metrics()])
    assert len(losses[0]) == STEPS
    assert losses[0] == losses[1]
