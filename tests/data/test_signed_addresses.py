"""Runs on corpora whose addresses are signed: nothing of the signature is kept, and yet they go on."""

import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from drivetrain.addresses import ADDRESS_VARIABLE
from drivetrain.config import load_config
from drivetrain.engine.creation import create_run
from drivetrain.engine.data.corpus import ensure_corpus
from drivetrain.engine.data.inspection import inspect_corpus
from drivetrain.engine.data.prepare import prepare
from drivetrain.engine.data.remote.cache import RemoteCache, key_of
from drivetrain.engine.data.remote.inputs import bring_corpus
from drivetrain.engine.data.remote.store import Refused, Retries, Store
from drivetrain.errors import DrivetrainError, EnvironmentFault
from runs_on_the_spot import Tiny

pytest.importorskip("fsspec")

SECRET = "s3cr3t-of-a-signature"
QUICK = ("training.train_iters=1", "training.eval_iters=0")


class Signed:
    """A folder whose files are there for who has the signature: it belongs to their names."""

    def __init__(self, folder: Path, corpus: Path) -> None:
        folder.mkdir()
        for file in corpus.parent.glob(f"{corpus.name}.*"):
            shutil.copy(file, folder / f"{file.name}?sig={SECRET}")
        self.url = f"file://{folder}/{corpus.name}?sig={SECRET}"
        self.shown = f"file://{folder}/{corpus.name}?signature=withheld"


@pytest.fixture
def signed(tmp_path: Path, tiny_corpus: Path) -> Signed:
    return Signed(tmp_path / "store", tiny_corpus)


@pytest.fixture(autouse=True)
def _addresses_are_of_one_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "home"))
    monkeypatch.delenv(ADDRESS_VARIABLE, raising=False)


def _files(folder: Path) -> Iterator[bytes]:
    for path in folder.rglob("*"):
        if path.is_file():
            yield path.read_bytes()


def test_a_run_keeps_nothing_of_a_signature(tiny: Tiny, signed: Signed) -> None:
    done = tiny.run("train", str(tiny.file), f"data.data_path={signed.url}", *QUICK, "--json")
    assert done.returncode == 0, done.stderr
    for text in (
        done.stdout.encode(),
        done.stderr.encode(),
        *_files(tiny.runs),
        *_files(tiny.folder / "home"),
    ):
        assert SECRET.encode() not in text
    assert tiny.only_run().config().data.data_path == signed.shown
    assert f"data.data_path={signed.shown}" in tiny.only_run().manifest["provenance"]["command"]


def test_a_run_goes_on_from_what_was_brought_or_with_the_address_given_again(
    tiny: Tiny, signed: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as given:
        given.setenv(ADDRESS_VARIABLE, signed.url)
        loaded = load_config(str(tiny.file), [f"data.data_path={signed.shown}", *QUICK])
        corpus = ensure_corpus(loaded.config.data, loaded.config.model)
        path = create_run(loaded, corpus, world_size=1, argv=["drivetrain"])
        del corpus
    kept = tiny.folder / "home" / "remote"
    kept.rename(tiny.folder / "elsewhere")
    refused = tiny.run("train", str(path))
    assert refused.returncode == 2
    assert (
        f"its signature is not kept; give the address again, whole, in the environment variable {ADDRESS_VARIABLE}"
        in (refused.stderr)
    )
    shutil.rmtree(kept)
    (tiny.folder / "elsewhere").rename(kept)
    done = tiny.run("train", str(path))
    assert done.returncode == 0, done.stderr


def test_the_address_that_is_given_again_need_not_be_signed_alike(
    signed: Signed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = RemoteCache(tmp_path / "cache", 1 << 30)
    bring_corpus(signed.url, cache).close()
    for file in list((tmp_path / "store").iterdir()):
        file.rename(str(file).replace(SECRET, "a-new-one"))
    bring_corpus(signed.url.replace(SECRET, "a-new-one"), cache).close()
    assert [path.name for path in cache.folder.iterdir() if path.is_dir()] == [key_of(signed.shown)]
    with pytest.raises(EnvironmentFault, match="signature is not kept"):
        bring_corpus(signed.shown, RemoteCache(tmp_path / "other", 1 << 30))
    monkeypatch.setenv(
        ADDRESS_VARIABLE, f"https://h/x?sig=1 {signed.url} {signed.url.replace(SECRET, 'a-new-one')}"
    )
    bring_corpus(signed.shown, RemoteCache(tmp_path / "other", 1 << 30)).close()


def test_what_is_made_and_shown_of_a_signed_input_names_it_without_its_signature(
    signed: Signed, tmp_path: Path
) -> None:
    (tmp_path / f"a.txt?sig={SECRET}").write_text("some text to learn from " * 50)
    meta = prepare([f"file://{tmp_path}/a.txt?sig={SECRET}"], tmp_path / "made", vocab_size=270)
    assert meta.sources == (f"file://{tmp_path}/a.txt?signature=withheld",)
    assert inspect_corpus(signed.url)["prefix"] == signed.shown


@pytest.mark.parametrize("fault", [PermissionError, FileNotFoundError, ConnectionError])
def test_a_message_that_names_the_file_alone_holds_no_signature(
    signed: Signed, monkeypatch: pytest.MonkeyPatch, fault: type[OSError]
) -> None:
    store = Store(signed.url, Retries(attempts=1))
    store.path += ".bin"
    file = store.file(store.path)
    assert file is not None

    def cat_file(path: str, **_: object) -> bytes:
        raise fault(13, "not so", path)

    monkeypatch.setattr(store._files, "cat_file", cat_file)
    with pytest.raises(DrivetrainError) as caught:
        store.read(file, 0, 4)
    shown = "".join(traceback.format_exception(caught.value))
    assert SECRET not in shown
    assert "signature=withheld" in shown


def test_no_cause_of_a_message_holds_a_signature(signed: Signed, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(signed.url)

    def info(path: str) -> None:
        raise PermissionError(f"403, message='Forbidden', url='https://h/{path}'")

    monkeypatch.setattr(store._files, "info", info)
    with pytest.raises(Refused, match="signature is wrong or has expired") as caught:
        store.file(store.path)
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__
