"""Rules of the allocator at hand, which plans count with: a few blocks are allocated and freed, in a stream of their
own, and PyTorch's statistics are compared with the planner's model (planning/plan/allocator.py).

If the model with the usual sizes does not hold, the sizes are taken from the statistics, and the model is tried again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch

from pg_tensile.errors import DeviceError
from pg_tensile.execution.runtime.allocator_limit import use_expandable_segments
from pg_tensile.planning.allocator_rules import DEFAULT_RULES, AllocatorRules
from pg_tensile.planning.plan.allocator import Allocator

_LARGEST_SMALL = 64 << 20  # up to which small blocks are looked for
_FREED = (3, 4, 1)  # blocks that are freed after the first sizes


def allocator_rules(device: torch.device) -> AllocatorRules:
    """Return the rules that PyTorch's allocator follows on the device; takes some 100 MiB there meanwhile.

    They are the default ones with `is_followed` False if the model holds with no sizes. Raises
    torch.OutOfMemoryError."""
    use_expandable_segments()
    if _follows(device, DEFAULT_RULES):
        return DEFAULT_RULES
    rules = _sizes(device)
    if rules is not None and _follows(device, rules):
        return rules
    return AllocatorRules(is_followed=False)


class _Blocks:
    """Blocks allocated here, and what the allocator counts since the beginning."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.held: dict[int, torch.Tensor] = {}
        self._before = self._counts()

    def allocate(self, number: int, nbytes: int) -> tuple[int, int]:
        """Allocate a block and return `taken`."""
        self.held[number] = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self.taken

    def free(self, number: int) -> tuple[int, int]:
        del self.held[number]
        return self.taken

    @property
    def taken(self) -> tuple[int, int]:
        """The bytes in blocks, and those taken from the device."""
        return tuple(now - before for now, before in zip(self._counts(), self._before, strict=True))  # type: ignore[return-value]

    def _counts(self) -> tuple[int, int]:
        return torch.accelerator.memory_allocated(self._device), torch.accelerator.memory_reserved(self._device)


@contextmanager
def _blocks(device: torch.device) -> Iterator[_Blocks]:
    torch.accelerator.empty_cache()
    blocks = _Blocks(device)
    try:
        with torch.Stream(device):
            yield blocks
    finally:
        blocks.held.clear()
        torch.accelerator.empty_cache()


def _follows(device: torch.device, rules: AllocatorRules) -> bool:
    """Return whether the allocator takes what the model says, at each of some steps."""
    small, page = rules.small_bytes, rules.large_page_bytes
    sizes = (1, rules.block_bytes + 1, small, small + 1, page // 2 + 1, page + 1, page // 4)
    model, modelled, rounded = Allocator(rules=rules), {}, 0
    with _blocks(device) as blocks:
        for number, size in enumerate(sizes):
            modelled[number] = model.allocate(size)
            rounded += modelled[number][2]
            if blocks.allocate(number, size) != (rounded, model.device_bytes):
                return False
        for number in _FREED:
            block = modelled.pop(number)
            model.free(block)
            rounded -= block[2]
            if blocks.free(number) != (rounded, model.device_bytes):
                return False
        for number, size in enumerate((page // 2, small + 1, 1, page), len(sizes)):  # into the gaps, and beside them
            modelled[number] = model.allocate(size)
            rounded += modelled[number][2]
            if blocks.allocate(number, size) != (rounded, model.device_bytes):
                return False
    return True


def _sizes(device: torch.device) -> AllocatorRules | None:
    """Return the sizes that the statistics show; None if they are no rules of this kind."""
    with _blocks(device) as blocks:
        block, small_page = blocks.allocate(0, 1)
        sizes = [size for power in range(64) if 1 << 16 <= (size := 1 << power) <= _LARGEST_SMALL]
        for smaller, larger in pairwise(sizes):
            if _is_small(device, smaller) and not _is_small(device, larger):
                torch.accelerator.empty_cache()  # so that pages are taken anew
                _, before = blocks.taken
                _, after = blocks.allocate(1, larger)
                try:
                    return AllocatorRules(block, smaller, small_page, after - before)
                except DeviceError:
                    return None
    return None


def _is_small(device: torch.device, nbytes: int) -> bool:
    """Return whether a block is in the segment for small ones."""
    name = "allocated_bytes.small_pool.current"
    before = torch.accelerator.memory_stats(device)[name]
    block = torch.empty(nbytes, dtype=torch.uint8, device=device)
    is_small = bool(torch.accelerator.memory_stats(device)[name] > before)
    del block
    return is_small
