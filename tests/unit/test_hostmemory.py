"""What host memory a process may take, by made-up cgroups; and that its heap does not grow."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from support_scripts import run_script

from tiermem import TierManager, given
from tiermem.runtime.memory import hostheap
from tiermem.runtime.memory.hostheap import HostHeap
from tiermem.runtime.memory.hostmemory import available_memory

MIB = 1 << 20
V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "36 29 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def machine(root: Path, groups: str, mounts: str, **files: dict[str, str]) -> Path:
    """Makes the files of ``/proc`` and of cgroups: names of folders with ``__`` for ``/``."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    (root / "proc/self/mountinfo").write_text("1 0 8:1 / / rw - ext4 /dev/a rw\n" + mounts)
    for folder, contents in files.items():
        place = root / "sys/fs/cgroup" / folder.replace("__", "/").removeprefix("top")
        place.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            (place / name.replace("_", ".", 1)).write_text(text)
    return root


def v2(limit: str, current: int, high: str = "max", cache: int = 0) -> dict[str, str]:
    return {
        "memory_max": f"{limit}\n",
        "memory_high": f"{high}\n",
        "memory_current": f"{current}\n",
        "memory_stat": f"anon {current - cache}\ninactive_file {cache}\n",
    }


def v1(limit: int, used: int, cache: int = 0) -> dict[str, str]:
    return {
        "memory_limit_in_bytes": f"{limit}\n",
        "memory_usage_in_bytes": f"{used}\n",
        "memory_stat": f"inactive_file 5\ntotal_inactive_file {cache}\n",
    }


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "expected"),
    [
        pytest.param("0::/a/b\n", V2, {"a__b": v2(str(900 * MIB), 100 * MIB)}, 800 * MIB, id="v2"),
        pytest.param(
            "0::/a/b\n",
            V2,
            {"a__b": v2("max", 100 * MIB), "a": v2(str(700 * MIB), 300 * MIB)},
            400 * MIB,
            id="a group around it",
        ),
        pytest.param(
            "0::/a\n",
            V2,
            {"a": v2(str(900 * MIB), 100 * MIB, high=str(500 * MIB))},
            400 * MIB,
            id="memory.high",
        ),
        pytest.param(
            "0::/a\n",
            V2,
            {"a": v2(str(900 * MIB), 600 * MIB, cache=200 * MIB)},
            500 * MIB,
            id="page cache can go",
        ),
        pytest.param("0::/a\n", V2, {"a": v2(str(MIB), 2 * MIB)}, 0, id="above its limit"),
        pytest.param(
            "0::/../other\n", V2, {"top": v2(str(600 * MIB), 100 * MIB)}, 500 * MIB, id="moved away"
        ),
        pytest.param(
            "4:cpu,memory:/docker/x\n",
            V1.replace("0:32 / ", "0:32 /docker/x "),
            {"memory": v1(700 * MIB, 200 * MIB, 100 * MIB)},
            600 * MIB,
            id="v1 in a container",
        ),
        pytest.param(
            "9:name=systemd:/\n4:memory:/x\n0::/\n",
            V1 + V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "),
            {"memory__x": v1(800 * MIB, 200 * MIB), "memory": v1(2**63 - 4096, 10**9)},
            600 * MIB,
            id="both, with the limit in v1",
        ),
        pytest.param("0::/a\n", V2, {"a": {"memory_max": "max"}}, 4000 * MIB, id="no limit"),
        pytest.param("4:cpu:/\n", V1, {}, 4000 * MIB, id="no memory cgroup"),
    ],
)
def test_the_memory_that_cgroups_allow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    mounts: str,
    files: dict[str, dict[str, str]],
    expected: int,
) -> None:
    free = psutil.virtual_memory()._replace(available=4000 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert available_memory(machine(tmp_path, groups, mounts, **files)) == expected


def test_without_proc_it_is_the_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = psutil.virtual_memory()._replace(available=4000 * MIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    assert available_memory(tmp_path) == 4000 * MIB


def test_default_budgets_keep_within_the_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(given, "available_memory", lambda: 800 * MIB)
    with TierManager(device="cpu") as manager:
        assert manager.stats().budget["dram"] == 400 * MIB
        assert manager.stats().budget["hbm"] == 100 * MIB
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # as torchrun tells each of its processes
    with TierManager(device="cpu") as manager:
        assert manager.stats().budget["dram"] == 100 * MIB


class Library:
    """Stands in for the C library."""

    def __init__(self) -> None:
        self.options: dict[int, int] = {}
        self.trims = 0

    def gnu_get_libc_version(self) -> bytes:
        return b"2.36"

    def mallopt(self, option: int, value: int) -> int:
        self.options[option] = value
        return 1

    def malloc_trim(self, pad: int) -> int:
        self.trims += 1
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    for name in ("GLIBC_TUNABLES", "MALLOC_MMAP_THRESHOLD_", "TIERMEM_MALLOC"):
        monkeypatch.delenv(name, raising=False)
    made = Library()
    monkeypatch.setattr(hostheap.ctypes, "CDLL", lambda name: made)
    return made


def looks(heap: HostHeap, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for size in sizes:
        monkeypatch.setattr(hostheap, "anonymous_nbytes", lambda size=size: size)
        for _ in range(4):
            heap.trim_if_grown()


def test_the_heap_is_trimmed_when_the_process_has_grown(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostheap, "anonymous_nbytes", lambda: 100 * MIB)
    heap = HostHeap()
    assert library.options == {-3: MIB, -1: 32 * MIB}
    looks(heap, [110 * MIB, 131 * MIB], monkeypatch)
    assert library.trims == 0
    looks(heap, [133 * MIB, 150 * MIB, 90 * MIB], monkeypatch)
    assert library.trims == 1
    looks(heap, [123 * MIB], monkeypatch)  # 33 more than after it had become smaller
    assert library.trims == 2


def test_large_processes_are_trimmed_as_they_grow_by_a_sixteenth(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostheap, "anonymous_nbytes", lambda: 1600 * MIB)
    heap = HostHeap()
    looks(heap, [1690 * MIB], monkeypatch)
    assert library.trims == 0
    looks(heap, [1701 * MIB], monkeypatch)
    assert library.trims == 1


@pytest.mark.parametrize(
    ("name", "value", "trims"),
    [
        ("MALLOC_MMAP_THRESHOLD_", "65536", 1),
        ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=65536", 1),
        ("TIERMEM_MALLOC", "keep", 0),
    ],
)
def test_what_the_user_says_of_malloc_is_kept(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str, value: str, trims: int
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(hostheap, "anonymous_nbytes", lambda: 100 * MIB)
    heap = HostHeap()
    looks(heap, [200 * MIB], monkeypatch)
    assert library.options == {}
    assert library.trims == trims


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostheap.ctypes, "CDLL", lambda name: object())
    heap = HostHeap()
    looks(heap, [1 << 40], monkeypatch)


GROWTH = """
import torch, tiermem
torch.manual_seed(0)
torch.set_num_threads(1)
anonymous = tiermem.runtime.memory.hostheap.anonymous_nbytes
model = torch.nn.Sequential(*[torch.nn.Linear(768, 768) for _ in range(8)])
before = anonymous()
tier = tiermem.TierManager(device="cpu", hbm="16MiB", dram="96MiB")
model = tier.wrap(model)
optimizer = tier.optimizer(model, torch.optim.AdamW)
for step in range(5):
    model(torch.randn(16, 768)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(anonymous() - before, flush=True)
"""


def test_the_memory_of_a_process_is_its_budgets_and_stays_so(tmp_path: Path) -> None:
    """With 18 MiB of weights it took twice the budgets after some steps, and more with each."""
    script = tmp_path / "growth.py"
    script.write_text(GROWTH)
    out = run_script(script, [], tmp_path, 240)
    sizes = [int(line) / MIB for line in out.split()]
    assert len(sizes) == 5
    assert max(sizes) < 16 + 96 + 64
    assert sizes[-1] - sizes[1] < 40
