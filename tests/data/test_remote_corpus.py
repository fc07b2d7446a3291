"""Corpora and inputs by URL: brought in parts, tried again, verified, kept within a bound, held while in use."""

import builtins
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from preparation import byte_tokenizer, content

from drivetrain.config import DataConfig, ModelConfig
from drivetrain.engine.data.blend import BlendedCorpus
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.inspection import inspect_corpus
from drivetrain.engine.data.opening import open_data
from drivetrain.engine.data.prepare import prepare
from drivetrain.engine.data.progress import Progress
from drivetrain.engine.data.remote import inputs
from drivetrain.engine.data.remote.cache import RemoteCache, key_of
from drivetrain.engine.data.remote.inputs import bring_corpus, bring_input
from drivetrain.engine.data.remote.refusals import what_to_set
from drivetrain.engine.data.remote.store import Refused, RemoteFile, Retries, Store, is_url
from drivetrain.engine.data.remote.transfer import bring
from drivetrain.errors import DataError, EnvironmentFault
from drivetrain.measure.corpora import transform_key

MemoryFileSystem = pytest.importorskip("fsspec.implementations.memory").MemoryFileSystem
WriteCorpus = Callable[..., str]
URL = "memory://bucket/corpora/mine"
LARGE = 1 << 40


class Remote:
    """A store in memory that counts what is read, and fails where it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files = MemoryFileSystem()
        self.reads: list[tuple[str, int]] = []
        self.faults: list[Exception | int] = []
        self.fails_always = False
        self.waits: list[float] = []
        self.retries = Retries(attempts=4, sleep=self.waits.append)
        genuine = MemoryFileSystem.cat_file

        def cat_file(files: Any, path: str, start: int | None = None, end: int | None = None) -> bytes:
            self.reads.append((path.rpartition("/")[2], start or 0))
            if self.fails_always:
                raise ConnectionError("the wire is cut")
            fault = self.faults.pop(0) if self.faults else None
            if isinstance(fault, Exception):
                raise fault
            data: bytes = genuine(files, path, start=start, end=end)
            return data if fault is None else data[:fault]

        monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)

    def put(self, path: str, data: bytes) -> None:
        self.files.pipe_file(path, data)

    def put_corpus(self, prefix: str, at: str = "/bucket/corpora/mine") -> None:
        for path in Path(prefix).parent.glob(f"{Path(prefix).name}.*"):
            self.put(at + path.name.removeprefix(Path(prefix).name), path.read_bytes())


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> Iterator[Remote]:
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield Remote(monkeypatch)
    MemoryFileSystem.store.clear()


@pytest.fixture
def cache(tmp_path: Path) -> RemoteCache:
    return RemoteCache(tmp_path / "cache", LARGE)


@pytest.fixture
def prefix(write_corpus: WriteCorpus) -> str:
    return write_corpus([range(start, start + 7) for start in range(0, 91, 7)])


def test_what_a_url_is() -> None:
    assert all(map(is_url, ("s3://a/b", "memory://a", "http://a", "file:///a/b")))
    assert not any(map(is_url, ("corpora/mine", "/a/b", "C://a", "0.3 s3://a", Path("s3://a"))))


def test_a_corpus_by_url_is_the_corpus_and_comes_once(
    remote: Remote, cache: RemoteCache, prefix: str
) -> None:
    remote.put_corpus(prefix)
    for reads in (2, 0):
        remote.reads.clear()
        brought = bring_corpus(URL, cache, retries=remote.retries)
        corpus = Corpus.open(brought.path, vocab_size=100)
        local = Corpus.open(prefix, vocab_size=100)
        assert corpus.fingerprint == local.fingerprint
        assert np.array_equal(corpus.reader.tokens, local.reader.tokens)
        assert len(remote.reads) == reads
        brought.close()


def test_facts_and_tokenizer_come_along(remote: Remote, cache: RemoteCache, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("some text to learn from " * 50)
    prepare([tmp_path / "x.txt"], tmp_path / "made", vocab_size=270)
    remote.put_corpus(str(tmp_path / "made"))
    brought = bring_corpus(URL, cache)
    assert Corpus.open(brought.path).meta == Corpus.open(tmp_path / "made").meta
    assert content(brought.path) == content(tmp_path / "made")
    brought.close()
    remote.put("/other/train.bin", np.array([5, 6, 7], "<u2").tobytes())
    remote.put("/other/tokenizer.json", b"{}")
    brought = bring_corpus("memory://other/train.bin", cache)
    assert sorted(path.name for path in brought.path.parent.iterdir()) == ["tokenizer.json", "train.bin"]
    brought.close()


def test_requests_that_fail_or_bring_too_little_are_tried_again_after_longer_and_longer_waits(
    remote: Remote, cache: RemoteCache, prefix: str
) -> None:
    remote.put_corpus(prefix)
    remote.faults = [ConnectionError("reset"), 3, TimeoutError()]
    said: list[Progress] = []
    brought = bring_corpus(URL, cache, said.append, remote.retries)
    assert Path(f"{brought.path}.bin").read_bytes() == Path(f"{prefix}.bin").read_bytes()
    assert remote.waits == [0.5, 1.0, 2.0]
    phases = " ".join(one.phase for one in said)
    assert "ConnectionError: reset" in phases
    assert "3 bytes came instead of" in phases
    assert "trying again in 2 s" in phases
    brought.close()


def test_a_transfer_that_was_ended_goes_on_where_it_was(remote: Remote, tmp_path: Path) -> None:
    data = bytes(range(256)) * 40
    remote.put("/big", data)
    store = Store("memory://big", remote.retries)
    file = store.file(store.path)
    assert file is not None
    target, notes = tmp_path / "big", tmp_path / "notes"

    def go() -> None:
        bring(store, file, target, notes, None, lambda _: None, part_bytes=1000)

    remote.faults = [1000, 1000, 1000, *[ConnectionError("cut")] * 4]
    with pytest.raises(EnvironmentFault, match=r"byte 3,000 on failed 4 times, the last time with: .*cut"):
        go()
    assert not target.exists()
    remote.reads.clear()
    go()
    assert target.read_bytes() == data
    assert [start for _, start in remote.reads] == list(range(3000, len(data), 1000))
    remote.reads.clear()
    go()
    assert not remote.reads


def test_of_another_version_nothing_is_used(remote: Remote, tmp_path: Path) -> None:
    target, notes = tmp_path / "big", tmp_path / "notes"
    for content_of in (b"a" * 3000, b"b" * 3000):
        remote.put("/big", content_of)
        store = Store("memory://big", remote.retries)
        file = store.file(store.path)
        assert file is not None
        remote.faults = [1000, *[ConnectionError("cut")] * 4]
        with pytest.raises(EnvironmentFault):
            bring(store, file, target, notes, None, lambda _: None, part_bytes=1000)
    bring(store, file, target, notes, None, lambda _: None, part_bytes=1000)
    assert target.read_bytes() == b"b" * 3000


def test_a_corpus_that_has_changed_is_brought_again(
    remote: Remote, cache: RemoteCache, prefix: str, write_corpus: WriteCorpus
) -> None:
    remote.put_corpus(prefix)
    bring_corpus(URL, cache).close()
    remote.put_corpus(write_corpus([[1, 2, 3]] * 13, name="other"))
    brought = bring_corpus(URL, cache)
    assert Corpus.open(brought.path, vocab_size=100).reader.num_tokens == 39
    brought.close()


def test_what_is_all_here_is_used_where_the_store_does_not_answer(
    remote: Remote, cache: RemoteCache, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put_corpus(prefix)
    bring_corpus(URL, cache).close()

    def info(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    said: list[Progress] = []
    bring_corpus(URL, cache, said.append, remote.retries).close()
    assert any("what was brought before is used" in one.phase for one in said)
    with pytest.raises(EnvironmentFault, match="no route"):
        bring_corpus("memory://bucket/others", cache, retries=remote.retries)


@pytest.mark.parametrize("where", ["/bucket/corpora/SHA256SUMS", "/bucket/corpora/mine.sha256"])
def test_a_list_of_checksums_is_held_against_what_comes(
    remote: Remote, cache: RemoteCache, prefix: str, where: str
) -> None:
    remote.put_corpus(prefix)
    right = hashlib.sha256(Path(f"{prefix}.bin").read_bytes()).hexdigest()
    remote.put(where, f"{'0' * 64} *mine.bin\n".encode())
    with pytest.raises(DataError, match=f"has SHA-256 {right}, and its list of checksums says 000"):
        bring_corpus(URL, cache)
    remote.put(where, f"\n{right}  ./mine.bin\n{'1' * 64}  something else\n".encode())
    bring_corpus(URL, cache).close()
    remote.put(where, f"{'1' * 64}  a\n{'1' * 64}  a\n".encode())
    said: list[Progress] = []
    bring_corpus(URL, cache, said.append).close()
    assert any("names none of the files that are wanted: it verifies nothing" in one.phase for one in said)
    remote.put(where, f"{right}  mine.bin\n{'1' * 64}  mine.bin\n".encode())
    with pytest.raises(DataError, match=r"line 2: another SHA-256 of 'mine\.bin' was given before"):
        bring_corpus(URL, cache)
    remote.put(where, b"no list\n")
    with pytest.raises(DataError, match="line 1: expected a SHA-256 and a name, found 'no list'"):
        bring_corpus(URL, cache)


def test_one_process_brings_and_the_others_wait(remote: Remote, cache: RemoteCache, prefix: str) -> None:
    remote.put_corpus(prefix)
    said: list[Progress] = []
    found: list[Path] = []

    def one() -> None:
        brought = bring_corpus(URL, cache, said.append)
        found.append(brought.path)
        brought.close()

    threads = [threading.Thread(target=one) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(found) == 6
    assert sorted(remote.reads) == [("mine.bin", 0), ("mine.idx", 0)]


def test_the_bound_is_kept_and_what_is_in_use_stays(remote: Remote, tmp_path: Path) -> None:
    for number in range(4):
        remote.put(f"/bucket/{number}.txt", b"x" * 1000)
    cache = RemoteCache(tmp_path / "cache", 4000)
    urls = [f"memory://bucket/{number}.txt" for number in range(4)]
    held = bring_input(urls[0], cache)
    for age, url in enumerate(urls[:3]):
        bring_input(url, cache).close()
        os.utime(cache.folder / key_of(url), (age, age))
    # Three entries of 1000 bytes and what is noted of them: a fourth needs room.
    bring_input(urls[3], cache).close()
    there = [url for url in urls if (cache.folder / key_of(url)).is_dir()]
    assert urls[0] in there
    assert urls[1] not in there, "the one used least recently of those that nobody uses"
    assert held.path.read_bytes() == b"x" * 1000
    small = RemoteCache(tmp_path / "small", 1500)
    kept = bring_input(urls[0], small)
    with pytest.raises(EnvironmentFault, match=r"do not fit into .* that are in use"):
        bring_input(urls[1], small)
    kept.close()
    bring_input(urls[1], small).close()
    with pytest.raises(
        EnvironmentFault, match=r"has 1,000 bytes, and .* may hold 999: raise data.remote_cache_bytes"
    ):
        bring_input(urls[0], RemoteCache(tmp_path / "tiny", 999))
    held.close()


def test_two_that_come_at_once_keep_the_bound_together(remote: Remote, tmp_path: Path) -> None:
    remote.put("/bucket/a.txt", b"x" * 3000)
    remote.put("/bucket/b.txt", b"x" * 3000)
    cache = RemoteCache(tmp_path / "cache", 5000)
    failed: list[str] = []

    def bring_the_other(progress: Progress) -> None:
        if progress.phase == "bringing a.txt" and not progress.done:
            with pytest.raises(EnvironmentFault, match="beside 3,000 bytes that are in use"):
                bring_input("memory://bucket/b.txt", cache)
            failed.append("b.txt")

    bring_input("memory://bucket/a.txt", cache, bring_the_other).close()
    assert failed == ["b.txt"]


def test_what_is_missing_is_said(remote: Remote, cache: RemoteCache, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="memory://bucket/nothing does not exist"):
        bring_corpus("memory://bucket/nothing", cache)
    remote.put("/bucket/half.bin", b"ab")
    with pytest.raises(DataError, match=r"half\.idx does not exist: an indexed corpus has both"):
        bring_corpus("memory://bucket/half", cache)
    with pytest.raises(DataError, match="nonsense"):
        bring_corpus("nonsense://bucket/x", cache)
    remote.put("/bucket/gone.txt", b"text")
    remote.faults = [FileNotFoundError("gone")]
    with pytest.raises(DataError, match=r"gone\.txt was there, and is not any more"):
        bring_input("memory://bucket/gone.txt", cache)
    genuine = builtins.__import__

    def without_fsspec(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.startswith("fsspec"):
            raise ImportError(name)
        return genuine(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without_fsspec)
    with pytest.raises(EnvironmentFault, match=r"through fsspec: pip install 'drivetrain\[remote\]'"):
        bring_corpus(URL, cache)


def test_a_protocol_whose_package_is_missing_names_it(cache: RemoteCache) -> None:
    from fsspec.registry import register_implementation

    # As `s3` is known to fsspec on a machine without s3fs.
    register_implementation(
        "drivetrain-test", "no_such_package.Files", clobber=True, errtxt="Install s3fs to access S3"
    )
    with pytest.raises(EnvironmentFault, match="Install s3fs"):
        bring_corpus("drivetrain-test://bucket/x", cache)


def test_a_file_is_not_put_outside_of_its_folder(
    remote: Remote, cache: RemoteCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    wicked = {"/bucket/in/../../x": {"name": "/bucket/in/../../x", "size": 1, "type": "file"}}
    remote.put("/bucket/in/a.txt", b"a")
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: wicked)
    with pytest.raises(DataError, match="names a file outside of itself"):
        bring_input("memory://bucket/in", cache)


def test_inputs_by_url_give_the_bytes_of_the_same_inputs_here(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "home"))
    (tmp_path / "in" / "deep").mkdir(parents=True)
    texts = {"b.txt": b"one text", "deep/a.txt": b"another text", "c.jsonl": b'{"text": "of a line"}\n'}
    for name, data in texts.items():
        (tmp_path / "in" / name).write_bytes(data)
        remote.put(f"/bucket/in/{name}", data)
    byte_tokenizer().save(str(tmp_path / "t.json"))
    arguments: dict[str, Any] = {"tokenizer_path": tmp_path / "t.json"}
    prepare([tmp_path / "in", tmp_path / "in" / "c.jsonl"], tmp_path / "here", **arguments)
    urls = ["memory://bucket/in", "memory://bucket/in/c.jsonl"]
    meta = prepare(urls, tmp_path / "there", **arguments)
    assert meta.sources == tuple(urls)
    expected, found = content(tmp_path / "here"), content(tmp_path / "there")
    assert {one: found[one] for one in (".bin", ".idx")} == {one: expected[one] for one in (".bin", ".idx")}
    assert meta.skipped == {}


def test_a_run_reads_urls_mixed_and_with_a_transform_applied_once(
    remote: Remote, tmp_path: Path, write_corpus: WriteCorpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_corpus([range(start, start + 10) for start in range(0, 200, 10)], 500, "first")
    second = write_corpus([range(start, start + 30) for start in range(200, 500, 30)], 500, "second")
    for name, one in (("first", first), ("second", second)):
        remote.put_corpus(one, f"/bucket/{name}")
    where = {"remote_cache_path": str(tmp_path / "kept")}
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=500, seq_length=9)
    urls = "1 memory://bucket/first 3 memory://bucket/second"
    blend = open_data(DataConfig.model_validate({"data_path": urls, **where}), model)
    local = open_data(DataConfig(data_path=f"1 {first} 3 {second}"), model)
    assert isinstance(blend, BlendedCorpus)
    assert blend.fingerprint == local.fingerprint
    transform = "data_transforms:double_small"
    path = f"memory://bucket/first.baked-{transform_key(transform)}"
    baked = open_data(DataConfig.model_validate({"data_path": path, "transform": transform, **where}), model)
    assert baked.reader.tokens.tolist() == [number % 100 * 2 for number in range(200)]
    assert Path(baked.prefix).is_relative_to(tmp_path / "kept")
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "home"))
    document = inspect_corpus("memory://bucket/first")
    assert (document["prefix"], document["tokens"]) == ("memory://bucket/first", 200)
    with pytest.raises(EnvironmentFault, match="--cache-bytes"):
        inspect_corpus("memory://bucket/second", cache_bytes=10)


def test_a_corpus_is_held_as_long_as_its_reader_lives(remote: Remote, tmp_path: Path, prefix: str) -> None:
    remote.put_corpus(prefix)
    remote.put("/bucket/large.txt", b"x" * 4000)
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=100, seq_length=9)
    data = DataConfig.model_validate({"data_path": URL, "remote_cache_path": str(tmp_path / "kept")})
    corpus = open_data(data, model)
    other = RemoteCache(tmp_path / "kept", 4001)
    with pytest.raises(EnvironmentFault, match="in use"):
        bring_input("memory://bucket/large.txt", other)
    del corpus
    bring_input("memory://bucket/large.txt", other).close()
    assert not (tmp_path / "kept" / key_of(URL)).exists()


def test_what_the_store_has_no_more_is_not_read_here(remote: Remote, cache: RemoteCache) -> None:
    deep = "/".join(["a-folder-with-a-long-name"] * 12) + "/c.txt"
    for name in ("a.txt", "b.txt", "x/y.txt", "x%y.txt", deep):
        remote.put(f"/bucket/in/{name}", name.encode())
    brought = bring_input("memory://bucket/in", cache)
    assert (brought.path / "x" / "y.txt").read_text() == "x/y.txt"
    assert (brought.path / "x%y.txt").read_text() == "x%y.txt"
    assert (brought.path / deep).read_text() == deep
    brought.close()
    remote.reads.clear()
    remote.files.rm_file("/bucket/in/b.txt")
    brought = bring_input("memory://bucket/in", cache)
    assert sorted(path.name for path in brought.path.glob("*.txt")) == ["a.txt", "x%y.txt"]
    assert not remote.reads
    brought.close()


def test_what_was_baked_from_a_corpus_that_has_changed_is_made_again(
    remote: Remote, tmp_path: Path, write_corpus: WriteCorpus
) -> None:
    transform = "data_transforms:double_small"
    path = f"memory://bucket/first.baked-{transform_key(transform)}"
    where = {"remote_cache_path": str(tmp_path / "kept")}
    model = ModelConfig(num_layers=1, hidden_size=8, num_attention_heads=1, vocab_size=500, seq_length=9)
    for number in (3, 5):
        remote.put_corpus(write_corpus([[number] * 50] * 4, 500, f"of{number}"), "/bucket/first")
        data = DataConfig.model_validate({"data_path": path, "transform": transform, **where})
        baked = open_data(data, model)
        assert set(baked.reader.tokens.tolist()) == {2 * number}
        del baked


def test_a_file_that_changes_between_its_parts_is_not_taken(remote: Remote, tmp_path: Path) -> None:
    remote.put("/big", b"a" * 2500)
    store = Store("memory://big", remote.retries)
    file = store.file(store.path)
    assert file is not None

    def change(progress: Progress) -> None:
        if progress.done == 1000:
            remote.put("/big", b"b" * 2500)

    target = tmp_path / "big"
    with pytest.raises(DataError, match="has changed while it was brought"):
        bring(store, file, target, tmp_path / "notes", None, change, part_bytes=1000)
    assert not target.exists()
    changed = store.file(store.path)
    assert changed is not None
    bring(store, changed, target, tmp_path / "notes", None, lambda _: None, part_bytes=1000)
    assert target.read_bytes() == b"b" * 2500
    # Of a folder's listing, which tells versions in another way than a file's own facts.
    listed = RemoteFile(changed.path, changed.size, "0" * 64)
    bring(store, listed, tmp_path / "b", tmp_path / "notes-b", None, lambda _: None, part_bytes=1000)
    assert (tmp_path / "b").read_bytes() == b"b" * 2500


@pytest.mark.parametrize("url", ["https://me:secret@host/x", "zip://a::ftp://me:secret@host/x.zip"])
def test_a_password_in_a_url_is_refused_and_not_repeated(cache: RemoteCache, url: str) -> None:
    with pytest.raises(DataError, match="a URL holds a password") as caught:
        bring_input(url, cache)
    assert "secret" not in str(caught.value)


def test_wrong_urls_are_said_by_name(remote: Remote, cache: RemoteCache, tmp_path: Path) -> None:
    remote.put("/bucket/in/a.txt", b"a")
    with pytest.raises(
        DataError, match=r"memory://bucket/in is no corpus: there is no in\.bin with an in\.idx"
    ):
        bring_corpus("memory://bucket/in", cache)
    (tmp_path / "a.txt").write_text("no archive")
    with pytest.raises(EnvironmentFault, match=r"zip://x::file://.*/a.txt cannot be read: BadZipFile"):
        bring_input(f"zip://x::file://{tmp_path}/a.txt", cache)
    with pytest.raises(DataError, match=r"ends with '\.\.', which is no name"):
        bring_input("memory://bucket/in/..", cache)
    brought = bring_input(f"file://{tmp_path}/a.txt", cache, retries=Retries(attempts=1))
    assert brought.path.read_text() == "no archive"
    brought.close()


class _Answered(OSError):
    """As libraries of protocols raise it: with the status of an answer."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}, message='...'")
        self.status = status


class NoCredentialsError(Exception):
    """Named as botocore names it."""


def _as_fsspec_says_of_http(path: str, status: int) -> FileNotFoundError:
    error = FileNotFoundError(path)
    error.__cause__ = _Answered(status)
    return error


REFUSALS = [
    PermissionError("Access Denied"),
    NoCredentialsError("Unable to locate credentials"),
    _Answered(403),
    *(_as_fsspec_says_of_http("/x", status) for status in (401, 403, 407)),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=repr)
@pytest.mark.parametrize("bring_it", [bring_corpus, bring_input])
def test_what_the_store_refuses_is_not_missing(
    remote: Remote,
    cache: RemoteCache,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Exception,
    bring_it: Callable[..., Any],
) -> None:
    remote.put("/bucket/corpora/mine", b"text")

    def info(*_: object, **__: object) -> None:
        raise refusal

    monkeypatch.setattr(MemoryFileSystem, "info", info)
    with pytest.raises(
        Refused, match=r"looking for .* is refused \(.*give its credentials as FSSPEC_MEMORY_"
    ):
        bring_it(URL, cache, retries=remote.retries)
    assert remote.waits == [], "the same answer would come again"


def test_a_file_that_may_be_looked_for_and_not_read_is_refused(remote: Remote, cache: RemoteCache) -> None:
    remote.put("/bucket/a.txt", b"text")
    remote.faults = [_Answered(403)]
    with pytest.raises(Refused, match=r"reading /bucket/a.txt from byte 0 on is refused \(_Answered: 403"):
        bring_input("memory://bucket/a.txt", cache, retries=remote.retries)


def test_answers_that_stay_the_same_are_not_waited_for(remote: Remote, cache: RemoteCache) -> None:
    remote.put("/bucket/a.txt", b"text")
    remote.faults = [_Answered(429), _Answered(503), _Answered(416)]
    with pytest.raises(EnvironmentFault, match=r"from byte 0 on is not possible: _Answered: 416"):
        bring_input("memory://bucket/a.txt", cache, retries=remote.retries)
    assert remote.waits == [0.5, 1.0]


def test_lists_that_a_store_refuses_are_taken_as_not_there_and_said_so(
    remote: Remote, cache: RemoteCache, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put_corpus(prefix)
    genuine = MemoryFileSystem.info

    def info(files: Any, path: str, **keywords: Any) -> Any:
        if not files.exists(path):
            # As a bucket answers whose files may be read, and not listed.
            raise PermissionError("Forbidden")
        return genuine(files, path, **keywords)

    monkeypatch.setattr(
        MemoryFileSystem, "exists", lambda files, path: files._strip_protocol(path) in files.store
    )
    monkeypatch.setattr(MemoryFileSystem, "info", info)
    said: list[Progress] = []
    bring_corpus(URL, cache, said.append).close()
    (one,) = [one.phase for one in said if "cannot be looked for" in one.phase]
    assert all(name in one for name in ("mine.meta.json", "tokenizer.json", "SHA256SUMS", "mine.sha256"))
    remote.files.rm_file("/bucket/corpora/mine.bin")
    with pytest.raises(Refused, match=r"looking for /bucket/corpora/mine\.bin is refused"):
        bring_corpus(URL, RemoteCache(cache.folder.parent / "other", LARGE))


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("s3://b/x", "AWS_PROFILE"),
        ("gcs://b/x", "GOOGLE_APPLICATION_CREDENTIALS"),
        ("abfs://b/x", "AZURE_STORAGE_ACCOUNT_KEY"),
        ("https://h/x", 'FSSPEC_HTTPS=\'{"client_kwargs"'),
        ("simplecache::s3://b/x", "AWS_PROFILE"),
        ("https://h/x?signature=withheld", "expired"),
        ("webdav://h/x", "FSSPEC_WEBDAV_"),
    ],
)
def test_a_refusal_says_what_to_set(url: str, advice: str) -> None:
    assert advice in what_to_set(url)


def test_where_versions_are_not_told_nothing_is_pieced_together(remote: Remote, tmp_path: Path) -> None:
    remote.put("/big", b"a" * 3000)
    store = Store("memory://big", remote.retries)
    known = store.file(store.path)
    assert known is not None
    file = replace(known, versioned=False)
    target, notes = tmp_path / "big", tmp_path / "notes"
    remote.faults = [1000, *[ConnectionError("cut")] * 4]
    with pytest.raises(EnvironmentFault):
        bring(store, file, target, notes, None, lambda _: None, part_bytes=1000)
    remote.reads.clear()
    bring(store, file, target, notes, None, lambda _: None, part_bytes=1000)
    assert [start for _, start in remote.reads] == [0, 1000, 2000]


def test_a_store_that_tells_sizes_alone_is_said_so(
    remote: Remote, cache: RemoteCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote.put("/bucket/a.txt", b"text")
    monkeypatch.setattr(
        MemoryFileSystem, "info", lambda *_, **__: {"name": "/bucket/a.txt", "size": 4, "type": "file"}
    )
    monkeypatch.setattr(inputs, "_checksums", lambda *_: {})
    said: list[Progress] = []
    bring_input("memory://bucket/a.txt", cache, said.append).close()
    assert any("tells sizes alone of a.txt" in one.phase for one in said)


class _Site(BaseHTTPRequestHandler):
    """Pages of folders, and files, without parts of files."""

    pages: ClassVar[dict[str, bytes]] = {}
    codes: ClassVar[dict[str, int]] = {}

    def do_GET(self) -> None:
        path = self.path if self.path in self.pages else f"{self.path}/"
        if path not in self.pages:
            self.send_error(self.codes.get(self.path, 404))
            return
        self.send_response(200 if path == self.path else 301)
        self.send_header("Location", path)
        self.send_header("Content-Type", "text/html" if path.endswith("/") else "text/plain")
        self.send_header("Content-Length", str(len(self.pages[path])))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(self.pages[path])

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


@pytest.fixture
def site() -> Iterator[str]:
    pytest.importorskip("aiohttp")
    _Site.pages = {
        "/in/": b'<a href="?C=N">Name</a> <a href="a.txt">a</a> <a href="deep/">deep</a>',
        "/in/deep/": b'<a href="/in/">up</a> <a href="b.txt">b</a>',
        "/in/a.txt": b"text of a",
        "/in/deep/b.txt": b"text of b",
    }
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("slash", ["", "/"])
def test_a_folder_over_http_is_what_its_pages_link_to(cache: RemoteCache, site: str, slash: str) -> None:
    brought = bring_input(f"{site}/in{slash}", cache, retries=Retries(attempts=1))
    files = {
        path.relative_to(brought.path).as_posix(): path.read_text()
        for path in brought.path.rglob("*")
        if path.is_file()
    }
    assert files == {"a.txt": "text of a", "deep/b.txt": "text of b"}
    brought.close()
    del _Site.pages["/in/deep/"]
    with pytest.raises(DataError, match="was there, and is not any more"):
        bring_input(f"{site}/in", cache, retries=Retries(attempts=1))


def test_of_a_whole_site_nothing_is_asked_of_another_one(cache: RemoteCache, site: str) -> None:
    _Site.pages["/"] = b'<a href="in/">in</a>'
    # What is beside it would be a host of the name SHA256SUMS, or one that ends with .idx.
    brought = bring_input(site, cache, retries=Retries(attempts=1))
    assert (brought.path / "in" / "deep" / "b.txt").read_text() == "text of b"
    brought.close()
    with pytest.raises(DataError, match="is no corpus"):
        bring_corpus(site, cache, retries=Retries(attempts=1))


def test_a_web_server_that_does_not_answer_is_no_missing_file(cache: RemoteCache, site: str) -> None:
    waits: list[float] = []
    retries = Retries(attempts=3, sleep=waits.append)
    with pytest.raises(DataError, match="does not exist"):
        bring_input(f"{site}/nothing", cache, retries=retries)
    assert not waits
    with pytest.raises(EnvironmentFault, match="failed 3 times, the last time with: ClientConnectorError"):
        bring_input("http://127.0.0.1:9/x.txt", cache, retries=retries)
    assert waits == [0.5, 1.0]


@pytest.mark.parametrize("status", [401, 403])
def test_a_web_server_that_refuses_is_said_so(
    cache: RemoteCache, site: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Site, "codes", {"/in/secret.txt": status, "/in/secret.txt?sig=SECRET": status})
    waits: list[float] = []
    retries = Retries(attempts=3, sleep=waits.append)
    with pytest.raises(Refused, match=rf"is refused \(.*{status}.*FSSPEC_HTTP=.*DRIVETRAIN_SIGNED_URLS"):
        bring_input(f"{site}/in/secret.txt", cache, retries=retries)
    with pytest.raises(Refused, match="wrong or has expired") as caught:
        bring_input(f"{site}/in/secret.txt?sig=SECRET", cache, retries=retries)
    assert "SECRET" not in str(caught.value)
    assert not waits


def test_a_signed_address_of_one_file_is_read(cache: RemoteCache, site: str) -> None:
    _Site.pages["/in/signed.txt?X-Amz-Signature=a/b"] = b"signed"
    brought = bring_input(f"{site}/in/signed.txt?X-Amz-Signature=a/b", cache, retries=Retries(attempts=1))
    assert brought.path.name == "signed.txt"
    assert brought.path.read_bytes() == b"signed"
    brought.close()


class _Careless(_Site):
    """A file is served whatever its query is, and an unknown one with a query is no good request."""

    def do_GET(self) -> None:
        self.path, mark, _ = self.path.partition("?")
        if mark and self.path not in self.pages:
            self.send_error(400)
        else:
            super().do_GET()

    do_HEAD = do_GET


def test_a_query_without_a_secret_belongs_to_the_address_and_not_to_the_name(
    cache: RemoteCache, site: str, prefix: str
) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Careless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        host = f"http://127.0.0.1:{server.server_port}"
        _Site.pages["/in/ids.parquet"] = b"PAR1..."
        for ending in (".bin", ".idx"):
            _Site.pages[f"/in/mine{ending}"] = Path(prefix + ending).read_bytes()
        said: list[Progress] = []
        # Its own bytes came as its index, its tokens and its list of checksums.
        brought = bring_corpus(
            f"{host}/in/ids.parquet?download=true", cache, said.append, Retries(attempts=1)
        )
        assert brought.path.name == "ids.parquet"
        assert sorted(path.name for path in brought.path.parent.iterdir()) == ["ids.parquet"]
        assert any("taken as not there" in one.phase for one in said)
        brought.close()
        brought = bring_corpus(f"{host}/in/mine?v=1", cache, retries=Retries(attempts=1))
        assert Corpus.open(brought.path, vocab_size=100).reader.num_tokens == 91
        brought.close()
    finally:
        server.shutdown()
        server.server_close()


def test_a_slash_before_a_query_is_kept(
    cache: RemoteCache, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def do_get(page: _Site) -> None:
        asked.append(page.path)
        found = page.path == "/get/?file=a.txt"
        page.send_response(200 if found else 404)
        page.send_header("Content-Type", "text/plain")
        page.send_header("Content-Length", "4" if found else "0")
        page.end_headers()
        if found and page.command == "GET":
            page.wfile.write(b"text")

    monkeypatch.setattr(_Site, "do_GET", do_get)
    monkeypatch.setattr(_Site, "do_HEAD", do_get)
    brought = bring_input(f"{site}/get/?file=a.txt", cache, retries=Retries(attempts=1))
    assert brought.path.read_bytes() == b"text"
    assert "/get/?file=a.txt" in asked
    brought.close()


def test_a_web_server_without_parts_of_files_is_said_so(site: str, tmp_path: Path) -> None:
    store = Store(f"{site}/in/a.txt", Retries(attempts=1))
    file = store.file(store.path)
    assert file is not None
    with pytest.raises(EnvironmentFault, match="sends all of a file where a part is asked for"):
        bring(store, file, tmp_path / "a", tmp_path / "notes", None, lambda _: None, part_bytes=4)
