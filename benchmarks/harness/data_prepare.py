"""``data prepare`` against the tokenizer alone, and against ``datasets.map``, on all cores.

The text is Python source of this machine, as JSON lines. Each measurement is a process of its own that prints how long
its work took, start and imports of that process left out: for us from the files on disk to the corpus on disk, starting
our processes included; for the bare tokenizer from texts in memory to encodings in memory; for ``datasets`` from a data
set on disk, as it saved it, to the file of ids that ``map`` writes.
"""

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.claims import Claim, claim_of_times
from harness.quiet import wait_until_quiet

__all__ = ["prepare_claims"]

VOCABULARY = 8192
FULL_BYTES, FULL_ROUNDS = 64_000_000, 4
QUICK_BYTES, QUICK_ROUNDS = 6_000_000, 1
BATCH = 1000
"""Texts of one call of the bare tokenizer: the default of ``datasets.map`` as well."""
SIDES = ("ours", "encode_batch", "encode_batch_fast", "datasets")


def prepare_claims(*, quick: bool) -> list[Claim]:
    """Claims of ``data prepare``. ``datasets`` must be installed (the extra ``bench``)."""
    size, rounds = (QUICK_BYTES, QUICK_ROUNDS) if quick else (FULL_BYTES, FULL_ROUNDS)
    with tempfile.TemporaryDirectory(prefix="data-prepare-") as name:
        folder = Path(name)
        written, documents = _make_inputs(folder, size)
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for number in range(rounds):
            # A B C D D C B A: what drifts meets all sides alike.
            for side in (*SIDES, *reversed(SIDES)):
                wait_until_quiet(patience_s=1.0 if quick else 120.0)
                times[side].append(_measure(side, folder))
                print(f"  {side}, round {number}: {times[side][-1]:.2f} s", file=sys.stderr, flush=True)
    cores = len(os.sched_getaffinity(0))
    note = (
        f"{written / 1e6:.0f} MB of Python source in {documents:,} documents, {VOCABULARY} ids, {cores} cores; "
        f"ours {written / 1e6 / _middle(times['ours']):.2f} MB/s from JSON lines to a corpus on disk"
    )

    def claim(over: str, side: str, package: str, target: float) -> Claim:
        return claim_of_times(
            f"data prepare: throughput over that of {over}",
            f"{package}, {side}",
            version(package),
            times["ours"],
            times[side],
            target=target,
            note=note,
        )

    return [
        claim("the bare tokenizer, encode_batch", "encode_batch", "tokenizers", 0.9),
        claim("the bare tokenizer at its fastest, encode_batch_fast", "encode_batch_fast", "tokenizers", 0.9),
        claim(f"datasets.map(batched=True, num_proc={cores})", "datasets", "datasets", 1.0),
    ]


def _middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _sources() -> Iterator[Path]:
    for kind in ("stdlib", "purelib"):
        for folder, folders, files in os.walk(sysconfig.get_path(kind)):
            folders[:] = sorted(set(folders) - {"__pycache__", "site-packages"})
            yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


def _make_inputs(folder: Path, size: int) -> tuple[int, int]:
    """Write the text, as each side takes it, and the tokenizer; bytes of text and number of documents."""
    from datasets import Dataset

    from drivetrain.engine.data.tokenizer import train_tokenizer

    texts: list[str] = []
    written = 0
    for path in _sources():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        texts.append(text)
        written += len(text.encode())
        if written >= size:
            break
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    train_tokenizer(texts[:: max(1, written // 8_000_000)], VOCABULARY).save(str(folder / "tokenizer.json"))
    Dataset.from_dict({"text": texts}).save_to_disk(str(folder / "text"))
    return written, len(texts)


def _measure(side: str, folder: Path) -> float:
    """Seconds of one run of a side, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "harness.data_prepare", side, str(folder)],
        check=True, stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip
    return float(done.stdout.split()[-1])


def _ours(folder: Path) -> Callable[[], None]:
    from drivetrain.engine.data.prepare import prepare

    return lambda: print(
        prepare(
            [folder / "text.jsonl"],
            folder / "corpus",
            tokenizer_path=folder / "tokenizer.json",
            workers=len(os.sched_getaffinity(0)),
        ).tokens
    )


def _bare(folder: Path, method: str) -> Callable[[], None]:
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with (folder / "text.jsonl").open(encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file]
    encode = getattr(tokenizer, method)

    def work() -> None:
        for start in range(0, len(texts), BATCH):
            encode(texts[start : start + BATCH], add_special_tokens=False)

    return work


def _datasets(folder: Path) -> Callable[[], None]:
    from datasets import disable_caching, load_from_disk
    from tokenizers import Tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    disable_caching()
    data = load_from_disk(str(folder / "text"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def ids_of(rows: dict[str, list[str]]) -> dict[str, Any]:
        return {
            "input_ids": [
                found.ids for found in tokenizer.encode_batch(rows["text"], add_special_tokens=False)
            ]
        }

    def work() -> None:
        workers = len(os.sched_getaffinity(0))
        data.map(ids_of, batched=True, num_proc=workers, remove_columns=["text"])

    return work


def main() -> None:
    """One run of one side: prints its seconds."""
    side, folder = sys.argv[1], Path(sys.argv[2])
    prepared = {"ours": _ours, "datasets": _datasets}
    work = prepared[side](folder) if side in prepared else _bare(folder, side)
    start = time.perf_counter()
    work()
    print(time.perf_counter() - start)


if __name__ == "__main__":
    main()
