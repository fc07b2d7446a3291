"""``drivetrain train`` on one rank, with harm planted in what it does with gradients.

Started by torchrun as ``-m harness.planted_rank HARM train <its arguments>``. Harm goes in where a rank holds its part
of the gradient of the whole global batch: what a reduction that is wrong would leave there.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from harness.gate_harms import replaced

if TYPE_CHECKING:
    from drivetrain.engine.step import Stepper

__all__ = ["RANK_HARMS", "planted"]


def _nothing(stepper: "Stepper") -> None:
    """Sound: so it is seen that this way of starting ranks is no harm."""


def _doubled_on_one_rank(stepper: "Stepper") -> None:
    if stepper.group.ranks.rank == 1:
        _scale(stepper, 2.0)


def _mean_over_ranks(stepper: "Stepper") -> None:
    """Averaged over data-parallel ranks, where every rank's loss is already over the tokens of all of them."""
    _scale(stepper, 1 / stepper.mesh.size("dp"))


def _scale(stepper: "Stepper", factor: float) -> None:
    for held in stepper.sync.gradients().values():
        held.tensor.mul_(factor)


RANK_HARMS: dict[str, Callable[["Stepper"], None]] = {
    "nothing": _nothing,
    "doubled-on-one-rank": _doubled_on_one_rank,
    "mean-over-ranks": _mean_over_ranks,
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Every step of this process does the harm ``name``, for a block."""
    from drivetrain.engine.step import Stepper

    harm = RANK_HARMS[name]

    def make(step: Any) -> Any:
        def stepped(
            self: Any, *arguments: Any, on_gradients: Callable[[], None] | None, **options: Any
        ) -> Any:
            def harmed() -> None:
                harm(self)
                if on_gradients is not None:
                    on_gradients()

            return step(self, *arguments, on_gradients=harmed, **options)

        return stepped

    with replaced(Stepper, "step", make):
        yield


def main() -> None:
    """One rank."""
    _, name, *arguments = sys.argv
    from drivetrain.cli import main as command

    sys.argv = ["drivetrain", *arguments]
    with planted(name):
        command()


if __name__ == "__main__":
    main()
