"""Moves of tensors on a device to given addresses, which may lie where others of them are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Move(NamedTuple):
    """Bytes that move; `scratch` is where they wait, as an offset into the scratch memory, None if they need not."""

    source: int
    target: int
    size: int
    scratch: int | None = None


class Order(NamedTuple):
    """`first` moves, in order, to the scratch memory or, without, to their targets; `last` from the scratch memory."""

    first: list[Move]
    last: list[Move]
    scratch_bytes: int


class Relocation:
    """Moves of the contents of `storages`, all on one device, to the addresses `targets`, as often as `run` is called.

    The memory at the targets must be the caller's to write. `scratch_bytes` is the device memory that is held for it.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage], targets: Sequence[int]) -> None:
        pairs = zip(storages, targets, strict=True)
        order = order_of([Move(s.data_ptr(), target, s.nbytes()) for s, target in pairs])
        self.scratch_bytes = order.scratch_bytes
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # target, source
        if not order.first:
            return
        device = storages[0].device
        scratch = torch.empty(order.scratch_bytes, dtype=torch.uint8, device=device)
        for move in order.first:
            source, target = _bytes_at(move.source, move.size, device), _bytes_at(move.target, move.size, device)
            waiting = None if move.scratch is None else scratch[move.scratch : move.scratch + move.size]
            self._copies.append((target if waiting is None else waiting, source))
        for move in order.last:
            assert move.scratch is not None
            waiting = scratch[move.scratch : move.scratch + move.size]
            self._copies.append((_bytes_at(move.target, move.size, device), waiting))

    def run(self) -> None:
        """Copy, on the current stream."""
        for target, source in self._copies:
            target.copy_(source)


def order_of(moves: Sequence[Move]) -> Order:
    """Order moves so that none overwrites what is still to be moved; those that go in circles take scratch memory."""
    waiting = [move for move in moves if move.source != move.target and move.size]
    first: list[Move] = []
    last: list[Move] = []
    scratch = 0
    while waiting:
        free = [move for move in waiting if not any(_overwrites(move, other) for other in waiting)]
        if free:
            first += free
            # Two targets do not overlap, so what is free stays free when another free one has moved.
            waiting = [move for move in waiting if move not in free]
            continue
        smallest = min(waiting, key=lambda move: move.size)
        waiting.remove(smallest)
        through = smallest._replace(scratch=scratch)
        scratch += smallest.size
        first.append(through)
        last.append(through)
    return Order(first, last, scratch)


def _overwrites(move: Move, other: Move) -> bool:
    return move.target < other.source + other.size and other.source < move.target + move.size


def _bytes_at(address: int, size: int, device: torch.device) -> torch.Tensor:
    """Return uint8[size] in memory that it does not own."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
