"""Is memory that a container may not use left out of what is available?"""

import psutil
import pytest

from hf_specdec.host.memory import available_memory


def cgroup(folder, names, limit, used, droppable=0):
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {droppable}\ntotal_inactive_file {droppable}\n")


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.fixture
def membership(tmp_path):
    return tmp_path / "membership"


def test_a_limit_of_version_2_counts_what_the_kernel_would_drop(tmp_path, membership):
    membership.write_text("0::/job/step\n")
    cgroup(tmp_path / "job" / "step", V2, 1000, 300, droppable=100)
    assert available_memory(tmp_path, membership) == 800


def test_a_limit_further_up_counts(tmp_path, membership):
    membership.write_text("0::/job/step\n")
    cgroup(tmp_path / "job" / "step", V2, "max", 300)
    cgroup(tmp_path / "job", V2, 500, 400)
    assert available_memory(tmp_path, membership) == 100


def test_a_limit_of_version_1_counts_where_the_named_path_is_not_mounted(tmp_path, membership):
    membership.write_text("4:memory:/outside/name\n1:cpu:/\n0::/\n")
    cgroup(tmp_path / "memory", V1, 700, 200)
    assert available_memory(tmp_path, membership) == 500


def test_without_limits_it_is_what_the_machine_has(tmp_path, membership, monkeypatch):
    class Memory:
        available = 12345

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert available_memory(tmp_path, membership) == 12345
    membership.write_text("0::/\n")
    cgroup(tmp_path, V2, "max", 5)
    assert available_memory(tmp_path, membership) == 12345
