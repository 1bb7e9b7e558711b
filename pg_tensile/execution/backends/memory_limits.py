"""Hard limit of the device memory that this process takes, where the driver or the kernel offers one.

Both limit a control group (cgroup v2): NVML by nvmlDeviceSetMemoryLimits_v1, from driver 615 on and with root's rights
only, and Linux 6.14 by the controller dmem, for devices whose driver takes part in it. As such a limit holds for all
processes of a group, it is set for a group with no other process: the one that this process is in, or a new one below.

The limit of PyTorch's allocator (runtime/allocator_limit.py) is the one that a job works with. The hard one is higher,
so only memory that the allocator does not know can reach it. Written by NVIDIA's and the kernel's documentation, and
tried with stand-ins for both.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from pg_tensile.execution.backends import nvml

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
PREFIX = "pg_tensile-"  # of groups that processes make for themselves, followed by their number


class HardLimit:
    """The limit of this process on one device, whose PCI address is `address` ("0000:65:00.0").

    `enforced_by` is "driver" or "kernel", None if neither offers to enforce it. `obstacle` is why it could not
    be set, None if it could or was not asked for."""

    def __init__(self, device: torch.device, address: str) -> None:
        self.obstacle: str | None = None
        self._device = device
        self._group = group_of_process()
        self._region = dmem_region(address)
        self._has_entered = False  # a group with no other process
        self.enforced_by = self._probe()

    def _probe(self) -> str | None:
        group = self._group
        if group is None:
            return None
        if nvml.ask(self._device, lambda library, handle: _offers_limits(library, handle, group)):
            return "driver"
        if self._region is not None and (group / "dmem.max").exists():
            return "kernel"
        return None

    def set(self, nbytes: int | None) -> bool:
        """Limit the process to `nbytes`, or None for no limit; return whether that succeeded."""
        if self.enforced_by is None or self.obstacle is not None:
            return False
        if nbytes is None and not self._has_entered:
            return True
        try:
            if self._group is not None and not self._has_entered:
                with entering(self._group) as own:
                    self._apply(own, nbytes)
                self._group, self._has_entered = own, True
            elif self._group is not None:
                self._apply(self._group, nbytes)
        except OSError as error:
            self.obstacle = f"the {self.enforced_by} does not limit the device memory of the process: {error}"
            return False
        return True

    def _apply(self, group: Path, nbytes: int | None) -> None:
        if self.enforced_by == "driver":
            self._tell_driver(group, nbytes)
        else:
            (group / "dmem.max").write_text(f"{self._region} {'max' if nbytes is None else nbytes}\n")

    def _tell_driver(self, group: Path, nbytes: int | None) -> None:
        def limit(library: Any, handle: Any) -> str:
            """Return why the driver refuses, or nothing."""
            most = library.NVML_DEVICE_MEMORY_LIMIT_MAX if nbytes is None else nbytes
            limits = library.c_nvmlSetMemoryLimits_v1_t(str(group).encode(), 0, most)
            try:
                library.nvmlDeviceSetMemoryLimits_v1(handle, limits)
            except library.NVMLError as error:
                return str(error)
            return ""

        refusal = nvml.ask(self._device, limit)
        if refusal != "":
            raise OSError(refusal or "NVML does not answer")


hard_limit = cache(HardLimit)


def group_of_process() -> Path | None:
    """Return the folder of this process's control group; None without cgroup v2."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return None
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), None)
    folder = None if path is None else GROUPS / path
    return folder if folder is not None and (folder / "cgroup.procs").exists() else None


@contextlib.contextmanager
def entering(group: Path) -> Iterator[Path]:
    """Yield the group if this process is alone in it, or else a new one below it, which it enters at the end.

    Raises OSError, and removes the new group after any error."""
    if set((group / "cgroup.procs").read_text().split()) == {str(os.getpid())}:
        yield group
        return
    for left in group.glob(f"{PREFIX}*"):  # of processes that have ended; the others cannot be removed
        with contextlib.suppress(OSError):
            left.rmdir()
    own = group / f"{PREFIX}{os.getpid()}"
    own.mkdir()
    try:
        yield own
        (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    except OSError:
        own.rmdir()
        raise


def dmem_region(address: str) -> str | None:
    """Return the name that the kernel's controller has for the memory of the device at a PCI address, or None."""
    try:
        regions = [line.split()[0] for line in (GROUPS / "dmem.capacity").read_text().splitlines() if line.strip()]
    except OSError:
        return None
    return next((region for region in regions if address in region.split("/")), None)


def _offers_limits(library: Any, handle: Any, group: Path) -> bool:
    """Return whether NVML knows limits of a group; reading them needs no rights. Raises NVMLError if it does not."""
    if not hasattr(library, "nvmlDeviceGetMemoryLimits_v1"):
        return False
    library.nvmlDeviceGetMemoryLimits_v1(handle, library.c_nvmlGetMemoryLimits_v1_t(str(group).encode()))
    return True
