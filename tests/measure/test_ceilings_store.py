"""Ceilings of a machine: what is read back, what is refused, what another machine never sees."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from drivetrain.errors import EnvironmentFault
from drivetrain.measure import machine
from drivetrain.measure.ceilings import CeilingEntry, ceilings_path, load_ceilings


def entry(**changes: Any) -> CeilingEntry:
    fields: dict[str, Any] = {
        "kind": "matmul",
        "device": "Processor X",
        "dtype": "bf16",
        "num_threads": 2,
        "value": 1.5e12,
        "method": "a @ b",
        "shape": (4096, 4096, 4096),
        "seconds": 20.1,
        "rate_p10": 1.45e12,
        "rate_p90": 1.55e12,
        "intervals": 20,
        "interval_seconds": 1.0,
        "cpu_share": 0.99,
        "load_average": 0.1,
        "torch_version": "2.13.0+cpu",
        "date": "2026-11-29T10:00:00+00:00",
        "command": "drivetrain bench gemm",
    }
    return CeilingEntry(**{**fields, **changes})


def write(cache: Path, document: Any) -> Path:
    path = ceilings_path(cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(document if isinstance(document, bytes) else orjson.dumps(document))
    return path


def write_entries(cache: Path, *entries: CeilingEntry) -> None:
    write(cache, {"schema": 1, "entries": [one.model_dump(mode="json") for one in entries]})


def test_without_a_file_nothing_is_measured(tmp_path: Path) -> None:
    ceilings = load_ceilings(tmp_path)
    assert ceilings.entries == ()
    assert ceilings.matmul_flops("Processor X", "bf16", 2) is None


def test_a_ceiling_comes_back_with_how_it_was_measured(tmp_path: Path) -> None:
    write_entries(tmp_path, entry())
    peak = load_ceilings(tmp_path).matmul_flops("Processor X", "bf16", 2)
    assert peak is not None
    assert peak.value == 1.5e12
    assert peak.source == (
        "measured sustained matrix product, 20.1 s, bf16 4096x4096x4096, 2 threads, 2026-11-29"
    )


@pytest.mark.parametrize(
    ("device", "dtype", "threads"),
    [
        ("Processor Y", "bf16", 2),
        ("Processor X", "fp32", 2),
        ("Processor X", "bf16", 1),
        ("Processor X", "bf16", None),
    ],
)
def test_no_other_measurement_stands_in(tmp_path: Path, device: str, dtype: str, threads: int | None) -> None:
    write_entries(tmp_path, entry())
    assert load_ceilings(tmp_path).matmul_flops(device, dtype, threads) is None


def test_memory_and_matrix_products_are_kept_apart(tmp_path: Path) -> None:
    write_entries(tmp_path, entry(), entry(kind="memory", dtype="fp32", value=5e10, shape=(1000,)))
    ceilings = load_ceilings(tmp_path)
    bandwidth = ceilings.memory_bandwidth("Processor X", 2)
    assert bandwidth is not None
    assert bandwidth.value == 5e10
    assert ceilings.matmul_flops("Processor X", "fp32", 2) is None


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "damaged"),
        (b'{"schema": 1, "entries": [', "damaged"),
        ([], "no schema version"),
        ({"entries": []}, "no schema version"),
        ({"schema": 1}, "no list of entries"),
        ({"schema": 1, "entries": [{}]}, "entry 0, kind"),
        ({"schema": 1, "entries": [{**entry().model_dump(mode="json"), "value": -1.0}]}, "entry 0, value"),
        ({"schema": 1, "entries": [{**entry().model_dump(mode="json"), "value": "fast"}]}, "entry 0, value"),
        ({"schema": 1, "entries": [{**entry().model_dump(mode="json"), "more": 1}]}, "entry 0, more"),
        ({"schema": 2, "entries": []}, "newer Drivetrain"),
    ],
)
def test_a_damaged_or_newer_file_is_an_error_that_names_it(tmp_path: Path, content: Any, said: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(EnvironmentFault, match=said) as caught:
        load_ceilings(tmp_path)
    assert str(path) in str(caught.value)
    assert "drivetrain bench gemm" in str(caught.value)


def test_a_folder_in_the_files_place_is_an_error(tmp_path: Path) -> None:
    ceilings_path(tmp_path).mkdir(parents=True)
    with pytest.raises(EnvironmentFault, match="cannot read"):
        load_ceilings(tmp_path)


def test_a_disturbed_measurement_says_so() -> None:
    assert entry().doubts == ()
    assert "50% of its cores" in entry(cpu_share=0.5).doubts[0]
    assert "best tenth" in entry(rate_p10=1.0e12).doubts[0]
    assert entry(cpu_share=None).doubts == ()


def test_the_cache_folder_can_be_moved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRIVETRAIN_CACHE", str(tmp_path / "elsewhere"))
    assert load_ceilings().path.is_relative_to(tmp_path / "elsewhere")
    assert machine.cache_folder({}) == Path.home() / ".cache" / "drivetrain"


# -- the machine's identity, from made-up /proc and /sys -------------------------------------------------------


def made_up(root: Path, **files: str) -> Path:
    for name, content in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return root


CPU = "processor\t: 0\nmodel name\t: Example 9000\nmodel\t\t: 2\nflags\t\t: fpu avx2\n"


def test_another_host_processor_or_gpu_is_another_machine(tmp_path: Path) -> None:
    here = made_up(tmp_path / "a", proc__cpuinfo=CPU)
    newer = made_up(tmp_path / "b", proc__cpuinfo=CPU.replace("model\t\t: 2", "model\t\t: 3"))
    with_gpu = made_up(tmp_path / "c", proc__cpuinfo=CPU)
    card = with_gpu / "proc/driver/nvidia/gpus/0000:01:00.0"
    card.mkdir(parents=True)
    (card / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert machine.gpu_models(with_gpu) == ("NVIDIA H200",)
    names = {
        machine.machine_name(here, "node 1"),
        machine.machine_name(here, "node 2"),
        machine.machine_name(newer, "node 1"),
        machine.machine_name(with_gpu, "node 1"),
    }
    assert len(names) == 4
    assert machine.machine_name(here, "node 1") in names, "the same machine keeps its name"
    assert all(name.startswith("node-") for name in names)


def test_the_processor_is_read_from_cpuinfo(tmp_path: Path) -> None:
    root = made_up(tmp_path, proc__cpuinfo=CPU)
    assert machine.cpu_model(root) == "Example 9000"
    assert machine.cpu_flags(root) == {"fpu", "avx2"}
    assert machine.cpu_flags(tmp_path / "nothing") == frozenset()


def four_cpus(root: Path, threads_per_core: int = 1) -> Path:
    for cpu in range(4):
        first = cpu - cpu % threads_per_core
        siblings = ",".join(str(first + index) for index in range(threads_per_core))
        path = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
        path.parent.mkdir(parents=True)
        path.write_text(siblings + "\n")
    return root


ALL = frozenset(range(4))


def test_usable_cores_follow_affinity_and_count_a_core_once(tmp_path: Path) -> None:
    assert machine.usable_cores(four_cpus(tmp_path / "a"), ALL) == 4
    assert machine.usable_cores(four_cpus(tmp_path / "b", threads_per_core=2), ALL) == 2
    assert machine.usable_cores(tmp_path / "a", frozenset({1, 3})) == 2
    assert machine.usable_cores(tmp_path / "no-topology", ALL) == 4


@pytest.mark.parametrize(("limit", "cores"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1)])
def test_usable_cores_stay_within_the_quota_of_control_groups(tmp_path: Path, limit: str, cores: int) -> None:
    root = four_cpus(tmp_path)
    made_up(root, proc__self__cgroup="0::/outer/inner\n", sys__fs__cgroup__outer__inner__placeholder="")
    (root / "sys/fs/cgroup/outer/cpu.max").write_text(limit + "\n")
    assert machine.usable_cores(root, ALL) == cores


def test_usable_cores_know_the_first_version_of_control_groups(tmp_path: Path) -> None:
    root = four_cpus(tmp_path)
    # The path is the host's, as inside a container: only the mount is there, and it is the container's group.
    made_up(root, proc__self__cgroup="9:name=systemd:/\n2:cpu,cpuacct:/docker/abc\n")
    folder = root / "sys/fs/cgroup/cpu,cpuacct"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("300000\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.usable_cores(root, ALL) == 3
    (folder / "cpu.cfs_quota_us").write_text("-1\n")
    assert machine.usable_cores(root, ALL) == 4


def test_l3_instances_are_added_once_each(tmp_path: Path) -> None:
    for cpu, shared in enumerate(("0-1", "0-1", "2-3", "2-3")):
        cache = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
        cache.mkdir(parents=True)
        (cache / "size").write_text("32768K\n")
        (cache / "shared_cpu_list").write_text(shared + "\n")
    assert machine.total_l3_bytes(tmp_path) == 64 * 2**20
    assert machine.total_l3_bytes(tmp_path / "nothing") is None
