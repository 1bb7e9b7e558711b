"""Limit of the memory that this process may use: the machine's memory, or less in a container.

A control group (cgroup) and each of its ancestors may have a limit, while a container sees the memory of the whole
machine regardless. Version 2 keeps the limit in `memory.max`, version 1 in `memory.limit_in_bytes`; a machine may have
both mounted. PL/Python imports this module too, so it uses the standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the machine's memory or the lowest limit of the process's control groups, whichever is less, in bytes.

    `root` is the directory that contains /proc and /sys.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    try:
        groups = _groups((root / "proc/self/cgroup").read_text())
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return  # not Linux, or /proc is hidden
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        version = {"cgroup2": "2", "cgroup": "1"}.get(kind)
        if version is None or version not in groups or (version == "1" and "memory" not in options.split(",")):
            continue
        # Octal escapes need no decoding: they stand for white space, which no mount point of control groups contains.
        top, point = before.split(" ")[3:5]
        file = "memory.max" if version == "2" else "memory.limit_in_bytes"
        yield from _limits_below(root / point.lstrip("/"), _relative(groups[version], top), file)


def _groups(text: str) -> dict[str, PurePosixPath]:
    """Return the process's control group in the hierarchy of each version.

    The keys are "2" for version 2 and "1" for the memory controller of version 1.
    """
    groups = {}
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            groups["2"] = PurePosixPath(path)
        elif "memory" in controllers.split(","):
            groups["1"] = PurePosixPath(path)
    return groups


def _relative(group: PurePosixPath, top: str) -> PurePosixPath:
    """Return a group's path below the mount point, which shows the group `top` and its descendants."""
    try:
        return group.relative_to(top)
    except ValueError:
        return PurePosixPath()  # the path belongs to another namespace, so the mount point is the best guess


def _limits_below(mount: Path, group: PurePosixPath, file: str) -> Iterator[int]:
    for each in (group, *group.parents):
        try:
            limit = (mount / each / file).read_text().strip()
        except OSError:
            continue  # the root group of version 2 has no such file
        if limit.isdigit():
            yield int(limit)
