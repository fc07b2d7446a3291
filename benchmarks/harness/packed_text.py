"""A corpus of short documents, so that most training sequences hold several: functions of the standard library."""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

__all__ = ["MODULES", "VOCABULARY", "functions_of", "packed_corpus"]

VOCABULARY = 1024
MODULES = (
    *("argparse", "ast", "calendar", "configparser", "csv", "dataclasses", "difflib", "doctest", "fractions"),
    *(
        "inspect",
        "locale",
        "mailbox",
        "optparse",
        "os",
        "pdb",
        "pickle",
        "platform",
        "random",
        "shutil",
        "smtplib",
    ),
    *("socket", "statistics", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "typing", "uuid"),
    "zipfile",
)


def functions_of(source: str) -> Iterator[str]:
    """The text of each function of a module and of its classes, in order."""
    lines = source.splitlines(keepends=True)
    for statement in ast.parse(source).body:
        for node in statement.body if isinstance(statement, ast.ClassDef) else [statement]:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield "".join(lines[node.lineno - 1 : node.end_lineno])


def packed_corpus(folder: Path, modules: Sequence[str] = MODULES) -> Path:
    """Prefix of the corpus of these modules in ``folder``; prepared by ``drivetrain data prepare`` where it is
    missing."""
    prefix = folder / "functions"
    if prefix.with_suffix(".idx").exists():
        return prefix
    folder.mkdir(parents=True, exist_ok=True)
    library = Path(ast.__file__).parent
    documents = folder / "functions.jsonl"
    with documents.open("w", encoding="utf-8") as file:
        for module in modules:
            for text in functions_of((library / f"{module}.py").read_text(encoding="utf-8")):
                file.write(json.dumps({"text": text}) + "\n")
    command = [sys.executable, "-m", "drivetrain", "data", "prepare", str(documents), "--output", str(prefix)]
    subprocess.run([*command, "--vocab-size", str(VOCABULARY)], check=True, stdout=sys.stderr)
    return prefix
