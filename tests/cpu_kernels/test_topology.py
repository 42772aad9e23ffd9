"""Reading fake machines: K39 (quotas), SMT, NUMA, absent files."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpu_kernels import isa, topology


def machine(
    root: Path,
    *,
    allowed: str = "0-7",
    cpu_max: str | None = None,
    v1: tuple[str, str] | None = None,
    siblings: dict[int, str] | None = None,
    nodes: dict[int, str] | None = None,
    group: str = "/",
) -> Path:
    def write(path: str, text: str) -> None:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)

    write("proc/self/status", f"Name:\tx\nCpus_allowed_list:\t{allowed}\n")
    write("proc/cpuinfo", "processor : 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu sse2 avx2\n")
    write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    if cpu_max is not None:
        write("proc/self/cgroup", f"0::{group}\n")
        write(f"sys/fs/cgroup{group}/cpu.max".replace("//", "/"), cpu_max + "\n")
    if v1 is not None:
        write("proc/self/cgroup", f"4:cpu,cpuacct:{group}\n")
        write(f"sys/fs/cgroup/cpu{group}/cpu.cfs_quota_us".replace("//", "/"), v1[0])
        write(f"sys/fs/cgroup/cpu{group}/cpu.cfs_period_us".replace("//", "/"), v1[1])
    for cpu, text in (siblings or {}).items():
        write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", text)
    for node, text in (nodes or {}).items():
        write(f"sys/devices/system/node/node{node}/cpulist", text)
    return root


@pytest.mark.parametrize(
    ("text", "workers"),
    [("400000 100000", 4), ("765000 100000", 7), ("50000 100000", 1), ("max 100000", 8), ("max", 8)],
)
def test_K39_quota_is_rounded_down(tmp_path: Path, text: str, workers: int) -> None:
    here = topology.read(machine(tmp_path, cpu_max=text))
    assert len(topology.worker_cpus(here)) == workers
    assert here.quota == (None if text.startswith("max") else workers)


def test_K39_quota_of_an_outer_group_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, cpu_max="max", group="/a/b")
    (root / "sys/fs/cgroup/a/cpu.max").write_text("300000 100000")
    (root / "sys/fs/cgroup/cpu.max").write_text("600000 100000")
    assert topology.read(root).quota == 3


@pytest.mark.parametrize(("quota", "cpus"), [("250000", 2), ("-1", None)])
def test_K39_version_1_files(tmp_path: Path, quota: str, cpus: int | None) -> None:
    assert topology.read(machine(tmp_path, v1=(quota, "100000"), group="/docker/x")).quota == cpus


def test_K39_no_files_means_no_limit(tmp_path: Path) -> None:
    here = topology.read(tmp_path)
    assert here.quota is None and here.allowed and here.cpu_model == "unknown" and here.huge_pages == "unknown"


def test_K39_affinity_mask(tmp_path: Path) -> None:
    here = topology.read(machine(tmp_path, allowed="0-3,9"))
    assert here.allowed == (0, 1, 2, 3, 9) and topology.worker_cpus(here) == (0, 1, 2, 3, 9)


@pytest.mark.parametrize("style", ["neighbours", "halves"])
def test_K39_physical_cores_come_first(tmp_path: Path, style: str) -> None:
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)] if style == "neighbours" else [(0, 4), (1, 5), (2, 6), (3, 7)]
    siblings = {cpu: f"{a},{b}" for a, b in pairs for cpu in (a, b)}
    here = topology.read(machine(tmp_path, siblings=siblings))
    assert here.num_cores == 4
    assert sorted(topology.worker_cpus(here)) == sorted(a for a, _ in pairs)
    assert here.order[:4] == tuple(sorted(a for a, _ in pairs))


def test_K39_siblings_outside_of_the_mask_do_not_count(tmp_path: Path) -> None:
    here = topology.read(machine(tmp_path, allowed="1,3", siblings={1: "0-1", 3: "2-3"}))
    assert here.num_cores == 2 and here.order == (1, 3)


def test_K39_an_explicit_number_wins_with_a_warning(tmp_path: Path) -> None:
    here = topology.read(machine(tmp_path, cpu_max="400000 100000"))
    with pytest.warns(UserWarning, match="num_workers 8 is more than the 4 CPUs .* quota 4"):
        assert len(topology.worker_cpus(here, 8)) == 8
    for wrong in (0, 10**6):
        with pytest.raises(ValueError, match=f"num_workers is {wrong}, expected at least 1 and at most 4096"):
            topology.worker_cpus(here, wrong)
    for wrong in (1.5, "2", True):
        with pytest.raises(TypeError, match=f"num_workers is {wrong!r}, expected an integer"):
            topology.worker_cpus(here, wrong)


def test_cores_can_be_reserved_for_the_driver(tmp_path: Path) -> None:
    here = topology.read(machine(tmp_path, allowed="0-3"))
    assert topology.worker_cpus(here, reserve=1) == (1, 2, 3)
    assert topology.worker_cpus(here, reserve=9) == (0,)
    with pytest.raises(ValueError, match="reserve is -1"):
        topology.worker_cpus(here, reserve=-1)


def test_numa_nodes(tmp_path: Path) -> None:
    here = topology.read(machine(tmp_path, allowed="2-5", nodes={0: "0-3", 1: "4-7", 10: "8-9"}))
    assert here.numa == ((0, (2, 3)), (1, (4, 5))) and here.node_of(5) == 1 and here.node_of(99) == 0


def test_fewer_workers_than_cores_are_shared_out_over_the_nodes(tmp_path: Path) -> None:
    here = topology.read(machine(tmp_path, allowed="0-47", nodes={0: "0-23", 1: "24-47"}))
    chosen = topology.worker_cpus(here, 42)
    assert chosen == (*range(21), *range(24, 45))
    assert topology.worker_cpus(here) == tuple(range(48))
    assert [here.node_of(c) for c in topology.worker_cpus(here, 41, reserve=3)].count(0) == 21
    one = topology.read(machine(tmp_path / "one", allowed="0-7"))
    assert topology.worker_cpus(one, 5) == (0, 1, 2, 3, 4)


def test_this_machine_can_be_read() -> None:
    here = topology.read()
    assert here.allowed and here.usable >= 1 and set(here.order) == set(here.allowed)


FLAGS = frozenset(
    "avx2 fma f16c bmi2 avx512f avx512bw avx512dq avx512vl avx512cd avx512_vnni avx512_bf16 amx_tile amx_bf16".split()
)


def test_levels_follow_the_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "tile_permission", lambda: True)
    assert isa.detect(FLAGS, "").level == "amx_bf16"
    assert isa.detect(FLAGS - {"amx_tile"}, "").level == "avx512_bf16"
    assert isa.detect(FLAGS - {"avx512_bf16"}, "").level == "avx512"
    assert isa.detect(FLAGS - {"avx512f"}, "").level == "avx2"
    bare = isa.detect(frozenset(), "")
    assert bare.level == "portable" and dict(bare.missing)["avx2"] == "the processor lacks avx2, fma, f16c, bmi2"


def test_amx_without_permission_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "tile_permission", lambda: False)
    choice = isa.detect(FLAGS, "")
    assert choice.level == "avx512_bf16" and "did not grant" in dict(choice.missing)["amx_bf16"]


def test_the_override_is_obeyed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(isa.ENVIRONMENT, "portable")
    assert isa.detect().level == "portable" and "asked for by name" in isa.detect().reason
    with pytest.raises(ValueError, match="isa 'avx2' cannot run here: the processor lacks avx2"):
        isa.detect(frozenset(), "avx2")
    with pytest.raises(ValueError, match="'mmx' is unknown; known levels: amx_bf16, avx512_bf16"):
        isa.detect(FLAGS, "mmx")
