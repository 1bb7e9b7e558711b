"""Hard limits of a process, with stand-ins for the driver and for the files of cgroup v2."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from pg_tensile.execution.backends import memory_limits, nvml
from pg_tensile.execution.backends.memory_limits import HardLimit, dmem_region, entering, group_of_process
from pg_tensile.execution.runtime import allocator_limit
from pg_tensile.execution.runtime.allocator_limit import AllocatorLimit
from pg_tensile.planning.allocator_rules import MARGIN_BYTES
from tests.nvml import UUID, LimitingNvml, StandInNvml

DEVICE = torch.device("cuda", 0)
ADDRESS = "0000:65:00.0"
OWN = str(os.getpid())
Install = Callable[[StandInNvml], StandInNvml]


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The group of this process and another one."""
    folder = tmp_path / "groups" / "system.slice" / "postgresql"
    folder.mkdir(parents=True)
    (folder / "cgroup.procs").write_text(f"1\n{OWN}\n")
    (tmp_path / "cgroup").write_text("0::/system.slice/postgresql\n")
    monkeypatch.setattr(memory_limits, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(memory_limits, "MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(nvml, "_uuid", lambda device: UUID)
    return folder


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def install(stand_in: StandInNvml) -> StandInNvml:
        monkeypatch.setitem(sys.modules, "pynvml", cast(Any, stand_in))
        return stand_in

    install(StandInNvml({}))
    return install


def controlled(group: Path) -> None:
    """Let the kernel control the device memory of the group."""
    groups = memory_limits.GROUPS
    (groups / "dmem.capacity").write_text(f"drm/0000:08:00.0/vram 100\ndrm/{ADDRESS}/vram 200\n")
    (group / "dmem.max").write_text(f"drm/{ADDRESS}/vram max\n")


# ---- groups ----------------------------------------------------------------------------------------------------------


def test_the_group_is_that_of_cgroup_v2(group: Path, tmp_path: Path) -> None:
    assert group_of_process() == group
    (tmp_path / "cgroup").write_text("4:memory:/system.slice\n")
    assert group_of_process() is None
    (tmp_path / "cgroup").unlink()
    assert group_of_process() is None


def test_a_process_alone_keeps_its_group_and_any_other_enters_one_below(group: Path) -> None:
    ended = group / "pg_tensile-1"
    ended.mkdir()
    with entering(group) as entered:
        assert entered == group / f"pg_tensile-{OWN}" and not ended.exists()
        assert list(entered.iterdir()) == []
    assert (entered / "cgroup.procs").read_text().split() == [OWN]
    with entering(entered) as again:
        assert again == entered


def test_a_group_that_cannot_be_entered_is_removed(group: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(PermissionError), entering(group):
        pass
    assert [path.name for path in group.iterdir()] == ["cgroup.procs"]


def test_the_region_is_that_of_the_device(group: Path) -> None:
    assert dmem_region(ADDRESS) is None
    controlled(group)
    assert dmem_region(ADDRESS) == f"drm/{ADDRESS}/vram"
    assert dmem_region("0000:99:00.0") is None


# ---- limits ----------------------------------------------------------------------------------------------------------


def test_without_an_offer_nothing_is_limited(group: Path, install: Install) -> None:
    limit = HardLimit(DEVICE, ADDRESS)
    assert limit.enforced_by is None and not limit.set(1000) and limit.obstacle is None
    assert not (group / f"pg_tensile-{OWN}").exists()


def test_the_driver_limits_a_group_of_this_process_alone(group: Path, install: Install) -> None:
    driver = cast(LimitingNvml, install(LimitingNvml()))
    limit = HardLimit(DEVICE, ADDRESS)
    assert limit.enforced_by == "driver" and driver.limits == {}
    own = str(group / f"pg_tensile-{OWN}")
    assert limit.set(None) and driver.limits == {}, "there is nothing to be taken back"
    assert limit.set(1000) and driver.limits == {own: (0, 1000)}
    assert limit.set(2000) and driver.limits == {own: (0, 2000)}
    assert limit.set(None) and driver.limits == {own: (0, LimitingNvml.NVML_DEVICE_MEMORY_LIMIT_MAX)}
    assert driver.opened == 0


def test_a_refusal_is_kept_and_not_tried_again(group: Path, install: Install) -> None:
    install(LimitingNvml(refusal="Insufficient Permissions"))
    limit = HardLimit(DEVICE, ADDRESS)
    assert not limit.set(1000)
    assert limit.obstacle == ("the driver does not limit the device memory of the process: Insufficient Permissions")
    driver = cast(LimitingNvml, install(LimitingNvml()))
    assert not limit.set(1000) and driver.limits == {}
    assert [path.name for path in group.iterdir()] == ["cgroup.procs"]


def test_a_driver_that_does_not_answer_has_set_no_limit(
    group: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(LimitingNvml())
    limit = HardLimit(DEVICE, ADDRESS)

    def is_lost(library: StandInNvml) -> None:
        raise library.NVMLError("the driver is not loaded")

    monkeypatch.setattr(StandInNvml, "nvmlInit", is_lost)
    assert not limit.set(1000) and limit.obstacle is not None and limit.obstacle.endswith("NVML does not answer")


def test_the_kernel_limits_a_group_that_it_controls(group: Path, install: Install) -> None:
    (group / "cgroup.procs").write_text(f"{OWN}\n")
    controlled(group)
    limit = HardLimit(DEVICE, ADDRESS)
    assert limit.enforced_by == "kernel"
    assert limit.set(1000) and (group / "dmem.max").read_text() == f"drm/{ADDRESS}/vram 1000\n"
    assert limit.set(None) and (group / "dmem.max").read_text() == f"drm/{ADDRESS}/vram max\n"


# ---- beside the allocator's ------------------------------------------------------------------------------------------


def test_the_hard_limit_leaves_room_for_what_is_outside_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []
    hard = SimpleNamespace(set=limits.append, enforced_by="driver", obstacle=None)
    backend = SimpleNamespace(code_bytes=7, hard_limit=lambda device: hard)
    module = SimpleNamespace(set_per_process_memory_fraction=lambda fraction, device: None)
    monkeypatch.setattr(allocator_limit, "backend_of", lambda type: backend)
    monkeypatch.setattr(allocator_limit, "module_of", lambda device: module)
    monkeypatch.setattr(allocator_limit, "outside_bytes", lambda device: 500)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (1 << 40, 1 << 40))
    limit = AllocatorLimit(DEVICE)
    assert limit.enforced_by() is None
    limit.set(1, 1000)
    assert limit.enforced_by() == "allocator and driver"
    hard.obstacle = "the driver refuses"
    assert limit.enforced_by() == "allocator; the driver refuses"
    limit.set(2, None)
    limit.drop(2)
    monkeypatch.setattr(allocator_limit, "outside_bytes", lambda device: None)
    limit.set(1, 2000)
    limit.drop(1)
    known = 1000 + MARGIN_BYTES + 500 + 7
    assert limits == [known, None, known, None, None]
