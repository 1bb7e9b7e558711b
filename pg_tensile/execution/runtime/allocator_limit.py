"""Limit of the device memory that PyTorch's allocator takes in this process.

A job within its grant must not take memory that another one was granted. The allocator keeps what was freed, so without
a limit it would take more than the grant: it gives memory back only when the device has none left, and then only its
own. With a limit it does that when the limit is reached. Where the driver or the kernel offers to limit a process
(backends/memory_limits.py), they do so as well, at a higher limit, for memory that the allocator does not know.
"""

from __future__ import annotations

import os
import re
import threading
from functools import cache

import torch

from pg_tensile.execution.backends import backend_of, module_of, outside_bytes
from pg_tensile.planning.allocator_rules import MARGIN_BYTES, AllocatorRules

_EXPANDABLE = "expandable_segments"
_SETTING = re.compile(r"(\w+):(\[[^\]]*\]|[^,\[\]]+)")
_NOT_PLANNED = ("roundup_power2_divisions", "max_split_size_mb", "garbage_collection_threshold")


def use_expandable_segments() -> None:
    """Let the allocator's segments grow, as the plans assume, unless PYTORCH_ALLOC_CONF says something about it.

    Segments of fixed sizes would take still more of the device for plans that swap."""
    settings = _allocator_settings()
    if _EXPANDABLE not in settings:
        torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (settings, f"{_EXPANDABLE}:True"))))


def allocator_caution(rules: AllocatorRules) -> str | None:
    """Return a sentence for users if the allocator does not do what plans count with; None if it does.

    `rules` are those that were measured with the device."""
    settings = _SETTING.findall(_allocator_settings().replace(" ", ""))
    wrong = [
        f"{name}:{value}" for name, value in settings if name in _NOT_PLANNED or (name, value) == (_EXPANDABLE, "False")
    ]
    if wrong:
        what = f"PyTorch's allocator is set to {', '.join(wrong)} (PYTORCH_ALLOC_CONF), which plans do not count with"
    elif not rules.is_followed:
        what = "PyTorch's allocator does not take memory as plans expect"
    else:
        return None
    return f"{what}: a job may need more device memory than it is granted"


def _allocator_settings() -> str:
    if hasattr(torch._C, "_accelerator_getAllocatorSettings"):
        return torch._C._accelerator_getAllocatorSettings()
    names = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"  # PyTorch before 2.12 tells only what the environment says
    return next((os.environ[name] for name in names if name in os.environ), "")


class AllocatorLimit:
    """The limit on one device: the sum of what its users in this process may take, and a margin.

    A user may take `budget_bytes`, or without a budget anything."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._budgets: dict[int, int | None] = {}
        self._margin_bytes = MARGIN_BYTES
        self._most: int | None = None  # that the allocator may take
        self._lock = threading.Lock()

    def set(self, user: int, budget_bytes: int | None, margin_bytes: int = MARGIN_BYTES) -> None:
        """Set what a user may take. If that is less than before, cached memory is given back to the device.

        `margin_bytes` is that of the allocator's rules; the largest one counts from then on."""
        with self._lock:
            self._margin_bytes = max(self._margin_bytes, margin_bytes)
            before = self._budgets.get(user)
            self._budgets[user] = budget_bytes
            self._apply()
        if before is not None and budget_bytes is not None and budget_bytes < before:
            torch.accelerator.empty_cache()

    def drop(self, user: int) -> None:
        with self._lock:
            self._budgets.pop(user, None)
            self._apply()

    def _apply(self) -> None:
        fraction, budgets, most = 1.0, list(self._budgets.values()), None
        if budgets and None not in budgets:
            most = sum(filter(None, budgets)) + self._margin_bytes
            _, total = torch.accelerator.get_memory_info(self._device)
            # half a byte more, as the allocator rounds the product of fraction and total down
            fraction = min(1.0, (most + 0.5) / total)
        module_of(self._device).set_per_process_memory_fraction(fraction, self._device)
        self._most = most
        self._apply_hard(most)

    def _apply_hard(self, most: int | None) -> None:
        """Have the driver limit what this process takes of the device, if it can: `most`, and room for what is outside
        the allocator, with code that libraries still load."""
        backend = backend_of(self._device.type)
        limit = backend.hard_limit(self._device)
        if limit is None:
            return
        outside = None if most is None else outside_bytes(self._device)
        limit.set(None if most is None or outside is None else most + outside + backend.code_bytes)

    def enforced_by(self) -> str | None:
        """Return what keeps this process within its limit, "allocator and driver" for example; None without a limit."""
        if self._most is None:
            return None
        hard = backend_of(self._device.type).hard_limit(self._device)
        if hard is None:
            return "allocator"
        return f"allocator and {hard.enforced_by}" if hard.obstacle is None else f"allocator; {hard.obstacle}"


_limit_of = cache(AllocatorLimit)


def limit_enforced_by(device: torch.device) -> str | None:
    """Return what keeps this process within its limit on a device (with its index); None if it has none."""
    return _limit_of(device).enforced_by()


def allocator_limit(device: torch.device) -> AllocatorLimit:
    """Return the limit of a device (with its index) in this process, whose allocator has expandable segments from then
    on."""
    use_expandable_segments()
    return _limit_of(device)
