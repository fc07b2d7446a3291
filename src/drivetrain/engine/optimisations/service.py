"""Who served operators, on this rank or on all: a stage of a pipeline makes no calls of what another stage holds."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.parallel.process_group import ProcessGroup

__all__ = ["Service", "service_of_all_ranks", "service_of_rank"]


@dataclass(frozen=True)
class Service:
    """What became of the calls of each operator.

    Attributes:
        served: calls by operator and backend. Calls in compiled code are not counted.
        reasons: by operator, why others served than those asked for, each once.
    """

    served: Mapping[str, Mapping[str, int]]
    reasons: Mapping[str, tuple[str, ...]]

    @classmethod
    def sum_of(cls, parts: Iterable[Self]) -> Self:
        """Calls of all of them, and the reasons that any of them has."""
        served: dict[str, Counter[str]] = {}
        reasons: dict[str, dict[str, None]] = {}
        for part in parts:
            for operator, calls in part.served.items():
                served.setdefault(operator, Counter()).update(calls)
            for operator, texts in part.reasons.items():
                reasons.setdefault(operator, {}).update(dict.fromkeys(texts))
        return cls(served, {operator: tuple(texts) for operator, texts in reasons.items()})


def service_of_rank(selection: Selection) -> Service:
    """As ``selection`` has counted it."""
    served: dict[str, dict[str, int]] = {}
    for (operator, backend), calls in sorted(selection.served.items()):
        served.setdefault(operator, {})[backend] = calls
    reasons: dict[str, dict[str, None]] = {}
    for signature, choice in selection.choices.items():
        if choice.reason is not None and choice.reason != "tuned":
            reasons.setdefault(signature.operator, {})[choice.reason] = None
    return Service(served, {operator: tuple(texts) for operator, texts in reasons.items()})


def service_of_all_ranks(selection: Selection, group: ProcessGroup) -> Service:
    """The sum over the ranks. Collective."""
    own = service_of_rank(selection)
    texts = group.gather_texts(json.dumps({"served": own.served, "reasons": own.reasons}))
    return Service.sum_of(Service(**json.loads(text)) for text in texts)
