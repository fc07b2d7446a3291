"""Job files that run a configuration on a cluster: what a scheduler reads, as text.

Here live the job as plain facts (:mod:`job`), the names and values that a scheduler accepts (:mod:`names`), how a value
is written so that it arrives unchanged (:mod:`quoting`), and one module for each kind of file (:mod:`slurm`,
:mod:`kubernetes`). Nothing here starts training, reads a run or imports torch; handing a finished file to ``sbatch`` or
``kubectl`` (:mod:`submission`) is the only thing done beside writing. Rules of a configuration are checked by the verb,
before any of this is asked.
"""

from drivetrain.launch.job import Job, Volume
from drivetrain.launch.kubernetes import indexed_job, pytorch_job
from drivetrain.launch.slurm import SlurmOptions, slurm_script
from drivetrain.launch.submission import require_program, submit

__all__ = [
    "Job",
    "SlurmOptions",
    "Volume",
    "indexed_job",
    "pytorch_job",
    "require_program",
    "slurm_script",
    "submit",
]
