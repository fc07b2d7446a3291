"""Names and values that a scheduler accepts, checked before a file is written."""

import posixpath
import re
from collections.abc import Iterable, Sequence

from drivetrain.addresses import ADDRESS_VARIABLE, holds_password, is_withheld, withheld
from drivetrain.errors import DrivetrainError
from drivetrain.launch.quoting import require_text

__all__ = [
    "environment_of",
    "is_on_a_mount",
    "require_absolute_path",
    "require_claim",
    "require_image",
    "require_kubernetes_name",
    "require_namespace",
    "require_slurm_word",
    "slurm_seconds",
]

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_LONGEST_LABEL = 63
_LONGEST_SUBDOMAIN = 253

_SLURM_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@+,:=/-]*")
_SLURM_TIME = re.compile(
    r"(?:(?P<days>[0-9]+)-(?P<day_hours>[0-9]+)(?::(?P<day_minutes>[0-9]+)(?::(?P<day_seconds>[0-9]+))?)?"
    r"|(?P<hours>[0-9]+):(?P<hour_minutes>[0-9]+):(?P<hour_seconds>[0-9]+)"
    r"|(?P<minutes>[0-9]+)(?::(?P<seconds>[0-9]+))?)"
)

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SET_BY_OTHERS = re.compile(
    r"RANK|LOCAL_RANK|GROUP_RANK|ROLE_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT"
    r"|(PET|TORCHELASTIC|SLURM)_.*|TORCH_ELASTIC_SHUTDOWN_TIMEOUT|DRIVETRAIN_LAUNCHED|POD_NAME|JOB_COMPLETION_INDEX"
)


def require_kubernetes_name(option: str, name: str, suffix: str) -> None:
    """A DNS label (RFC 1123) that begins with a letter, as a Service asks, and has room for the pods' ``suffix``.

    Raises:
        DrivetrainError: it is none; with a name that is.
    """
    longest = _LONGEST_LABEL - len(suffix)
    if _LABEL.fullmatch(name) and name[0].isalpha() and len(name) <= longest:
        return
    nearest = kubernetes_name_like(name, longest)
    raise DrivetrainError(
        f"{option}: {name!r} is no name for Kubernetes: lower-case letters, digits and '-', a letter first, no '-' at "
        f"the end, at most {longest} characters (its pods add {suffix!r}); {nearest!r} would do"
    )


def kubernetes_name_like(name: str, longest: int = 40) -> str:
    """A legal name that looks like ``name``."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    if not label[:1].isalpha():
        label = f"run-{label}".rstrip("-")
    return label[:longest].rstrip("-")


def require_namespace(name: str) -> None:
    """A DNS label, RFC 1123. Raises DrivetrainError."""
    if not (_LABEL.fullmatch(name) and len(name) <= _LONGEST_LABEL):
        raise DrivetrainError(
            f"--namespace: {name!r} is no name of a namespace: lower-case letters, digits and '-' inside, at most "
            f"{_LONGEST_LABEL} characters; {kubernetes_name_like(name, _LONGEST_LABEL)!r} would do"
        )


def require_claim(name: str) -> None:
    """A DNS subdomain, RFC 1123: labels with dots between. Raises DrivetrainError."""
    labels = name.split(".")
    if not (
        len(name) <= _LONGEST_SUBDOMAIN
        and all(_LABEL.fullmatch(label) and len(label) <= _LONGEST_LABEL for label in labels)
    ):
        raise DrivetrainError(
            f"--volume: {name!r} is no name of a PersistentVolumeClaim: lower-case letters, digits, '-' and '.'; "
            f"{kubernetes_name_like(name, _LONGEST_LABEL)!r} would do"
        )


def require_absolute_path(option: str, path: str) -> None:
    """A path from the root without what separates paths in lists of mounts. Raises DrivetrainError."""
    require_text(option, path)
    if not path.startswith("/") or any(character in path for character in ":,\n") or ".." in path.split("/"):
        raise DrivetrainError(
            f"{option}: {path!r} cannot be mounted: a path begins with '/' and holds no ':', ',' or '..'"
        )


def is_on_a_mount(path: str, mounts: Iterable[str]) -> bool:
    """Whether ``path`` is one of the folders ``mounts`` or below one, whatever ``..`` it is written with."""
    place = f"{posixpath.normpath(path)}/"
    return any(place.startswith(f"{mount.rstrip('/')}/") for mount in mounts)


def require_image(image: str) -> None:
    """Something that can be the name of an image. Raises DrivetrainError."""
    require_text("--container", image)
    if not image or any(character.isspace() for character in image):
        raise DrivetrainError(
            f"--container: {image!r} is no image; give one such as registry.example/drivetrain:1.0"
        )


def require_slurm_word(option: str, value: str) -> str:
    """``value``, if it can stand in an ``#SBATCH`` line, which has no shell's quoting. Raises DrivetrainError."""
    if not _SLURM_WORD.fullmatch(value):
        raise DrivetrainError(
            f"{option}: {value!r} cannot stand in a line of #SBATCH: letters, digits and _ . @ + , : = / - are legal"
        )
    return value


def slurm_seconds(text: str) -> int:
    """Seconds of a time limit in one of the six forms of sbatch's manual; 0 asks for no limit.

    Raises:
        DrivetrainError: it has none of them.
    """
    found = _SLURM_TIME.fullmatch(text)
    if found is None:
        raise DrivetrainError(
            f"--time: {text!r} is no time limit; give minutes, minutes:seconds, hours:minutes:seconds, days-hours, "
            "days-hours:minutes or days-hours:minutes:seconds, such as 04:00:00"
        )
    part = {name: int(value or 0) for name, value in found.groupdict().items()}
    hours = 24 * part["days"] + part["day_hours"] + part["hours"]
    minutes = part["day_minutes"] + part["hour_minutes"] + part["minutes"]
    return 3600 * hours + 60 * minutes + part["day_seconds"] + part["hour_seconds"] + part["seconds"]


def environment_of(pairs: Sequence[str]) -> dict[str, str]:
    """What ``--env KEY=VALUE`` asks for.

    Raises:
        DrivetrainError: no such pair, a name twice, or a variable that torchrun or the scheduler sets.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not _VARIABLE.fullmatch(name):
            raise DrivetrainError(f"--env {pair!r}: expected KEY=VALUE, such as --env NCCL_DEBUG=WARN")
        if _SET_BY_OTHERS.fullmatch(name):
            raise DrivetrainError(
                f"--env {name}: torchrun or the scheduler sets it in every process; drop it"
            )
        if name == ADDRESS_VARIABLE:
            raise DrivetrainError(
                f"--env {name}: the job file would hold the signatures; set it where the job is submitted (sbatch "
                "passes it on), or from a Secret of the cluster"
            )
        # The command line has taken a secret out, so that the job would find an address that opens nothing.
        if holds_password(value) or withheld(value) != value or is_withheld(value):
            raise DrivetrainError(
                f"--env {name}: the job file would hold the secret of an address; set it where the job is submitted "
                "(sbatch passes it on), or from a Secret of the cluster"
            )
        if name in found:
            raise DrivetrainError(
                f"--env {name} is given twice, {found[name]!r} and {value!r}; give one of them"
            )
        found[name] = require_text(f"--env {name}", value)
    return found
