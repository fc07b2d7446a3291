"""``drivetrain data``: one document on stdout, progress on stderr, bad input refused in one message."""

import json
import re
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from drivetrain.cli.data import register
from drivetrain.errors import DataError, DrivetrainError


def run(*arguments: object) -> tuple[str, str]:
    app = typer.Typer()
    register(app)
    # A second command keeps typer from dropping the verb's name.
    app.command("other")(lambda: None)
    result = CliRunner().invoke(app, ["data", *map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout, result.stderr


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    for index in range(4):
        (tmp_path / "in" / f"{index}.txt").write_text(
            f"document number {index}: some text to learn from\n" * 9
        )
    (tmp_path / "in" / "empty.txt").write_text("")
    return tmp_path / "in"


def test_prepare_prints_one_document_and_keeps_progress_off_stdout(text: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "new" / "corpus"
    stdout, stderr = run("prepare", text, "--output", prefix, "--vocab-size", 270, "--json")
    document = json.loads(stdout)
    assert document["schema"] == 1
    assert document["prefix"] == str(prefix)
    assert document["documents"] == 4
    assert document["vocab_size"] == 270
    assert document["skipped"] == {"empty documents": 1}
    assert "encoding" in stderr


def test_prepare_says_what_was_made_left_out_and_how_to_use_it(text: Path, tmp_path: Path) -> None:
    stdout, _ = run("prepare", text, "--output", tmp_path / "c", "--vocab-size", 100_000)
    assert "4 documents" in stdout
    assert "left out: 1 empty documents" in stdout
    assert "100,000 were asked for" in stdout
    assert f"data.data_path={tmp_path / 'c'}" in stdout


def test_inspect_shows_what_prepare_wrote(text: Path, tmp_path: Path) -> None:
    prepared = json.loads(run("prepare", text, "--output", tmp_path / "c", "--vocab-size", 270, "--json")[0])
    document = json.loads(run("inspect", tmp_path / "c", "--json")[0])
    assert document["schema"] == 1
    assert document["dtype"] == "uint16"
    for key in ("documents", "tokens", "max_id", "text_bytes", "eod_id"):
        assert document[key] == prepared[key]
    assert document["smallest_vocab_size"] == prepared["max_id"] + 1
    assert document["document_length"]["min"] <= document["document_length"]["median"]
    assert document["eod_tokens"] == 4
    assert document["documents_ending_with_eod"] == 1.0
    assert document["bits_per_byte_available"]
    assert document["first_sample"]["text"].startswith("document number 0: some text")
    assert len(document["fingerprint"]) == 64
    shown, _ = run("inspect", tmp_path / "c")
    assert "its text" in shown
    assert f"{document['tokens']:,}" in shown


def test_inspect_without_a_tokenizer_says_what_it_does_not_know(text: Path, tmp_path: Path) -> None:
    run("prepare", text, "--output", tmp_path / "c", "--vocab-size", 270)
    (tmp_path / "c.meta.json").unlink()
    (tmp_path / "c.tokenizer.json").unlink()
    document = json.loads(run("inspect", tmp_path / "c", "--json")[0])
    assert document["origin"] == "scanned"
    assert document["first_sample"]["text"] is None
    assert document["eod_id"] is None
    assert not document["bits_per_byte_available"]
    assert "no tokenizer" in document["bits_per_byte_reason"]
    assert "unknown" in run("inspect", tmp_path / "c")[0]


def test_inspect_refuses_a_damaged_corpus(text: Path, tmp_path: Path) -> None:
    run("prepare", text, "--output", tmp_path / "c", "--vocab-size", 270)
    path = tmp_path / "c.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=r"c\.bin is truncated"):
        run("inspect", tmp_path / "c")
    with pytest.raises(DataError, match="no corpus at"):
        run("inspect", tmp_path / "nowhere")


def test_a_malformed_line_is_refused_by_place(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"x\.jsonl:2"):
        run("prepare", tmp_path / "x.jsonl", "--output", tmp_path / "c", "--strict")
    with pytest.raises(DataError, match="no tokenizer at"):
        run(
            "prepare", tmp_path / "x.jsonl", "--output", tmp_path / "c", "--tokenizer", tmp_path / "none.json"
        )


def test_broken_lines_and_duplicates_are_counted_and_the_first_are_shown(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n{"text": \n{"text": "a"}\n{"text": "b"}\n')
    stdout, _ = run("prepare", tmp_path / "x.jsonl", "--output", tmp_path / "c", "--vocab-size", 257)
    assert "left out: 1 broken JSON lines" in stdout
    assert "x.jsonl:2: no JSON" in stdout
    assert "kept: 1 documents that are equal to an earlier one (--drop-duplicates)" in stdout
    stdout, _ = run(
        *(
            "prepare",
            tmp_path / "x.jsonl",
            "--output",
            tmp_path / "d",
            "--vocab-size",
            257,
            "--drop-duplicates",
        )
    )
    assert "left out: 1 duplicate documents" in stdout
    assert "2 documents" in stdout


def test_inspect_counts_ids_lengths_and_what_a_run_would_hold_out(text: Path, tmp_path: Path) -> None:
    run("prepare", text, "--output", tmp_path / "c", "--vocab-size", 270)
    document = json.loads(run("inspect", tmp_path / "c", "--json")[0])
    ids = document["ids"]
    assert ids["counted_tokens"] == document["tokens"]
    assert ids["different_ids"] + ids["unused_below_largest"] == document["smallest_vocab_size"]
    counts = [row["count"] for row in ids["most_frequent"]]
    assert counts == sorted(counts, reverse=True)
    assert next(row["text"] for row in ids["most_frequent"])
    assert sum(document["document_length_histogram"].values()) == document["documents"]
    assert document["document_length_percentiles"]["50"] == document["document_length"]["median"]
    split = document["split"]["95,5"]
    assert split["train"]["tokens"] + split["validation"]["tokens"] == document["tokens"]
    assert [sample["document"] for sample in document["samples"]] == [0, 1, 2]


def test_inspect_refuses_ids_outside_a_vocabulary(text: Path, tmp_path: Path) -> None:
    run("prepare", text, "--output", tmp_path / "c", "--vocab-size", 270)
    largest = json.loads(run("inspect", tmp_path / "c", "--json")[0])["max_id"]
    assert run("inspect", tmp_path / "c", "--vocab-size", largest + 1)[0]
    with pytest.raises(
        DataError, match=rf"outside model\.vocab_size = {largest}; the smallest vocab_size .* {largest + 1}"
    ):
        run("inspect", tmp_path / "c", "--vocab-size", largest)


def test_inspect_tells_the_format_of_another_tools_file(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(bytes(range(1, 21)))
    document = json.loads(run("inspect", tmp_path / "train.bin", "--json")[0])
    assert document["format"] == "nanoGPT, uint16"
    assert document["tokens"] == 10


def test_bake_writes_the_corpus_that_training_then_reads(text: Path, tmp_path: Path) -> None:
    run("prepare", text, "--output", tmp_path / "c", "--vocab-size", 270)
    settings = [f"data.data_path={tmp_path / 'c'}", "data.transform=numpy.sort", "model.vocab_size=270"]
    document = json.loads(run("prepare", "--bake", "llama-2m", *settings, "--json")[0])
    (written,) = document["written"]
    assert document["data_path"] == written
    assert written.startswith(f"{tmp_path / 'c'}.baked-")
    first = json.loads(run("inspect", written, "--json")[0])["first_sample"]["token_ids"]
    assert first == sorted(first)
    shown, _ = run("prepare", "--bake", "llama-2m", *settings)
    assert (
        f"drivetrain train llama-2m data.transform=numpy.sort model.vocab_size=270 data.data_path={written}"
        in shown
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "INPUT... is missing"),
        (("in",), "--output PREFIX is missing"),
        (("--bake", "llama-2m"), "data.transform is absent"),
        (("--bake", "llama-2m", "--output", "x", "--strict"), "drop --output, --strict"),
    ],
)
def test_what_prepare_lacks_or_cannot_take_is_named(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(DrivetrainError, match=re.escape(message)):
        run("prepare", *arguments)
