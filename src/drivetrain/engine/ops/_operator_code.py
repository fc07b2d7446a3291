"""Which code computes an operator: a hash that changes when anything changes that its backends are made of.

A number that somebody has to raise is forgotten once. What a choice was measured on is the code itself: the operator's
own module and what it imports of this package. Comments and docstrings do not count.
"""

import ast
import functools
import hashlib
import importlib.util
from pathlib import Path

__all__ = ["module_of", "operator_code"]

_PACKAGE = "drivetrain.engine.ops"
_CONTRACT = frozenset({"discovery", "grid", "numerics", "operator", "selection", "signature"})
"""Modules that say what an operator is, and compute nothing."""
_ELSEWHERE = {"tp_chunks": "drivetrain.engine.parallel.chunked_products"}
"""What is tuned like an operator, and lies in another package."""


def module_of(operator: str) -> str:
    """Full name of the module whose code an operator is computed by."""
    return _ELSEWHERE.get(operator, f"{_PACKAGE}.{operator}")


@functools.cache
def operator_code(module: str) -> str:
    """16 hexadecimal digits for the code of the operator that ``module`` holds.

    Args:
        module: full name of the module or package with ``OPERATOR``.
    """
    digest = hashlib.sha256()
    for path in sorted(_closure(module)):
        digest.update(f"{path.parent.name}/{path.name}\n{_essence(path)}\n".encode())
    return digest.hexdigest()[:16]


def _closure(module: str) -> frozenset[Path]:
    found: set[Path] = set()
    waiting = list(_files(module))
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        for imported in _imports(path):
            waiting += _files(imported)
    return frozenset(found)


@functools.cache
def _files(module: str) -> tuple[Path, ...]:
    """The file of a module; of a package all of its files. Nothing is imported but the packages around it."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ()
    path = Path(spec.origin)
    return tuple(sorted(path.parent.glob("*.py"))) if path.name == "__init__.py" else (path,)


@functools.cache
def _source(path: Path) -> tuple[str, ast.Module]:
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


@functools.cache
def _imports(path: Path) -> tuple[str, ...]:
    """Modules of the package's folder that a file imports, wherever in it."""
    found: set[str] = set()
    for node in ast.walk(_source(path)[1]):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            rest = name.removeprefix(f"{_PACKAGE}.")
            if rest == name:
                continue
            part = rest.split(".")[0]
            if part not in _CONTRACT and not part.startswith(("modules_", "tuned_", "_tuned_")):
                found.add(f"{_PACKAGE}.{part}")
    return tuple(sorted(found))


@functools.cache
def _essence(path: Path) -> str:
    """The lines of a file that are neither empty nor comment nor part of a docstring."""
    text, tree = _source(path)
    said: set[int] = set()
    for node in ast.walk(tree):
        for one in getattr(node, "body", ()) if isinstance(node, _WITH_DOCSTRINGS) else ():
            if (
                isinstance(one, ast.Expr)
                and isinstance(one.value, ast.Constant)
                and isinstance(one.value.value, str)
            ):
                said.update(range(one.lineno, (one.end_lineno or one.lineno) + 1))
    lines = enumerate(text.split("\n"), start=1)
    return "\n".join(
        line
        for number, line in lines
        if number not in said and line.strip() and not line.lstrip().startswith("#")
    )


_WITH_DOCSTRINGS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
