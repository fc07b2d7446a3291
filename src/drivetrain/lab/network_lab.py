"""The lab as it is used: made, run in, taken down, and cleaned up where somebody was killed before."""

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from drivetrain.errors import DrivetrainError, EnvironmentFault
from drivetrain.lab.network import WireBytes, Wiring
from drivetrain.lab.processes import LabRun, OnLine, run_ranks
from drivetrain.lab.requirements import lacking, require_means
from drivetrain.lab.state import DEFAULT_FOLDER, LabState, Process, locked, name_of, read_states
from drivetrain.lab.topology import Topology

__all__ = ["Lab", "clean_up", "find_lab", "known_labs", "missing"]


class Lab:
    """Hosts behind links of a chosen rate. As a context manager it lives as long as its block::

        with Lab(hosts=2, ranks=1, rate="800mbit") as lab:
            done = lab.run([sys.executable, "train.py"], time_limit_s=120).check()
            print(done.ranks[0].stdout, lab.wire_bytes())

    A lab whose process is killed leaves namespaces behind; the next lab that is made, or :func:`clean_up`, removes
    them.

    Args:
        hosts, ranks: hosts, and ranks on each.
        rate: of each link, in each direction: ``800mbit``, ``up/down``, or bits a second.
        links: other rates, by number of the host.
        folder: where it is written down what exists.

    Raises:
        DrivetrainError: no such shape.
    """

    def __init__(
        self,
        hosts: int = 2,
        ranks: int = 1,
        rate: str | float = "1gbit",
        *,
        links: Mapping[int, str] | None = None,
        folder: Path = DEFAULT_FOLDER,
    ) -> None:
        self.topology = Topology.uniform(hosts, ranks, rate, links)
        self.folder = folder
        self._state: LabState | None = None

    @property
    def id(self) -> str:
        """Its name."""
        return self._made().id

    def __enter__(self) -> Self:
        """Make it.

        Raises:
            EnvironmentFault: this machine cannot have one.
        """
        self.make()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.take_down()

    def make(self, name: str | None = None) -> None:
        """Make it, after whatever was left behind by others has been removed.

        Args:
            name: it is to stay under this name when this process ends; None: it belongs to this process.

        Raises:
            DrivetrainError: there is a lab of this name.
            EnvironmentFault: this machine cannot have one; nothing is left of it then.
        """
        require_means()
        id = name_of(name) if name is not None else f"of{secrets.token_hex(5)}"
        with locked(self.folder):
            _remove_stale(self.folder)
            if any(state.id == id for state in read_states(self.folder)):
                raise DrivetrainError(
                    f"there is a lab called {id} already; use it, take it down with `drivetrain lab down --name {id}`, "
                    "or give this one another name"
                )
            state = LabState(id, self.topology, owner=Process.this())
            wiring = Wiring(id, self.topology)
            # Before anything is made: whoever comes after a kill must know what to look for.
            state.write(self.folder)
            try:
                wiring.make()
                state = replace(state, owner=None if name is not None else state.owner, is_complete=True)
                state.write(self.folder)
            except BaseException:
                wiring.remove()
                state.forget(self.folder)
                raise
        self._state = state

    def take_down(self) -> None:
        """End what runs in it and remove it.

        Raises:
            DrivetrainError: another process has a command running in it.
            EnvironmentFault: something in it does not end.
        """
        state = self._made()
        with locked(self.folder):
            current = next((one for one in read_states(self.folder) if one.id == state.id), None)
            if current is not None:
                _refuse_in_use(current)
            Wiring(state.id, state.topology).remove()
            state.forget(self.folder)
        self._state = None

    def run(
        self,
        command: Sequence[str] | Callable[[int], Sequence[str]],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        time_limit_s: float | None = None,
        grace_s: float = 10.0,
        on_line: OnLine | None = None,
        own_cores: bool = True,
    ) -> LabRun:
        """Run a command on every rank to its end. When this returns or raises, no process is left in any host.

        Each rank has the environment that torchrun would give it (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
        MASTER_ADDR, MASTER_PORT), GLOO_SOCKET_IFNAME, and DRIVETRAIN_LAB with the lab's name.

        Args:
            command: the same for all ranks, or called with each rank.
            environment: variables that go before all others.
            folder: where the ranks start; by default here.
            time_limit_s: after which they are asked to end (SIGTERM), and ended ``grace_s`` later.
            grace_s: how long the others may go on once a rank has failed.
            on_line: told of each line that a rank writes, as it comes.
            own_cores: hosts share no core where there are as many cores as hosts.

        Raises:
            DrivetrainError: a command is running in this lab, or there is no such command.
        """
        state = self._made()
        of_rank = command if callable(command) else lambda _rank: command
        with self._used(state) as wiring:
            try:
                return run_ranks(
                    wiring,
                    of_rank,
                    environment=environment or {},
                    folder=folder,
                    time_limit_s=time_limit_s,
                    grace_s=grace_s,
                    on_line=on_line,
                    own_cores=own_cores,
                )
            except FileNotFoundError as error:
                raise DrivetrainError(
                    f"the folder {error.filename} is not there; ranks cannot start in it"
                ) from error

    def wire_bytes(self) -> list[WireBytes]:
        """By host, what has passed its link since it was made, headers included."""
        return self._wiring().wire_bytes()

    def processes(self) -> dict[int, list[int]]:
        """Process ids by number of the host; hosts without any are left out."""
        return self._wiring().processes()

    def _wiring(self) -> Wiring:
        state = self._made()
        return Wiring(state.id, state.topology)

    def _made(self) -> LabState:
        assert self._state is not None, "the lab was not made, or was taken down"
        return self._state

    @contextmanager
    def _used(self, state: LabState) -> Iterator[Wiring]:
        """Written down as in use by this process; what a former user that was killed left running is ended."""
        wiring = Wiring(state.id, state.topology)
        with locked(self.folder):
            current = next((one for one in read_states(self.folder) if one.id == state.id), None)
            if current is None:
                raise DrivetrainError(f"the lab {state.id} was taken down meanwhile; make it anew")
            _refuse_in_use(current)
            wiring.empty()
            replace(current, runner=Process.this()).write(self.folder)
        try:
            yield wiring
        finally:
            with locked(self.folder):
                replace(current, runner=None).write(self.folder)

    @staticmethod
    def _of(state: LabState, folder: Path) -> "Lab":
        lab = Lab.__new__(Lab)
        lab.topology, lab.folder, lab._state = state.topology, folder, state
        return lab


def find_lab(name: str, folder: Path = DEFAULT_FOLDER) -> Lab:
    """The lab of this name.

    Raises:
        DrivetrainError: there is none; with the names of those that there are.
    """
    require_means()
    states = [state for state in known_labs(folder) if state.is_complete and not state.is_stale]
    for state in states:
        if state.id == name:
            return Lab._of(state, folder)
    there = ", ".join(state.id for state in states)
    remedy = f"there are: {there}" if there else "make one with: drivetrain lab up"
    raise DrivetrainError(f"there is no lab called {name}; {remedy}")


def known_labs(folder: Path = DEFAULT_FOLDER) -> list[LabState]:
    """What is written down of labs, stale ones included."""
    return read_states(folder)


def clean_up(folder: Path = DEFAULT_FOLDER) -> list[str]:
    """Remove all labs whose process was killed, with everything that still runs in them; their names.

    Raises:
        EnvironmentFault: this machine cannot have had one, or something does not end.
    """
    require_means()
    if not folder.is_dir():
        return []
    with locked(folder):
        return _remove_stale(folder)


def missing(folder: Path = DEFAULT_FOLDER) -> str | None:
    """In words, what keeps this machine from having a lab; None: nothing.

    Makes the smallest lab and takes it down: root inside a container need not be allowed to.
    """
    reason = lacking()
    if reason is not None:
        return reason
    try:
        with Lab(1, 1, folder=folder):
            return None
    except EnvironmentFault as error:
        return str(error)


def _remove_stale(folder: Path) -> list[str]:
    removed = []
    for state in read_states(folder):
        if state.is_stale:
            Wiring(state.id, state.topology).remove()
            state.forget(folder)
            removed.append(state.id)
    return removed


def _refuse_in_use(state: LabState) -> None:
    if state.runner is not None and state.runner.is_alive and state.runner != Process.this():
        raise DrivetrainError(
            f"the lab {state.id} is in use: process {state.runner.id} has a command running in it; wait for it, or end "
            "it first"
        )
