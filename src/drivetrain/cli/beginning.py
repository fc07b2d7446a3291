"""Options of ``drivetrain train`` for the start of a new run: who may have them, and what the run keeps of them."""

from dataclasses import dataclass
from pathlib import Path

from drivetrain.archive.origin import RunOrigin, change_between
from drivetrain.config import RunConfig
from drivetrain.errors import DrivetrainError

__all__ = ["PLAIN_BEGINNING", "Beginning"]


@dataclass(frozen=True)
class Beginning:
    """Options of ``train`` that count at the start of a new run only."""

    probe: bool = False
    perturb_ulp: int | None = None
    parent: str | None = None

    @property
    def given(self) -> dict[str, bool]:
        """Which of them are."""
        return {
            "--probe": self.probe,
            "--perturb-ulp": self.perturb_ulp is not None,
            "--parent": self.parent is not None,
        }

    def refuse_without_a_new_run(self, what: str | None) -> None:
        """Raise DrivetrainError where one is given and ``what`` (an option, a run to continue) starts no new run."""
        name = next((name for name, is_given in self.given.items() if is_given), None)
        if what is None or name is None:
            return
        if what.startswith("--"):
            raise DrivetrainError(f"{name} belongs to a new run, and {what} makes none; give one of them")
        raise DrivetrainError(
            f"{name} belongs to the start of a run, and {what} is a run to continue; drop {name}, or start a new run "
            f"from {Path(what) / 'config.toml'}"
        )

    def origin(self, config: RunConfig) -> RunOrigin:
        """What the manifest keeps of it.

        Raises:
            DrivetrainError: there is no such parent, or the run begins after the step that is asked for.
        """
        loads = config.checkpoint
        if loads.initial_load_path is not None and not loads.initial_load_model_only:
            given = "--probe" if self.probe else "--perturb-ulp" if self.perturb_ulp is not None else None
            if given is not None:
                raise DrivetrainError(
                    f"{given} belongs to the first step of a run, and this one goes on after a step of "
                    f"{loads.initial_load_path}; drop {given}, or take the weights alone with "
                    f"checkpoint.initial_load_path={loads.initial_load_path}/model "
                    "checkpoint.initial_load_model_only=true"
                )
        if self.parent is None:
            return RunOrigin(probe=self.probe, perturb_ulp=self.perturb_ulp)
        from drivetrain.archive.listing import resolve_run

        parent = resolve_run(self.parent, config.run.runs_dir)
        change = change_between(parent.config(), config)
        return RunOrigin(parent.id, change, self.probe, self.perturb_ulp)


PLAIN_BEGINNING = Beginning()
"""None of them."""
