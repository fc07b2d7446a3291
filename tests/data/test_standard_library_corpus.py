"""The default corpus: prepared once, by one process, and never left half."""

import multiprocessing
import sysconfig
from pathlib import Path

import pytest

from drivetrain.engine.data import standard_library as subject
from drivetrain.engine.data.corpus import Corpus
from drivetrain.engine.data.progress import Progress
from drivetrain.engine.data.standard_library import standard_library_corpus
from drivetrain.errors import DataError
from drivetrain.measure.machine import cache_folder


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path / "lib"
    for name in (
        "os.py",
        "json/decoder.py",
        "test/test_os.py",
        "site-packages/x.py",
        "json/tests/t.py",
        "x.so",
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# {name}\n" * 30)
    (root / "latin.py").write_bytes("# é".encode("latin-1"))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(root))
    return root


def phases(cache: Path, vocab_size: int = 270) -> list[str]:
    heard: list[Progress] = []
    standard_library_corpus(vocab_size, cache, heard.append)
    return [progress.phase for progress in heard]


def test_it_is_the_library_without_tests_and_installed_packages(small_library: Path, tmp_path: Path) -> None:
    corpus = Corpus.open(standard_library_corpus(270, tmp_path / "cache"), vocab_size=270)
    texts = [corpus.require_tokenizer().decode(document.tolist()) for document in corpus.reader]
    assert texts == ["# json/decoder.py\n" * 30, "# os.py\n" * 30]
    assert corpus.meta.skipped == {"files that are no UTF-8 text": 1}


def test_it_is_prepared_on_first_use_only(small_library: Path, tmp_path: Path) -> None:
    assert "encoding" in phases(tmp_path / "cache")
    assert phases(tmp_path / "cache") == []
    assert "encoding" in phases(tmp_path / "cache", 271)


def test_a_rest_of_a_killed_process_is_no_corpus_and_is_cleared(small_library: Path, tmp_path: Path) -> None:
    prefix = Path(standard_library_corpus(270, tmp_path / "cache"))
    whole = prefix.with_name("corpus.bin").read_bytes()
    prefix.with_name("corpus.idx").unlink()
    prefix.with_name("corpus.bin.tmp-99999").write_bytes(b"half")
    assert "encoding" in phases(tmp_path / "cache")
    assert prefix.with_name("corpus.bin").read_bytes() == whole
    assert not list(prefix.parent.glob("*tmp*"))


@pytest.mark.parametrize("name", ["corpus.bin", "corpus.idx", "corpus.meta.json", "corpus.tokenizer.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_copy_is_prepared_again_and_said_so(
    small_library: Path, tmp_path: Path, name: str, damage: str
) -> None:
    prefix = Path(standard_library_corpus(270, tmp_path / "cache"))
    path = prefix.with_name(name)
    whole = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(whole[:-3])
    else:
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    heard = phases(tmp_path / "cache")
    assert "encoding" in heard
    assert (name == "corpus.idx" and damage == "gone") or any("again" in phase for phase in heard)
    assert path.read_bytes() == whole


def _prepare_in_process(cache: str, root: str, found: "multiprocessing.Queue[list[str]]") -> None:
    sysconfig.get_path = lambda name: root  # type: ignore[assignment, misc]
    found.put(phases(Path(cache)))


def test_two_processes_prepare_it_once(small_library: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    found: multiprocessing.Queue[list[str]] = context.Queue()
    arguments = (str(tmp_path / "cache"), str(small_library), found)
    processes = [context.Process(target=_prepare_in_process, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    heard = [found.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    assert sum("encoding" in phases for phases in heard) == 1


def test_a_vocabulary_too_small_for_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"model\.vocab_size = 100 is too small, the smallest is 257"):
        standard_library_corpus(100, tmp_path)


def test_a_machine_without_the_source_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "nothing"))
    with pytest.raises(DataError, match="no Python source"):
        standard_library_corpus(270, tmp_path / "cache")


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRIVETRAIN_CACHE", "/somewhere")
    assert cache_folder() == Path("/somewhere")
    monkeypatch.setenv("DRIVETRAIN_CACHE", "~/elsewhere")
    assert cache_folder() == Path.home() / "elsewhere", "the same folder that ceilings are kept in"
    monkeypatch.delenv("DRIVETRAIN_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "drivetrain"


def test_the_real_library_has_source_on_this_machine() -> None:
    names = [source.path.name for source in subject._standard_library()]
    assert len(names) > 300
    assert "argparse.py" in names
