"""Limits of control groups, in folders like the kernel's, of containers and of machines."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from pg_tensile.memory_limit import memory_bytes
from tests.repository import REPOSITORY

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V2 = "30 24 0:26 {top} /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate"
V1 = "35 30 0:30 {top} /sys/fs/cgroup/memory ro,nosuid - cgroup cgroup rw,memory"
OTHERS = "24 1 8:1 / / rw shared:1 - ext4 /dev/vda rw\n36 30 0:31 / /sys/fs/cgroup/cpu ro - cgroup cgroup rw,cpu"
NO_LIMIT_V1 = str(2**63 - 4096)


def lay_out(root: Path, cgroup: str, mounts: list[str], files: dict[str, str]) -> Path:
    texts = {"proc/self/cgroup": cgroup + "\n", "proc/self/mountinfo": "\n".join([OTHERS, *mounts]) + "\n"}
    for name, text in {**texts, **{f"sys/fs/cgroup/{name}": f"{limit}\n" for name, limit in files.items()}}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_version_2_in_a_container(tmp_path):
    """A container with a namespace of its own is the root of the tree that it sees."""
    assert memory_bytes(lay_out(tmp_path, "0::/", [V2.format(top="/")], {"memory.max": "268435456"})) == 256 << 20


def test_version_2_takes_the_lowest_limit_on_the_way_up(tmp_path):
    files = {
        "memory.max": "max",
        "system.slice/memory.max": "200000000",
        "system.slice/postgresql.service/memory.max": "300000000",
        "user.slice/memory.max": "1000",
    }
    root = lay_out(tmp_path, "0::/system.slice/postgresql.service", [V2.format(top="/")], files)
    assert memory_bytes(root) == 200_000_000


def test_version_1_in_a_container_that_sees_the_paths_of_the_machine(tmp_path):
    cgroup = "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/"
    root = lay_out(tmp_path, cgroup, [V1.format(top="/docker/abc")], {"memory/memory.limit_in_bytes": "400000000"})
    assert memory_bytes(root) == 400_000_000


def test_version_1_beside_an_empty_version_2(tmp_path):
    files = {"memory/a/memory.limit_in_bytes": "500000000", "memory/memory.limit_in_bytes": NO_LIMIT_V1}
    mounts = [V1.format(top="/"), V2.format(top="/").replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified ")]
    assert memory_bytes(lay_out(tmp_path, "4:memory:/a\n0::/", mounts, files)) == 500_000_000


def test_a_group_of_another_namespace_counts_as_the_mount_point(tmp_path):
    root = lay_out(tmp_path, "0::/../other", [V2.format(top="/mine")], {"memory.max": "600000000"})
    assert memory_bytes(root) == 600_000_000


@pytest.mark.parametrize("limit", ["max", NO_LIMIT_V1, str(1 << 60)])
def test_no_limit_is_the_machines_memory(tmp_path, limit):
    assert memory_bytes(lay_out(tmp_path, "0::/", [V2.format(top="/")], {"memory.max": limit})) == MACHINE


def test_the_machines_memory_where_there_are_no_control_groups(tmp_path):
    assert memory_bytes(tmp_path) == MACHINE
    assert memory_bytes(lay_out(tmp_path, "0::/", [], {})) == MACHINE


def test_nothing_else_asks_the_machine_for_its_memory():
    command = ["grep", "-rl", "--include=*.py", "SC_PHYS_PAGES", "pg_tensile", "pyworker", "benchmarks", "scripts"]
    files = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True).stdout.split()
    assert files == ["pg_tensile/memory_limit.py"]
