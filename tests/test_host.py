"""Free memory of the host and of its GPUs, from the files and figures of the system."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("psutil")

from planner.units import GIB
from probes.runner.gpus_in_use import Card, Holder, card_of, in_use, visible_handles
from probes.runner.host import available_bytes, kernel_kills

SMALL = 10**6  # bytes: less than any machine has available


def files(root: Path, texts: dict[str, str]) -> Path:
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_container_leaves_what_its_control_group_does_not_hold(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pod"
    texts = {
        "proc/self/cgroup": "0::/pod/one\n",
        f"{group}/memory.max": "900000\n",
        f"{group}/memory.current": "600000\n",
        f"{group}/memory.stat": "anon 5\ninactive_file 100000\nactive_file 7\n",
        f"{group}/one/memory.max": "max\n",
        f"{group}/one/memory.current": "600000\n",
    }
    assert available_bytes(files(tmp_path, texts)) == 400000


def test_the_older_control_groups_are_read_too(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/pod"
    texts = {
        "proc/self/cgroup": "8:pids:/\n4:cpu,memory:/pod\n0::/\n",
        f"{group}/memory.limit_in_bytes": f"{SMALL}\n",
        f"{group}/memory.usage_in_bytes": "300000\n",
        f"{group}/memory.stat": "inactive_file 5\ntotal_inactive_file 200000\n",
    }
    assert available_bytes(files(tmp_path, texts)) == 900000


def test_a_group_that_has_given_all_leaves_nothing(tmp_path: Path) -> None:
    texts = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "5\n", "sys/fs/cgroup/memory.current": "9\n"}
    assert available_bytes(files(tmp_path, texts)) == 0


def test_without_control_groups_the_host_counts(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) > SMALL


def test_the_kernels_kills_are_counted(tmp_path: Path) -> None:
    assert kernel_kills(files(tmp_path, {"proc/vmstat": "oom_kill_x 9\noom_kill 3\nnr_free 1\n"})) == 3
    assert kernel_kills(tmp_path / "elsewhere") == 0


def card(free_bytes: int, *holders: Holder) -> Card:
    return Card(index=1, total_bytes=40 * GIB, free_bytes=free_bytes, holders=holders)


def test_a_card_of_which_less_is_free_than_was_promised_is_in_use() -> None:
    idle, used = card(40 * GIB - 5 * 2**20), card(30 * GIB)
    assert in_use((idle, used), 40 * GIB) == (used,)


def test_a_partly_used_card_is_free_where_only_the_rest_was_promised() -> None:
    assert in_use((card(30 * GIB),), 30 * GIB) == ()


def test_no_more_is_asked_of_a_card_than_it_has() -> None:
    assert in_use((card(40 * GIB),), 41 * GIB) == ()


def test_a_card_in_use_says_how_much_is_free_and_who_holds_the_rest() -> None:
    holders = Holder(process=7, name="python", used_bytes=9 * GIB), Holder(process=8, name="Xorg", used_bytes=0)
    assert card(30 * GIB, *holders).description == (
        "GPU 1 has 30.00 GiB of 40.00 GiB free; python (process 7) holds 9.00 GiB, Xorg (process 8) holds some of it"
    )
    assert card(30 * GIB).description.endswith("; no process that can be seen from here holds the rest")


NVML = SimpleNamespace(
    nvmlDeviceGetCount=lambda: 3,
    nvmlDeviceGetHandleByIndex=lambda index: index,
    nvmlDeviceGetHandleByUUID=lambda name: name,
)


@pytest.mark.parametrize(
    ("listed", "handles"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 ", [1]),
        ("1,-1,2", [1]),
        ("0,9,1", [0]),
        ("GPU-8a,MIG-b", ["GPU-8a", "MIG-b"]),
    ],
)
def test_the_cards_are_those_that_cuda_shows(listed: str | None, handles: list[object]) -> None:
    assert list(visible_handles(NVML, listed)) == handles  # type: ignore[arg-type]


def test_a_card_is_what_the_driver_counts_without_its_own_share() -> None:
    """A process that computes and draws is one holder; one whose bytes the driver hides (in a container) is none."""
    processes = [SimpleNamespace(pid=10**9, usedGpuMemory=5), SimpleNamespace(pid=10**9 + 1, usedGpuMemory=None)]
    nvml = SimpleNamespace(
        nvmlMemory_v2=2,
        nvmlDeviceGetMemoryInfo=lambda handle, version: SimpleNamespace(total=100, reserved=10, free=60),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: processes,
        nvmlDeviceGetGraphicsRunningProcesses=lambda handle: processes[:1],
    )
    found = card_of(nvml, 3, "handle")  # type: ignore[arg-type]
    assert (found.index, found.total_bytes, found.free_bytes) == (3, 90, 60)
    assert [(holder.process, holder.used_bytes) for holder in found.holders] == [(10**9, 5), (10**9 + 1, 0)]
    assert found.holders[0].name == "a process not seen from here"
