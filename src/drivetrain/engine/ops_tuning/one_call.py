"""One call: which backends can serve it, which of them are right, which of those is fastest."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from drivetrain.engine.ops._operator_code import operator_code
from drivetrain.engine.ops._tuned_key import Key
from drivetrain.engine.ops.attention.mask import Mask
from drivetrain.engine.ops.operator import Backend
from drivetrain.engine.ops.signature import Signature
from drivetrain.engine.ops.tuned_file import Candidate, Entry
from drivetrain.engine.ops_tuning.choice import decide, least_and_spread
from drivetrain.engine.ops_tuning.described import described
from drivetrain.engine.ops_tuning.inputs import graded_size
from drivetrain.engine.ops_tuning.processes import Answer, Ask
from drivetrain.engine.ops_tuning.recording import RecordedCall

__all__ = ["CallTuner", "OutOfTimeError"]


class OutOfTimeError(Exception):
    """The budget ended before a call was finished. Nothing is known of it then."""


@dataclass(frozen=True)
class _Graded:
    """A candidate after its grade, and its bounds by output and gradient."""

    candidate: Candidate
    allowed: Mapping[str, float]


@dataclass(frozen=True)
class CallTuner:
    """Tunes calls one after the other.

    Attributes:
        threads: compute threads of each process.
        deterministic: whether backends have to give the same bits each time.
        keep_freed_memory: whether malloc is told to keep what is freed, as ``memory.keep_freed_memory`` does in a run.
        candidate_s: wall time that one process may take.
        rounds: in which backends are timed side by side.
        ask: makes the processes.
        module_of: where an operator lives, by its name.
        progress: told of each step.
    """

    threads: int
    deterministic: bool
    keep_freed_memory: bool
    candidate_s: float
    rounds: int
    ask: Ask
    module_of: Callable[[str], str]
    progress: Callable[[str], None]

    def tune(self, call: RecordedCall, key: Key, deadline: float) -> Entry | str:
        """The entry of a call, or why there is none.

        Args:
            deadline: of the monotonic clock.

        Raises:
            OutOfTimeError: it was not finished by then.
        """
        able = [one for one in call.operator.backends if self._refuses(one, call.signature) is None]
        if len(able) == 1:
            return self._entry(
                call, key, able[0].name, "no other can serve it here", [], self._refused(call, able)
            )
        size = graded_size(call.signature)
        tokens = [size, size - 1] if size > 1 else [size] if size else []
        graded = [self._graded(call, one, tokens, deadline) for one in able]
        right = [one for one in graded if one.candidate.rejected is None]
        if not right:
            return "no backend is right: " + "; ".join(
                f"{one.candidate.backend}: {one.candidate.rejected}" for one in graded
            )
        candidates = self._refused(call, able) | {one.candidate.backend: one.candidate for one in graded}
        if len(right) > 1:
            allowed = None if size in (0, key.tokens) else _loosest(right)
            answer = self._ask(
                {
                    **self._request("time", call.signature),
                    "backends": [one.candidate.backend for one in right],
                    "rounds": self.rounds,
                    "allowed": allowed,
                },
                deadline,
            )
            if answer.found is None:
                return f"timing {', '.join(one.candidate.backend for one in right)}: {answer.failure}"
            candidates |= _timed(candidates, answer.found)
        decision = decide([candidates[one.name] for one in call.operator.backends])
        if decision is None:
            # Alone it need not be timed.
            name, reason = right[0].candidate.backend, "the only one that is right here"
        else:
            name, reason = decision.backend, decision.reason
        return self._entry(call, key, name, reason, tokens, candidates)

    def _entry(
        self,
        call: RecordedCall,
        key: Key,
        backend: str,
        reason: str,
        tokens: list[int],
        candidates: Mapping[str, Candidate],
    ) -> Entry:
        return Entry(
            operator=call.operator.name,
            call=key.call,
            tokens=key.tokens,
            code=operator_code(self.module_of(call.operator.name)),
            backend=backend,
            reason=reason,
            calls_per_step=call.calls_per_step,
            graded_tokens=tuple(tokens),
            documents=_documents(call.signature),
            candidate=tuple(
                candidates.get(one.name, Candidate(backend=one.name)) for one in call.operator.backends
            ),
        )

    def _refuses(self, backend: Backend, signature: Signature) -> str | None:
        if self.deterministic and not backend.deterministic:
            return "gives other bits each time, and run.deterministic asks for the same"
        refused = backend.supports(signature)
        return None if refused is None else f"cannot serve: {refused}"

    def _refused(self, call: RecordedCall, able: list[Backend]) -> dict[str, Candidate]:
        """Those that are not tried, with the reason."""
        return {
            one.name: Candidate(backend=one.name, rejected=self._refuses(one, call.signature))
            for one in call.operator.backends
            if one not in able
        }

    def _graded(self, call: RecordedCall, backend: Backend, tokens: list[int], deadline: float) -> _Graded:
        def rejected(why: str) -> _Graded:
            self.progress(f"  {backend.name}: {why}")
            return _Graded(Candidate(backend=backend.name, rejected=why), {})

        request = {
            **self._request("grade", call.signature),
            "backend": backend.name,
            "tokens": tokens,
        }
        answer = self._ask(request, deadline)
        if answer.found is None:
            assert answer.failure is not None
            return rejected(answer.failure)
        if answer.found["problems"]:
            return rejected(f"wrong: {'; '.join(answer.found['problems'])}")
        measured = answer.found["measured"]
        worst = max(measured, key=lambda one: _share(one), default=None)
        share = "" if worst is None else f", {_share(worst):.2f} of the allowed error"
        self.progress(f"  {backend.name}: right{share}; {answer.seconds:.1f} s")
        found = Candidate(
            backend=backend.name,
            peak_bytes=answer.found["peak_bytes"],
            error=None if worst is None else worst["error"],
            allowed=None if worst is None else worst["allowed"],
            worst=None if worst is None else worst["what"],
        )
        return _Graded(found, {one["what"]: one["allowed"] for one in measured})

    def _request(self, do: str, signature: Signature) -> dict[str, Any]:
        return {
            "do": do,
            "module": self.module_of(signature.operator),
            "call": described(signature),
            "threads": self.threads,
            "deterministic": self.deterministic,
            "keep_freed_memory": self.keep_freed_memory,
        }

    def _ask(self, request: Mapping[str, Any], deadline: float) -> Answer:
        left = deadline - time.monotonic()
        if left <= 0:
            raise OutOfTimeError
        answer = self.ask(request, limit_s=min(left, self.candidate_s))
        if answer.timed_out and left < self.candidate_s:
            raise OutOfTimeError
        return answer


def _loosest(right: list[_Graded]) -> dict[str, float]:
    """By output and gradient the largest bound of all."""
    names = {name for one in right for name in one.allowed}
    return {name: max(one.allowed.get(name, 0.0) for one in right) for name in sorted(names)}


def _timed(candidates: Mapping[str, Candidate], found: Mapping[str, Any]) -> dict[str, Candidate]:
    timed = {
        name: candidates[name].model_copy(update={"rejected": f"wrong: {problem}"})
        for name, problem in found["problems"].items()
    }
    for name, seconds in found["seconds"].items():
        least, spread = least_and_spread(seconds)
        timed[name] = candidates[name].model_copy(update={"seconds": least, "spread": spread})
    return timed


def _share(measured: Mapping[str, Any]) -> float:
    return float(measured["error"] / measured["allowed"]) if measured["allowed"] > 0 else 0.0


def _documents(signature: Signature) -> tuple[int, ...]:
    for _, value in signature.options:
        if isinstance(value, Mask) and value.documents is not None:
            borders = value.documents.borders_q
            return tuple(last - first for first, last in pairwise(borders))
    return ()
