"""Stores that answer and do not let us read: how that shows in what fsspec raises, and what a user sets then."""

from collections.abc import Iterator

from drivetrain.addresses import ADDRESS_VARIABLE, is_withheld, withheld

__all__ = ["refusal_in", "status_of", "traceable", "what_to_set", "words_of"]

_STATUSES = (401, 403, 407)
_OF_LIBRARIES = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "NoAuthTokenError",
    "TokenRetrievalError",
    "UnauthorizedSSOTokenError",
    "DefaultCredentialsError",
    "RefreshError",
    "ClientAuthenticationError",
    "GatedRepoError",
)
"""Names of exceptions of botocore, google.auth, azure and huggingface_hub: these packages are not imported here."""
_ADVICE = {
    "s3": "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; a public bucket is read with "
    "FSSPEC_S3_ANON=true",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS; a public bucket is read with FSSPEC_GS_TOKEN=anon",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
    "hf": "set HF_TOKEN",
    "file": "it is a matter of the rights of the file",
}
_ALIKE = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "adl": "az", "local": "file"}


def status_of(error: BaseException) -> int | None:
    """The status of HTTP behind an exception of any library; None where it tells none."""
    return next((status for one in _chain(error) if (status := _status(one)) is not None), None)


def _status(error: BaseException) -> int | None:
    for name in ("status", "code", "status_code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and 100 <= value < 600:
            return value
    return None


def refusal_in(error: BaseException) -> BaseException | None:
    """Of ``error`` and its causes the one that says that the store lets nobody read who comes as we do."""
    for one in _chain(error):
        if (
            _status(one) in _STATUSES
            or isinstance(one, PermissionError)
            or type(one).__name__ in _OF_LIBRARIES
        ):
            return one
    return None


def what_to_set(url: str) -> str:
    """The advice for a refusal of ``url``."""
    if is_withheld(url):
        return (
            "its signature is wrong or has expired: give the address with a new one, whole, in place of the old one or "
            f"in the environment variable {ADDRESS_VARIABLE}"
        )
    protocol = url.partition("://")[0].rpartition("::")[2].lower()
    protocol = _ALIKE.get(protocol, protocol)
    if protocol in ("http", "https"):
        header = '{"client_kwargs": {"headers": {"Authorization": "Bearer ..."}}}'
        return f"set FSSPEC_{protocol.upper()}='{header}', or give a signed address, whole, in {ADDRESS_VARIABLE}"
    return _ADVICE.get(
        protocol,
        f"give its credentials as FSSPEC_{protocol.upper()}_<SETTING>, or as the protocol's own package reads them",
    )


def words_of(error: BaseException) -> str:
    """An exception in words that may be shown."""
    return withheld(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def traceable(error: BaseException, secret: str = "") -> BaseException | None:
    """``error`` as a cause that may be printed; None where it, or one behind it, holds a secret: that of an address, or
    ``secret`` by itself."""
    seen: list[BaseException] = []
    now: BaseException | None = error
    while now is not None and now not in seen:
        words = f"{now!r} {now}"
        if withheld(words) != words or (secret and secret in words):
            return None
        seen.append(now)
        now = now.__cause__ or now.__context__
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    now: BaseException | None = error
    while now is not None:
        yield now
        now = now.__cause__
