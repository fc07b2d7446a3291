"""Capabilities are tried, not assumed; combinations known to be bad are matched by version."""

import stat
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from drivetrain.config.operation import RunSectionConfig
from drivetrain.engine import capabilities as module
from drivetrain.engine.capabilities import CAPABILITY_NAMES, Capability, capabilities, cpp_compiler
from drivetrain.engine.devices import select_device
from drivetrain.engine.known_bad import KNOWN_BAD, Facts, applying, between, parse_version

CPU = select_device(RunSectionConfig(device="cpu"))


def named() -> dict[str, Capability]:
    return {one.name: one for one in capabilities(CPU)}


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_each_capability_is_answered_once_and_in_order() -> None:
    found = capabilities(CPU)
    assert tuple(one.name for one in found) == CAPABILITY_NAMES
    assert len(set(CAPABILITY_NAMES)) == len(CAPABILITY_NAMES)


def test_a_no_has_a_reason_and_a_yes_has_none() -> None:
    for one in capabilities(CPU):
        assert (one.reason is None) == one.available, one


def test_what_training_on_a_cpu_needs_is_there() -> None:
    found = named()
    for name in ("gloo", "fused_adamw", "sdpa_flash", "bf16_matmul"):
        assert found[name].available, found[name]


def test_an_operator_that_fails_is_not_available_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("No available kernel. Aborting execution.\nmore")

    monkeypatch.setattr(module.F, "scaled_dot_product_attention", refuse)
    flash = named()["sdpa_flash"]
    assert not flash.available
    assert flash.reason == "No available kernel. Aborting execution."


def test_instruction_sets_are_those_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset({"avx2", "fma", "amx_tile", "amx_bf16"}))
    found = named()
    assert found["cpu.avx2"].available
    assert found["cpu.amx_bf16"].available
    assert found["bf16_native"].detail == "amx_bf16"
    assert found["cpu.avx512"].reason == "the processor lacks avx512f, avx512bw, avx512vl, avx512dq"
    monkeypatch.setattr(module, "cpu_flags", lambda: frozenset())
    assert "through fp32" in str(named()["bf16_native"].reason)


def test_a_machine_without_a_compiler_cannot_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert cpp_compiler() is None
    assert "no C++ compiler" in str(named()["compile"].reason)


def test_the_compiler_is_run_not_only_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path / "mine++", "echo 13.2.0")))
    assert cpp_compiler() == (str(tmp_path / "mine++"), "13.2.0")
    monkeypatch.setenv("CXX", str(program(tmp_path / "broken++", "exit 1")))
    assert cpp_compiler() is None


@pytest.mark.parametrize(
    ("ending", "available", "said"),
    [
        ("exit 0", True, "agrees with eager"),
        (
            "echo 'torch.CppCompileError: C++ compile error' >&2; echo 'Set X for more' >&2; exit 1",
            False,
            "CppCompileError",
        ),
        ("kill -SEGV $$", False, "SIGSEGV"),
    ],
)
def test_deep_reports_how_the_compilation_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str, available: bool, said: str
) -> None:
    monkeypatch.setenv("CXX", str(program(tmp_path / "c++", "echo 13.2.0")))
    monkeypatch.setattr(sys, "executable", str(program(tmp_path / "python", ending)))
    found = {one.name: one for one in capabilities(CPU, deep=True)}["compile"]
    assert found.available is available
    assert said in (found.reason or found.detail)


@pytest.mark.long
def test_deep_compiles_a_function_here() -> None:
    if not named()["compile"].available:
        pytest.skip("no C++ compiler")
    found = {one.name: one for one in capabilities(CPU, deep=True)}["compile"]
    assert found.available, found


def test_optional_packages_are_looked_up_and_not_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu/__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert named()["torch_npu"].available


# -- versions and the table ------------------------------------------------------------------------------------


def test_versions_compare_as_pip_compares_them() -> None:
    in_order = [
        "1.9",
        "2.0.0a1",
        "2.0.0rc1",
        "2",
        "2.0.0+cpu",
        "2.0.0.post1",
        "2.0.0.post2",
        "2.0.1",
        "2.9.1",
        "2.13.0",
    ]
    parsed = [parse_version(text) for text in in_order]
    assert parsed == sorted(parsed)
    assert parse_version("2") == parse_version("2.0.0+cpu") == parse_version("v2.0")
    assert parse_version("2.13.0.dev20260101") < parse_version("2.13")
    with pytest.raises(ValueError, match="unknown"):
        parse_version("unknown")


def test_a_range_includes_its_start_and_excludes_its_end() -> None:
    facts = Facts({"torch": "2.13.0+cpu"})
    assert between(facts, "torch", "2.13", "2.14")
    assert not between(facts, "torch", "2.12", "2.13")
    assert between(facts, "torch", None, None)
    assert not between(facts, "numpy", None, None)


def test_every_entry_has_a_source_a_remedy_and_whom_it_concerns() -> None:
    assert len(KNOWN_BAD) >= 8
    assert len({entry.id for entry in KNOWN_BAD}) == len(KNOWN_BAD)
    for entry in KNOWN_BAD:
        assert entry.source.startswith("https://github.com/"), entry.id
        assert entry.remedy, entry.id
        assert entry.concerns, entry.id


def on_cuda(torch: str, capability: tuple[int, int] = (9, 0), **environment: str) -> Facts:
    return Facts({"torch": torch}, cuda=True, compute_capability=capability, environment=environment)


def on_cpu(versions: Mapping[str, str], **environment: str) -> Facts:
    return Facts(versions, environment=environment)


ZEN = frozenset({"avx512f"})


@pytest.mark.parametrize(
    ("bad", "facts", "good"),
    [
        ("inductor-dropout-masks", on_cuda("2.13.0+cu130"), on_cpu({"torch": "2.13.0+cpu"})),
        ("inductor-dropout-masks", on_cuda("2.13.1"), on_cuda("2.12.1")),
        ("cudnn-sdpa-backward-nan", on_cuda("2.11.0"), on_cuda("2.11.0", (8, 0))),
        ("compiled-custom-autograd", on_cuda("2.11.0"), on_cuda("2.12.0")),
        (
            "inductor-gcc14-avx512",
            Facts({"torch": "2.13.0", "gcc": "14.2.0"}, cpu_model="AMD EPYC", cpu_flags=ZEN),
            Facts({"torch": "2.13.0", "gcc": "12.2.0"}, cpu_model="AMD EPYC", cpu_flags=ZEN),
        ),
        ("fsdp2-tied-uneven", on_cuda("2.12.0"), on_cuda("2.13.0")),
        ("ddp-bf16-hook-on-gloo", on_cpu({"torch": "2.13.0"}), on_cuda("2.13.0")),
        (
            "torchrun-shared-store",
            on_cpu({"torch": "2.13.0"}),
            on_cpu({"torch": "2.13.0"}, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
        ),
        ("nccl-device-id-hang", on_cuda("2.7.0"), on_cuda("2.7.1")),
        ("nccl-2.29.2-hang", on_cpu({"nccl": "2.29.2"}), on_cpu({"nccl": "2.29.3"})),
        (
            "flash-attn-2.8-old-torch",
            on_cpu({"torch": "2.6.0", "flash-attn": "2.8.0.post2"}),
            on_cpu({"torch": "2.7.0", "flash-attn": "2.8.0.post2"}),
        ),
        (
            "flash-attn-2.7-new-torch",
            on_cpu({"torch": "2.7.0", "flash-attn": "2.7.4.post1"}),
            on_cpu({"torch": "2.6.0", "flash-attn": "2.7.4.post1"}),
        ),
        (
            "numpy-2-old-torch",
            on_cpu({"torch": "2.2.2", "numpy": "2.0.0"}),
            on_cpu({"torch": "2.2.2", "numpy": "1.26.4"}),
        ),
        (
            "transformers-accumulation-loss",
            on_cpu({"transformers": "4.46.3"}),
            on_cpu({"transformers": "5.24.0"}),
        ),
        (
            "one-cuda-connection",
            on_cuda("2.13.0", CUDA_DEVICE_MAX_CONNECTIONS="1"),
            on_cuda("2.13.0", CUDA_DEVICE_MAX_CONNECTIONS="16"),
        ),
        ("triton-interpreter-bf16", on_cpu({}, TRITON_INTERPRET="1"), on_cpu({}, TRITON_INTERPRET="0")),
        ("torch-load-memory-corruption", on_cpu({"torch": "2.9.1"}), on_cpu({"torch": "2.10.0"})),
    ],
)
def test_a_combination_is_found_and_its_neighbour_is_not(bad: str, facts: Facts, good: Facts) -> None:
    assert bad in {entry.id for entry in applying(facts)}
    assert bad not in {entry.id for entry in applying(good)}


def test_every_entry_of_the_table_has_a_case_above() -> None:
    marks = test_a_combination_is_found_and_its_neighbour_is_not.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == {entry.id for entry in KNOWN_BAD}
