"""Who serves a call: what was asked for, what was tuned, or the plain way; never another in silence."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from drivetrain.engine.ops.operator import Backend, Operator, Outputs
from drivetrain.engine.ops.signature import Signature, signature_of
from drivetrain.errors import DrivetrainError

__all__ = ["AUTO", "Choice", "Selection"]

AUTO = "auto"
"""The tuned choice where there is one for the call, else ``eager``."""


@dataclass(frozen=True)
class Choice:
    """The backend of a call.

    Attributes:
        backend: the one that serves.
        requested: what was asked for: a backend's name, or ``auto``.
        reason: why it is not what was asked for, or what the choice rests on; None where there is nothing to say.
    """

    backend: Backend
    requested: str
    reason: str | None

    @property
    def is_fallback(self) -> bool:
        """Whether another backend was asked for by name."""
        return self.requested not in (AUTO, self.backend.name)


@dataclass
class Selection:
    """Chooses backends and keeps count of who served.

    Attributes:
        requested: names of backends by operator; ``auto`` where an operator is not named.
        tuned: gives the name of the backend that was tuned for a call; None: nothing was.
        allow_fallback: whether ``eager`` serves, with a recorded reason, where the requested one cannot.
        choices: of each call seen. One that torch.compile was the first to see is not among them, and is no fallback.
        served: calls by operator and backend. Calls inside compiled code are not counted: there Python does not run.
    """

    requested: Mapping[str, str] = field(default_factory=dict)
    tuned: Callable[[Signature], str | None] | None = None
    allow_fallback: bool = False
    choices: dict[Signature, Choice] = field(default_factory=dict)
    served: Counter[tuple[str, str]] = field(default_factory=Counter)

    def call(self, operator: Operator, **given: Any) -> Outputs:
        """Compute ``operator`` of the arguments of its reference.

        Raises:
            DrivetrainError: the requested backend cannot serve this call, and falling back is not allowed.
        """
        signature = signature_of(operator.name, given)
        choice = self.choices.get(signature)
        if choice is None:
            choice = self.choose(operator, signature)
            if not torch.compiler.is_compiling():
                self.choices[signature] = choice
            elif choice.is_fallback:
                # What is made while tracing cannot be kept, and a fallback that is not recorded is a silent one.
                raise DrivetrainError(
                    f"{choice.reason}; {choice.backend.name} would serve, but compiled code cannot record that: "
                    "call it once uncompiled, on these shapes"
                )
        # Traced, the count would be a guard, and each call would compile anew.
        if not torch.compiler.is_compiling():
            self.served[operator.name, choice.backend.name] += 1
        return choice.backend.call(**given)

    def choose(self, operator: Operator, signature: Signature) -> Choice:
        """The backend for a call; nothing is computed.

        Raises:
            DrivetrainError: there is no such backend; or it cannot serve, and falling back is not allowed.
        """
        name = self.requested.get(operator.name, AUTO)
        if name == AUTO:
            return self._tuned_or_eager(operator, signature)
        backend = operator.backend(name)
        if backend is None:
            names = ", ".join(one.name for one in operator.backends)
            raise DrivetrainError(
                f"fusion.{operator.name} = {name}: there is no such backend; there are: {AUTO}, {names}"
            )
        why = backend.supports(signature)
        if why is None:
            return Choice(backend, name, None)
        able = [one.name for one in operator.backends if one.supports(signature) is None]
        said = f"{name} cannot serve {signature}: {why}"
        if not self.allow_fallback:
            raise DrivetrainError(
                f"fusion.{operator.name} = {name}: {said}; those that can: {', '.join(able) or 'none'}; with "
                "fusion.allow_fallback = true eager would serve"
            )
        return Choice(self._eager(operator, signature), name, said)

    def _tuned_or_eager(self, operator: Operator, signature: Signature) -> Choice:
        name = self.tuned(signature) if self.tuned is not None else None
        if name is None:
            return Choice(self._eager(operator, signature), AUTO, None)
        backend = operator.backend(name)
        why = f"there is no backend {name}" if backend is None else backend.supports(signature)
        if backend is None or why is not None:
            return Choice(
                self._eager(operator, signature), AUTO, f"tuned for {name}, which cannot serve: {why}"
            )
        return Choice(backend, AUTO, "tuned")

    def _eager(self, operator: Operator, signature: Signature) -> Backend:
        backend = operator.backend("eager")
        assert backend is not None
        why = backend.supports(signature)
        if why is not None:
            able = [one.name for one in operator.backends if one.supports(signature) is None]
            raise DrivetrainError(
                f"{operator.name}: eager cannot serve {signature}: {why}; those that can: {', '.join(able) or 'none'}"
            )
        return backend
