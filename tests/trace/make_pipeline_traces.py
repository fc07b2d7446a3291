"""Traces of a real pipeline of two stages on the CPU, as torch's profiler leaves them.

``python tests/trace/make_pipeline_traces.py`` runs torch's own 1F1B schedule over gloo and writes one file a rank to
``tests/trace/pipeline_data``. The stages' group is the default one, and nothing in a file says what it is for.
"""

import socket
from pathlib import Path

import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed import destroy_process_group, init_process_group
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.profiler import ProfilerActivity, profile, schedule

DATA = Path(__file__).resolve().parent / "pipeline_data"
STAGES = 2
MICRO_BATCHES = 4
WIDTH = 256
ROWS = 64
"""Of one micro-batch: a message has ``ROWS * WIDTH * 4`` bytes."""


def run_stage(rank: int, port: int) -> None:
    """Train one stage for a few steps and write its trace."""
    torch.set_num_threads(1)
    init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=STAGES)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    stage = PipelineStage(model, rank, STAGES, torch.device("cpu"))
    steps = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(MICRO_BATCHES * ROWS, WIDTH)
    plan = schedule(wait=1, warmup=1, active=2)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True) as profiler:
        for _ in range(4):
            optimizer.zero_grad()
            losses: list[Tensor] = []
            if rank == 0:
                steps.step(inputs)
            else:
                steps.step(target=inputs, losses=losses)
            optimizer.step()
            profiler.step()
    profiler.export_chrome_trace(str(DATA / f"two_stages_rank{rank}.json.gz"))
    destroy_process_group()


def main() -> None:
    """Run all stages, each in its process."""
    DATA.mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run_stage, args=(port,), nprocs=STAGES)


if __name__ == "__main__":
    main()
