"""``drivetrain data accept``: let a run go on with a corpus that is not the one it was started with."""

from pathlib import Path
from typing import Any

from drivetrain.archive.reader import open_run
from drivetrain.archive.writer import append_event
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.data.progress import ProgressCallback, silent
from drivetrain.engine.preflight import require_usable_inputs
from drivetrain.errors import RunError

__all__ = ["accept_data"]


def accept_data(path: str | Path, progress: ProgressCallback = silent) -> dict[str, Any]:
    """Record in the run at ``path`` that its corpus may be what it is now, and say what was recorded.

    The position in the data stays a number of samples; which samples those are depends on the corpus.

    Raises:
        RunError: the corpus is the one that the run would go on with anyway; the run is finished.
        DrivetrainError: the corpus does not fit the run's model or lengths.
    """
    run = open_run(path)
    if run.status() in ("finished", "running"):
        raise RunError(f"{run.path} is {run.status()}: data are accepted for a run that is to go on")
    config, former = run.config(), run.data_fingerprint()
    corpus = ensure_corpus(config.data, config.model, progress)
    if corpus.fingerprint == former:
        raise RunError(
            f"the corpus of {run.path} is what the run goes on with anyway; there is nothing to accept"
        )
    require_usable_inputs(config, corpus)
    accepted = {"fingerprint": corpus.fingerprint, "former": former, "prefix": str(corpus.prefix)}
    append_event(run.path, "data_accepted", **accepted)
    return {"run": str(run.path), **accepted}
