"""Why a backend of another library does not serve a call: said before anything of the library is imported."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_in_flash_attn import stand_in_for_flash_attn
from stand_in_liger import stand_in_for_liger

from drivetrain.engine.ops.adapters import flash_attn_ops, liger, npu, transformer_engine
from drivetrain.engine.ops.adapters.library import Library
from drivetrain.engine.ops.discovery import operator_named, operators
from drivetrain.engine.ops.selection import Selection
from drivetrain.engine.ops.signature import Argument, Signature, signature_of
from drivetrain.errors import DrivetrainError

LIBRARIES: dict[str, Library] = {
    module.LIBRARY.name: module.LIBRARY for module in (liger, flash_attn_ops, transformer_engine, npu)
}
OPERATORS = {
    name: tuple(module.RULES)
    for name, module in (
        ("liger", liger),
        ("flash_attn", flash_attn_ops),
        ("transformer_engine", transformer_engine),
        ("npu", npu),
    )
}
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "rms_norm": {"x": (8, 64), "weight": (64,)},
    "add_rms_norm": {"x": (8, 64), "residual": (8, 64), "weight": (64,)},
    "layer_norm": {"x": (8, 64), "weight": (64,), "bias": (64,)},
    "add_layer_norm": {"x": (8, 64), "residual": (8, 64), "weight": (64,), "bias": (64,)},
    "rotary": {"x": (8, 4, 64), "cosine": (8, 32), "sine": (8, 32)},
    "glu": {"gate": (8, 128)},
    "linear_cross_entropy": {"hidden": (8, 64), "weight": (300, 64)},
    "grouped_product": {"x": (8, 64), "weight": (4, 64, 32)},
    "attention": {"q": (8, 4, 64), "k": (8, 2, 64), "v": (8, 2, 64)},
}


def call_on(
    device: str,
    operator: str,
    dtype: torch.dtype = torch.bfloat16,
    dtypes: dict[str, torch.dtype] | None = None,
    shapes: dict[str, tuple[int, ...]] | None = None,
    **options: Any,
) -> Signature:
    """A call as it would be on such a device."""
    arguments = tuple(
        (name, Argument(shape, (dtypes or {}).get(name, dtype), True, True))
        for name, shape in {**SHAPES[operator], **(shapes or {})}.items()
    )
    return Signature(operator, device, arguments, tuple(options.items()))


def why(library: str, operator: str, signature: Signature) -> str | None:
    """Why it refuses; None where it would serve."""
    backend = operator_named(operator).backend(library)
    assert backend is not None
    return backend.supports(signature)


def pretend_installed(folder: Path, library: Library, version: str) -> None:
    """Metadata as pip writes it, and nothing to import."""
    described = folder / f"{library.distribution.replace('-', '_')}-{version}.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {library.distribution}\nVersion: {version}\n", encoding="utf-8"
    )


CALLS = [(library, operator) for library, names in OPERATORS.items() for operator in names]
CALLS += [("transformer_engine", "attention"), ("npu", "attention")]


def test_each_library_serves_what_the_issue_names() -> None:
    """By operator, so that one that falls out of its tuple is missed."""
    found = {
        one.name: {backend.name for backend in one.backends if backend.name in LIBRARIES}
        for one in operators()
    }
    assert {name: names for name, names in found.items() if names} == {
        "rms_norm": {"liger", "flash_attn", "transformer_engine", "npu"},
        "add_rms_norm": {"liger", "flash_attn", "transformer_engine", "npu"},
        "layer_norm": {"liger", "flash_attn", "transformer_engine"},
        "add_layer_norm": {"flash_attn", "npu"},
        "rotary": {"liger", "flash_attn", "npu"},
        "glu": {"liger", "transformer_engine", "npu"},
        "linear_cross_entropy": {"liger", "flash_attn", "transformer_engine", "npu"},
        "grouped_product": {"transformer_engine", "npu"},
        "attention": {"flash_attn", "transformer_engine", "npu"},
    }


def test_the_page_has_the_table_of_who_serves_what() -> None:
    text = (Path(__file__).parents[3] / "docs" / "ops-libraries.md").read_text(encoding="utf-8")
    header, _, *lines = text.split("## Who serves which operator\n\n")[1].split("\n\n")[0].splitlines()
    libraries = [cell.strip(" `") for cell in header.strip("|").split("|")][1:]
    written = {}
    for line in lines:
        operator, *cells = (cell.strip(" `") for cell in line.strip("|").split("|"))
        written[operator] = {
            library
            for library, cell in zip(libraries, cells, strict=True)
            if cell.startswith(("yes", "[yes]"))
        }
    assert written == {
        one.name: found
        for one in operators()
        if (found := {backend.name for backend in one.backends if backend.name in LIBRARIES})
    }
    for held in LIBRARIES.values():
        assert f"| `{held.name}` | `{held.distribution}` | {held.mapped}" in text


@pytest.mark.parametrize(("library", "operator"), CALLS)
def test_one_that_is_not_installed_says_what_to_install_and_which_version_is_mapped(
    library: str, operator: str
) -> None:
    held = LIBRARIES[library]
    if held.installed() is not None:
        pytest.skip(f"{held.distribution} is installed here")
    device = "npu" if library == "npu" else "cuda"
    said = why(library, operator, call_on(device, operator))
    assert said == (
        f"{held.distribution} is not installed (pip install {held.distribution}; arguments are those of {held.mapped})"
    )


@pytest.mark.parametrize(("library", "operator"), CALLS)
def test_one_that_is_installed_serves_its_device_alone(
    library: str, operator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = LIBRARIES[library]
    pretend_installed(tmp_path, held, held.oldest or "2.7.1")
    monkeypatch.syspath_prepend(tmp_path)
    own, other = ("npu", "cuda") if library == "npu" else ("cuda", "npu")
    assert why(library, operator, call_on(own, operator)) is None
    for device in (other, "cpu"):
        said = why(library, operator, call_on(device, operator))
        assert said == f"{library} has no {device} device; it has {own}"
    refused = why(library, operator, call_on(own, operator, torch.float64))
    assert refused is not None
    assert "float64" in refused
    assert not any(name.split(".")[0] in ("liger_kernel", "torch_npu") for name in sys.modules)


@pytest.mark.parametrize(
    ("found", "serves"),
    [("0.8.5", True), ("0.8.10", True), ("1.0", True), ("0.8.4", False), ("0.10.0+cu12", True)],
)
def test_an_older_version_is_refused(
    found: str, serves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(tmp_path, liger.LIBRARY, found)
    monkeypatch.syspath_prepend(tmp_path)
    said = why("liger", "rms_norm", call_on("cuda", "rms_norm"))
    assert said == (
        None if serves else f"liger-kernel {found} is installed; arguments are those of 0.8.5 and later"
    )


REFUSED: list[tuple[str, str, dict[str, Any], str]] = [
    ("liger", "rms_norm", {"shapes": {"x": (8, 65537)}}, "liger holds 65,536"),
    ("liger", "rms_norm", {"shapes": {"x": (0, 64)}}, "x is empty"),
    ("liger", "add_rms_norm", {"dtypes": {"residual": torch.float32}}, "liger's sum has the dtype of x"),
    ("liger", "rotary", {"style": "interleaved"}, "the style is interleaved"),
    ("liger", "glu", {"activation": "gelu_erf"}, "gelu_tanh"),
    ("liger", "linear_cross_entropy", {"chunk_rows": 4}, "chunk_rows has to be 0"),
    ("flash_attn", "rms_norm", {"casting": "before_weight"}, "casting is before_weight"),
    ("flash_attn", "rms_norm", {"offset": 0.5}, "offset is 0.5"),
    ("flash_attn", "rms_norm", {"shapes": {"x": (8, 32769)}}, "rows of 65,538 bytes"),
    ("flash_attn", "rms_norm", {"shapes": {"x": (65536, 32768)}}, "counts them in 32 bits"),
    ("flash_attn", "add_rms_norm", {"dtypes": {"x": torch.float32}}, "the dtype of the residual"),
    ("flash_attn", "rotary", {"shapes": {"x": (8, 4, 264)}}, "heads are 264 wide"),
    ("flash_attn", "rotary", {"shapes": {"cosine": (524281, 32)}}, "524,281 tokens"),
    ("transformer_engine", "rms_norm", {"dtypes": {"weight": torch.float32}}, "weight is torch.float32"),
    ("transformer_engine", "rms_norm", {"offset": 2.0}, "offset is 2.0"),
    (
        "transformer_engine",
        "add_rms_norm",
        {"dtypes": {"residual": torch.float32}},
        "residual is torch.float32",
    ),
    ("transformer_engine", "glu", {"shapes": {"up": (8, 128)}}, "gate and up in one tensor"),
    ("transformer_engine", "linear_cross_entropy", {"z_loss": 1e-4}, "no z-loss"),
    ("transformer_engine", "linear_cross_entropy", {"dtype": torch.float16}, "float16"),
    ("npu", "rms_norm", {"casting": "before_weight"}, "casting is before_weight"),
    ("npu", "rms_norm", {"dtypes": {"weight": torch.float16}}, "weight is torch.float16"),
    ("npu", "add_rms_norm", {"offset": 1.0}, "loses digits"),
    ("npu", "add_rms_norm", {"dtypes": {"weight": torch.float32}}, "one dtype for all"),
    ("npu", "rotary", {"shapes": {"x": (8, 1000, 64)}}, "1000 heads"),
    ("npu", "rotary", {"shapes": {"x": (8, 4, 896)}}, "heads are 896 wide"),
    ("npu", "glu", {"shapes": {"up": (8, 128)}}, "gate and up in one tensor"),
    ("npu", "linear_cross_entropy", {"z_loss": 1e-4}, "no z-loss"),
    ("npu", "linear_cross_entropy", {"dtype": torch.float32}, "takes fp16 and bf16"),
    ("npu", "linear_cross_entropy", {"shapes": {"weight": (127, 64)}}, "127 words"),
    ("npu", "grouped_product", {"shapes": {"weight": (4, 64, 65536)}}, "rows of 65,536 elements"),
    ("npu", "grouped_product", {"shapes": {"weight": (1025, 64, 32)}}, "1,025 experts"),
]


@pytest.mark.parametrize(("library", "operator", "particular", "said"), REFUSED)
def test_what_a_library_does_not_have_is_refused_wherever_it_runs(
    library: str, operator: str, particular: dict[str, Any], said: str
) -> None:
    module = {
        "liger": liger,
        "flash_attn": flash_attn_ops,
        "transformer_engine": transformer_engine,
        "npu": npu,
    }
    rule = module[library].RULES[operator]
    assert rule(call_on("cpu", operator)) is None
    reason = rule(call_on("cpu", operator, **particular))
    assert reason is not None
    assert said in reason


def test_asked_for_by_name_it_raises_and_says_who_can() -> None:
    selection = Selection(requested={"rms_norm": "liger"})
    x, weight = torch.randn(4, 8), torch.ones(8)
    with pytest.raises(DrivetrainError, match="liger cannot serve") as refused:
        selection.call(operator_named("rms_norm"), x=x, weight=weight)
    assert "liger has no cpu device; it has cuda" in str(refused.value)
    assert "those that can: eager" in str(refused.value)
    assert not selection.served


def test_liger_is_told_where_to_round_and_to_leave_the_gradient_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in_for_liger(monkeypatch)
    import liger_kernel.ops.rms_norm as held  # the stand-in

    seen: list[tuple[Any, ...]] = []

    class Recorded:
        @staticmethod
        def apply(*given: Any) -> torch.Tensor:
            seen.append(given[2:])
            found: torch.Tensor = given[0] * given[1]
            return found

    monkeypatch.setattr(held, "LigerRMSNormFunction", Recorded)
    backend = operator_named("rms_norm").backend("liger")
    assert backend is not None
    x, weight = torch.randn(4, 8), torch.ones(8, requires_grad=True)
    backend.call(x, weight, 1e-5, 1.0)
    backend.call(x, weight, casting="before_weight")
    assert seen == [(1e-5, 1.0, "gemma", False), (1e-6, 0.0, "llama", False)]


def test_a_result_without_a_gradient_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function without a formula for its gradient gives a constant, and training would go on without it."""
    stand_in_for_flash_attn(monkeypatch)
    import flash_attn.ops.triton.layer_norm as held  # the stand-in

    right = held.rms_norm_fn
    monkeypatch.setattr(held, "rms_norm_fn", lambda *given, **named: right(*given, **named).detach())
    backend = operator_named("rms_norm").backend("flash_attn")
    assert backend is not None
    x, weight = torch.randn(4, 8), torch.ones(8, requires_grad=True)
    with pytest.raises(AssertionError, match="no gradient"):
        backend.call(x, weight)
    with torch.no_grad():
        backend.call(x, weight)


def test_signatures_of_the_calls_above_are_those_that_operators_are_called_with() -> None:
    given = {"x": torch.zeros(8, 64, dtype=torch.bfloat16), "weight": torch.zeros(64, dtype=torch.bfloat16)}
    made = signature_of("rms_norm", {name: one.requires_grad_() for name, one in given.items()})
    assert made == call_on("cpu", "rms_norm")
