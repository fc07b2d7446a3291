"""Grades the Triton backends of operators in the interpreter: a script, run by tests in a process of its own.

    TRITON_INTERPRET=1 python interpreted_grid.py '[["glu", "odd sizes", "float32", "dense"], ...]'

prints the problems of each call as JSON.
"""

import json
import sys

import torch
from interpreter import use_exact_bfloat16

from drivetrain.engine.ops.discovery import operator_named
from drivetrain.engine.ops.numerics import grade


def main() -> None:
    """The script."""
    use_exact_bfloat16()
    torch.set_num_threads(1)
    found = []
    for name, case_name, dtype_name, upstream in json.loads(sys.argv[1]):
        operator = operator_named(name)
        backend = operator.backend("triton")
        assert backend is not None
        case = next(case for case in operator.cases() if case.name == case_name)
        graded = grade(operator, backend, case, getattr(torch, dtype_name), upstream=upstream)
        found.append(
            {"refused": graded.refused, "problems": graded.problems, "measured": len(graded.measured)}
        )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
