"""Names of devices on a Ray cluster: each job with ranks has one of its own, which stands for those of all its ranks.

`TENSILE_CLUSTER_PREFIX` in csrc/state/device.h and `tensile_internal._on_cluster` in sql/ have the same rule. Standard
library only.
"""

from __future__ import annotations

PREFIX = "ray:"


def cluster_device(job: int) -> str:
    """Return the name of the device of a job with ranks."""
    return f"{PREFIX}{job}"


def on_cluster(device: str) -> bool:
    """Return whether a device of that name is one of a Ray cluster, and none of this machine."""
    return device.startswith(PREFIX)
