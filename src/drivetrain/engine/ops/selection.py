"""Who serves a call: what was asked for, what was tuned, or what the operator prefers; never another in silence."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from drivetrain.engine.ops.operator import Backend, Operator, Outputs
from drivetrain.engine.ops.signature import Signature, signature_of
from drivetrain.errors import DrivetrainError

__all__ = ["AUTO", "REGION", "Choice", "Selection"]

AUTO = "auto"
"""The tuned choice where there is one for the call, else the first that the operator prefers on the device."""
REGION = "drivetrain/operator/"
"""Begins the name of the region that a call has in a profile; operator and backend follow, with a slash between."""


@dataclass(frozen=True)
class Choice:
    """The backend of a call.

    Attributes:
        backend: the one that serves.
        requested: what was asked for: a backend's name, or ``auto``.
        reason: why it is not what was asked for, or what the choice rests on; None where there is nothing to say.
        untuned: whether there is something tuned, and nothing of it speaks of this call.
    """

    backend: Backend
    requested: str
    reason: str | None
    untuned: bool = False

    @property
    def is_fallback(self) -> bool:
        """Whether another backend was asked for by name."""
        return self.requested not in (AUTO, self.backend.name)


@dataclass
class Selection:
    """Chooses backends and keeps count of who served.

    Attributes:
        requested: names of backends by operator, or ``auto``. An operator that is not named has what was tuned, else
            ``eager``.
        tuned: gives the name of the backend that was tuned for a call; None: nothing was.
        allow_fallback: whether ``eager`` serves, with a recorded reason, where the requested one cannot.
        choices: of each call seen. One that torch.compile was the first to see is not among them, and is no fallback.
        served: calls by operator and backend. Calls inside compiled code are not counted: there Python does not run.
        observer: told of each call before it is made; None: nobody.
        on_fallback: told of each signature that another backend serves than the one asked for by name, once.
        on_untuned: told, once, of each signature of training for which nothing was tuned although other calls were.
    """

    requested: dict[str, str] = field(default_factory=dict)
    tuned: Callable[[Signature], str | None] | None = None
    allow_fallback: bool = False
    choices: dict[Signature, Choice] = field(default_factory=dict)
    served: Counter[tuple[str, str]] = field(default_factory=Counter)
    observer: Callable[[Operator, Mapping[str, Any]], None] | None = None
    on_fallback: Callable[[Choice], None] | None = None
    on_untuned: Callable[[Signature, Choice], None] | None = None

    def call(self, operator: Operator, **given: Any) -> Outputs:
        """Compute ``operator`` of the arguments of its reference.

        Raises:
            DrivetrainError: the requested backend cannot serve this call, and falling back is not allowed.
        """
        if self.observer is not None:
            self.observer(operator, given)
        signature = signature_of(operator.name, given)
        if torch.compiler.is_compiling():
            # Traced, what is kept here would be a guard, and compile anew with each other call: choose again instead.
            choice = self.choose(operator, signature)
            if choice.is_fallback and signature not in self.choices:
                # What is made while tracing cannot be kept, and a fallback that is not recorded is a silent one.
                raise DrivetrainError(
                    f"{choice.reason}; {choice.backend.name} would serve, but compiled code cannot record that: "
                    "call it once uncompiled, on these shapes"
                )
            return choice.backend.call(**given)
        if signature not in self.choices:
            made = self.choices[signature] = self.choose(operator, signature)
            if made.is_fallback and self.on_fallback is not None:
                self.on_fallback(made)
            # Evaluation and generation, which want no gradients, are a small part of a run: not told of.
            if made.untuned and signature.requires_grad and self.on_untuned is not None:
                self.on_untuned(signature, made)
        choice = self.choices[signature]
        self.served[operator.name, choice.backend.name] += 1
        if torch.autograd.profiler._is_profiler_enabled:
            with torch.profiler.record_function(f"{REGION}{operator.name}/{choice.backend.name}"):
                return choice.backend.call(**given)
        return choice.backend.call(**given)

    def serves(self, operator: str) -> bool:
        """Whether that operator was asked for."""
        return operator in self.requested

    def choose(self, operator: Operator, signature: Signature) -> Choice:
        """The backend for a call; nothing is computed.

        Raises:
            DrivetrainError: there is no such backend; or it cannot serve, and falling back is not allowed.
        """
        name = self.requested.get(operator.name)
        if name is None or name == AUTO:
            # Preferences may compile, which nobody who names no operator asks for.
            return self._tuned_or(operator, signature, {} if name is None else operator.untuned)
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

    def _tuned_or(
        self, operator: Operator, signature: Signature, preferred: Mapping[str, tuple[str, ...]]
    ) -> Choice:
        name = self.tuned(signature) if self.tuned is not None else None
        untuned = self.tuned is not None and name is None
        why = None
        if name is not None:
            backend = operator.backend(name)
            why = f"there is no backend {name}" if backend is None else backend.supports(signature)
            if backend is not None and why is None:
                return Choice(backend, AUTO, "tuned")
            why = f"tuned for {name}, which cannot serve: {why}"
        for name in preferred.get(signature.device, ()):
            backend = operator.backend(name)
            assert backend is not None
            if backend.supports(signature) is None:
                return Choice(backend, AUTO, why, untuned)
        return Choice(self._eager(operator, signature), AUTO, why, untuned)

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
