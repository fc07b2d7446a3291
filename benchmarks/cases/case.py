"""What is declared of a case."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["BAKED", "BATCH_OF_A_STEP", "RATE", "Case", "Parameter", "Share", "common"]

RATE = "rate_mbit"
"""The parameter that is no field of the configuration: the rate of the lab's links."""
BAKED = "data.data_path={baked}"
"""Among overrides: the corpus to which the case's transform was applied once."""
BATCH_OF_A_STEP = (
    "the global batch and so the tokens of a step, the model, the seed and the order of the text"
)


@dataclass(frozen=True)
class Parameter:
    """A free parameter, found by measuring.

    Attributes:
        start: where the search begins.
        least, most: between what it stays.
        multiple: it is a whole number of these.
        falls: more of it makes its share smaller.
    """

    start: float
    least: float
    most: float
    multiple: int = 1
    falls: bool = False

    def legal(self, value: float) -> float:
        """The nearest value that it may have."""
        bounded = min(max(value, self.least), self.most)
        return float(max(1, round(bounded / self.multiple)) * self.multiple)


@dataclass(frozen=True)
class Share:
    """A share of the baseline's step that the source states.

    Attributes:
        name: for people.
        classes: of the account, each with all below it.
        stated: by the source, of 1.
        parameter: whose time it is.
    """

    name: str
    classes: tuple[str, ...]
    stated: float
    parameter: str

    def of(self, classes: Mapping[str, float]) -> float:
        """Its part of a step whose classes have these times."""
        here = sum(
            time
            for name, time in classes.items()
            if any(name == one or name.startswith(f"{one}.") for one in self.classes)
        )
        return here / sum(classes.values())


@dataclass(frozen=True)
class Case:
    """A case of a source.

    Attributes:
        name: on the command line.
        source: tag of the digest of sources.
        told: what the source tells, in a sentence.
        ratio: last over first tokens/s, as the source has them.
        ratio_told: from which figures.
        hosts: of the network lab, with a rank on each; 0: one process, and no lab.
        overrides: of the preset ``llama-2m``: what the baseline is, whatever its parameters.
        parameters: by name.
        configure: overrides that parameters make.
        shares: what the account of the baseline must show; empty: the source states none.
        hand_tuned: by name, overrides of the baseline that who knows the case would choose. The fastest of them
            is the optimum that the ladder is held against.
        entries: names in the catalogue of what the source itself has changed; ``--quick`` tries these alone.
        fixed: what stays as it is in every configuration of the case.
        differs: from the source, in what this case does.
        limit_over_peak: memory limit over the predicted live bytes of the baseline's step; None: no limit.
        tune: further options of ``drivetrain tune``.
        rows: further configurations that are measured for information: the source's own, by name.
    """

    name: str
    source: str
    told: str
    ratio: float
    ratio_told: str
    hosts: int
    overrides: tuple[str, ...]
    parameters: Mapping[str, Parameter]
    configure: Callable[[Mapping[str, float]], Sequence[str]]
    shares: tuple[Share, ...]
    hand_tuned: Mapping[str, tuple[str, ...]]
    entries: tuple[str, ...]
    fixed: str
    differs: str
    limit_over_peak: float | None = None
    tune: tuple[str, ...] = ()
    rows: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        """Processes of a run."""
        return max(1, self.hosts)


def common(vocabulary: int, seq_length: int, micro_batch: int, global_batch: int) -> tuple[str, ...]:
    """What the baselines of all cases have in common: nothing is on."""
    return (
        f"model.vocab_size={vocabulary}",
        f"model.seq_length={seq_length}",
        "precision.params_dtype=fp32",
        f"training.micro_batch_size={micro_batch}",
        f"training.global_batch_size={global_batch}",
        "training.train_iters=2000",
        "training.eval_iters=0",
        "run.device=cpu",
        "run.num_threads=1",
        "fusion.level=off",
    )
