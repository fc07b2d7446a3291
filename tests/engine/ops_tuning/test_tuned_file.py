"""The tuned file: written, read back, looked up in, and refused."""

import hashlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_recording import tiny
from tuning_examples import norm_call

from drivetrain.engine.devices import select_device
from drivetrain.engine.memory.host import HostAllocator, look_at_allocator
from drivetrain.engine.operators_of_run import _tuned_file
from drivetrain.engine.ops import _operator_code, rms_norm
from drivetrain.engine.ops._operator_code import operator_code
from drivetrain.engine.ops._tuned_environment import allocator_text
from drivetrain.engine.ops._tuned_key import key_of
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.ops.tuned_file import (
    Candidate,
    Entry,
    TunedFile,
    environment_here,
    parse_entries,
    tuned_path,
)
from drivetrain.engine.ops_tuning.writing import to_text, write_tuned
from drivetrain.engine.parallel.process_group import ProcessGroup, Ranks
from drivetrain.errors import DrivetrainError, EnvironmentFault
from rank_processes import on_ranks

CODE = operator_code("drivetrain.engine.ops.rms_norm")
HERE = {"device": "a processor", "torch": "2.13.0"}


def entry(tokens: int = 24, backend: str = "inductor", **changes: Any) -> Entry:
    known = {
        "operator": "rms_norm",
        "call": key_of(norm_call()).call,
        "tokens": tokens,
        "code": CODE,
        "backend": backend,
        "calls_per_step": 3.0,
        "candidate": (Candidate(backend="eager", seconds=0.5, spread=0.01),),
    }
    return Entry(**{**known, **changes})


def written(path: Path, *entries: Entry, environment: Mapping[str, str] = HERE) -> Path:
    file = path / "ops.tuned.toml"
    write_tuned(file, environment, entries)
    return file


_texts = st.text(min_size=1, max_size=12)
_figures = st.floats(min_value=1e-9, max_value=1e9, allow_nan=False)
_candidates = st.builds(
    Candidate,
    backend=_texts,
    rejected=st.none() | st.text(max_size=20),
    seconds=st.none() | _figures,
    spread=st.none() | _figures,
    peak_bytes=st.none() | st.integers(0, 2**50),
    error=st.none() | _figures,
    allowed=st.none() | _figures,
    worst=st.none() | _texts,
)
_entries = st.builds(
    Entry,
    operator=_texts,
    call=_texts,
    tokens=st.integers(0, 2**40),
    code=_texts,
    backend=_texts,
    reason=st.text(max_size=20),
    calls_per_step=_figures,
    graded_tokens=st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
    documents=st.lists(st.integers(0, 10**6), max_size=3).map(tuple),
    candidate=st.lists(_candidates, max_size=3).map(tuple),
)


@given(
    environment=st.dictionaries(_texts, st.text(max_size=12), max_size=4),
    entries=st.lists(_entries, max_size=3, unique_by=lambda one: one.name),
)
def test_what_is_written_is_read_back_and_the_order_does_not_show(
    environment: dict[str, str], entries: list[Entry]
) -> None:
    text = to_text(environment, entries)
    assert text == to_text(dict(reversed(environment.items())), reversed(entries))
    made_in, found = parse_entries(text.encode(), Path("file"))
    assert made_in == environment
    assert sorted(found, key=lambda one: one.name) == sorted(entries, key=lambda one: one.name)


@given(content=st.binary(max_size=60) | st.text(alphabet='[]entry="\n 1.#', max_size=60).map(str.encode))
def test_whatever_else_a_file_holds_is_one_message(content: bytes) -> None:
    with pytest.raises(DrivetrainError, match="file"):
        parse_entries(content, Path("file"))


def test_a_call_that_was_measured_has_its_choice_and_others_that_of_the_nearest_in_their_bucket(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, entry(24, "inductor"), entry(18, "triton"), entry(300, "eager"))
    found = TunedFile.read(file, environment=HERE)
    assert found.problems == ()
    chosen = {tokens: found.backend_for(norm_call(tokens)) for tokens in (24, 18, 17, 20, 22, 32, 257, 512)}
    assert chosen == {
        24: "inductor",
        18: "triton",
        17: "triton",
        20: "triton",
        22: "inductor",
        32: "inductor",
        257: "eager",
        512: "eager",
    }
    assert found.misses == Counter()


def test_a_call_outside_of_every_bucket_has_none_and_is_counted(tmp_path: Path) -> None:
    found = TunedFile.read(written(tmp_path, entry(24)), environment=HERE)
    for tokens in (16, 33, 33):
        assert found.backend_for(norm_call(tokens)) is None
    assert found.backend_for(norm_call(24, width=17)) is None
    assert sum(found.misses.values()) == 4
    assert found.misses[f"{key_of(norm_call()).call}; 33 tokens"] == 2


def test_the_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    file = written(tmp_path, entry())
    assert TunedFile.read(file, environment=HERE).hash == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_selection_asks_it(tmp_path: Path) -> None:
    found = TunedFile.read(written(tmp_path, entry(24, "eager")), environment=HERE)
    selection = Selection(tuned=found.backend_for)
    choice = selection.choose(rms_norm.OPERATOR, norm_call(24))
    assert (choice.backend.name, choice.reason) == ("eager", "tuned")
    assert selection.choose(rms_norm.OPERATOR, norm_call(99)).reason is None


def test_a_compiled_caller_is_served_by_it(tmp_path: Path) -> None:
    found = TunedFile.read(written(tmp_path, entry(24, "eager")), environment=HERE)
    selection = Selection(requested={"rms_norm": "auto"}, tuned=found.backend_for)

    def block(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        out = selection.call(rms_norm.OPERATOR, x=x, weight=weight, epsilon=1e-5)
        assert isinstance(out, torch.Tensor)
        return out * 2.0

    x, weight = torch.randn(24, 16, requires_grad=True), torch.ones(16, requires_grad=True)
    expected = block(x, weight)
    compiled = torch.compile(block, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, weight), expected)


@pytest.mark.parametrize("allow_stale", [False, True])
def test_a_file_of_another_machine_or_version_is_not_used_and_says_what_differs(
    tmp_path: Path, allow_stale: bool
) -> None:
    file = written(tmp_path, entry(), environment={**HERE, "torch": "2.12.0", "cores": "64"})
    found = TunedFile.read(file, environment=HERE, allow_stale=allow_stale)
    assert found.foreign == ("cores: 64 there, none here", "torch: 2.12.0 there, 2.13.0 here")
    assert len(found.problems) == 2
    assert all(str(file) in problem for problem in found.problems)
    assert found.backend_for(norm_call()) == ("inductor" if allow_stale else None)


def test_entries_of_other_code_are_not_used_and_the_rest_is(tmp_path: Path) -> None:
    file = written(tmp_path, entry(24, code="0000"), entry(300))
    found = TunedFile.read(file, environment=HERE)
    assert [one.tokens for one in found.stale] == [24]
    assert "rms_norm has other code now" in found.problems[0]
    assert found.backend_for(norm_call(24)) is None
    assert found.backend_for(norm_call(300)) == "inductor"
    stale = TunedFile.read(file, environment=HERE, allow_stale=True)
    assert stale.backend_for(norm_call(24)) == "inductor"


def test_the_environment_of_this_process_is_the_default(tmp_path: Path) -> None:
    file = written(tmp_path, entry(), environment=environment_here())
    assert TunedFile.read(file).problems == ()
    threads = written(tmp_path, entry(), environment=environment_here(threads=77))
    assert TunedFile.read(threads).foreign == (f"threads: 77 there, {torch.get_num_threads()} here",)


@pytest.mark.parametrize(
    ("seen", "environment", "text"),
    [
        (HostAllocator("glibc 2.36", False), {}, "glibc 2.36"),
        (HostAllocator("glibc 2.36", True), {}, "glibc 2.36, keeps freed memory"),
        (HostAllocator("other", None, "x"), {"LD_PRELOAD": "/lib/libjemalloc.so.2"}, "jemalloc"),
        (HostAllocator(None, None, "x"), {}, "unknown"),
    ],
)
def test_an_allocator_is_described_by_what_it_does(
    seen: HostAllocator, environment: dict[str, str], text: str
) -> None:
    assert allocator_text(seen, environment) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schema = 1\n[environment]\na = \n", "at line 3"),
        ("[environment]\n", "line 1 should be schema = 1"),
        ('schema = 2\n[environment]\na = "1"\n', "newer Drivetrain"),
        ("schema = 1\n[environment]\na = 1\n", "line 2: environment is to be a table of texts"),
        ('schema = 1\nmore = 1\n[environment]\na = "1"\n', "line 2: more is no part of it"),
        ("\xff", "damaged"),
    ],
)
def test_a_damaged_file_is_refused_with_the_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "ops.tuned.toml"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(DrivetrainError, match="ops tune CONFIG") as raised:
        TunedFile.read(file, environment=HERE)
    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("tokens = 300", 'tokens = "many"', "tokens: Input should be a valid integer"),
        ("tokens = 300\n", "", "tokens: Field required"),
        ("tokens = 300", "tokens = 300\ntokns = 3", "tokns: Extra inputs are not permitted"),
        ("tokens = 300", "tokens = 24", "a second entry of one call"),
    ],
)
def test_a_damaged_entry_is_refused_with_the_line_at_which_it_begins(
    tmp_path: Path, before: str, after: str, said: str
) -> None:
    file = written(tmp_path, entry(24), entry(300))
    text = file.read_text()
    line = [number for number, one in enumerate(text.split("\n"), 1) if one == "[[entry]]"][1]
    file.write_text(text.replace(before, after))
    with pytest.raises(DrivetrainError) as raised:
        TunedFile.read(file, environment=HERE)
    assert said in str(raised.value)
    assert f"line {line}" in str(raised.value)


def test_a_file_that_is_not_there_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="drivetrain ops tune CONFIG --output"):
        TunedFile.read(tmp_path / "none.toml")


def test_the_default_lies_beside_the_measured_ceilings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from drivetrain.measure.ceilings import ceilings_path

    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path))
    assert tuned_path().parent == ceilings_path().parent
    assert tuned_path().is_relative_to(tmp_path)


def test_code_is_that_of_the_operator_and_what_it_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "some_operators"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "norm.py").write_text('"""Text."""\nfrom some_operators._helper import x\n')
    (package / "_helper.py").write_text("x = 1\n")
    (package / "other.py").write_text("y = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(_operator_code, "_PACKAGE", "some_operators")

    def code() -> str:
        for cached in ("operator_code", "_files", "_imports", "_essence", "_source"):
            getattr(_operator_code, cached).cache_clear()
        return _operator_code.operator_code("some_operators.norm")

    first = code()
    (package / "other.py").write_text("y = 2\n")
    (package / "norm.py").write_text('"""Other text."""\n# said\nfrom some_operators._helper import x\n')
    assert code() == first
    (package / "_helper.py").write_text("x = 2\n")
    second = code()
    assert second != first
    (package / "_helper.py").write_text("x = 1\n")
    (package / "norm.py").write_text("from some_operators._helper import x\nz = 1\n")
    assert code() not in (first, second)
    code()


def differences_of_a_run(path: str, *overrides: str) -> tuple[str, ...]:
    """Of a file that was made where freed memory is kept, in a process of its own: malloc has no way back."""
    config = tiny("fusion.level=core", f"fusion.tuned_file={path}", "run.device=cpu", *overrides)
    name = look_at_allocator().name
    write_tuned(Path(path), {**environment_here(), "allocator": f"{name}, keeps freed memory"}, ())
    tuned = _tuned_file(config, select_device(config.run), ProcessGroup(Ranks()))
    assert tuned is not None
    return tuned.foreign


@pytest.mark.long
def test_a_run_that_keeps_freed_memory_reads_what_was_tuned_so(tmp_path: Path) -> None:
    if look_at_allocator().keeps_freed is not False:
        pytest.skip("freed memory is kept already, or nobody can tell")
    path = str(tmp_path / "tuned.toml")
    (kept,) = on_ranks(differences_of_a_run, 1, path, "memory.keep_freed_memory=true")
    assert kept == ()
    (given_back,) = on_ranks(differences_of_a_run, 1, path)
    assert given_back[0].startswith("allocator: ")


@pytest.mark.parametrize("operator", ["rms_norm.x", "glue", "../rms_norm"])
def test_an_operator_that_is_not_there_is_said_to_be_none_and_the_rest_is_used(
    tmp_path: Path, operator: str
) -> None:
    path = written(tmp_path, entry(), entry(operator=operator, call="another"))
    found = TunedFile.read(path, environment=HERE)
    assert [one.operator for one in found.stale] == [operator]
    assert found.problems == (
        f"{path}: there is no operator {operator!r} here; 1 of its entries mean nothing",
    )
    assert found.backend_for(norm_call()) == "inductor"
