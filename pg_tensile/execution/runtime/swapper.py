"""Moves tensors between device and host memory (the Swap Executor of TENSILE, section III).

A tensor is one storage. Swapped out, its bytes lie in host memory and its storage is emptied, but the storage object
and the values on it (views, all of the same storage) are kept in a `Shell`; swapped in, the storage is filled again, so
every value is what it was. While a tensor is away its values are taken out of the executor's list: what reads it
nevertheless fails and does not touch freed memory.

An executor's graphs have a list of values each; a tensor that several of them use has values in all of their lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from pg_tensile.errors import LinkError
from pg_tensile.execution.runtime.compressed_copies import Chunks, HostCopy, Look
from pg_tensile.execution.runtime.device import Device, Transfer
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.planning.device.profile import Direction


class Shell(NamedTuple):
    """An emptied storage and the values on it, by place; None: a view that nobody has made yet."""

    storage: torch.UntypedStorage
    values: tuple[Any, ...]


class Moved(NamedTuple):
    """A transfer of the iteration. `step`: after which it was asked for (before which, if it is passive); −1: before
    the iteration, at a change of plan."""

    step: int
    tensor: int
    event: int
    transfer: Transfer
    passive: bool


class Waited(NamedTuple):
    """A wait for a transfer. `step`: before which (IN), after which (OUT)."""

    step: int
    tensor: int
    transfer: Transfer


class Swapper:
    """Where the tensors of one executor are. `places`: for each tensor, by key, the slots of its values in the lists of
    the graphs; the first of them shows the whole storage's object."""

    def __init__(self, device: Device, registry: Registry) -> None:
        self._device = device
        self._registry = registry
        self.places: dict[int, list[tuple[list[Any], int]]] = {}
        self._unmade: dict[int, list[Callable[[], None]]] = {}  # make a graph's views, once the tensor is there
        self.copies: dict[int, HostCopy] = {}  # tensor → its current host copy
        self.shells: dict[int, Shell] = {}  # tensors that are away
        self.moved: list[Moved] = []  # in this step
        self.waited: list[Waited] = []
        self.looks: dict[int, Look] | None = None  # at what is copied out, by tensor; None: nobody looks
        self._under_way: dict[int, tuple[Transfer, HostCopy]] = {}  # with the end that is on the host

    def forget_transfers(self) -> None:
        """A step begins."""
        self.moved.clear()
        self.waited.clear()

    def join(self, tensor: int, values: list[Any], slots: Sequence[int], make_views: Callable[[], None]) -> None:
        """Another graph uses a tensor that is there already. `make_views` fills all slots but the first from that."""
        base = self.value(tensor)
        shell = self.shells.get(tensor)
        self.places[tensor] += [(values, slot) for slot in slots]
        if shell is None:
            values[slots[0]] = base
            make_views()
        else:
            self.shells[tensor] = Shell(shell.storage, (*shell.values, base, *[None] * (len(slots) - 1)))
            self._unmade.setdefault(tensor, []).append(make_views)

    def value(self, tensor: int) -> torch.Tensor:
        """The first value of a tensor, on an empty storage if it is away."""
        shell = self.shells.get(tensor)
        values, slot = self.places[tensor][0]
        found: torch.Tensor = values[slot] if shell is None else shell.values[0]
        return found

    def storage(self, tensor: int) -> torch.UntypedStorage:
        """The storage of a tensor, empty if it is away."""
        return self.value(tensor).untyped_storage()

    # ---- going ----

    def drop(self, tensor: int) -> None:
        """Frees a tensor for good: nothing refers to its storage afterwards."""
        for values, slot in self.places[tensor]:
            values[slot] = None
        self._registry.remove(tensor)

    def empty(self, tensor: int) -> None:
        """Frees the memory of a tensor that comes back from its host copy."""
        storage = self.storage(tensor)
        places = self.places[tensor]
        self.shells[tensor] = Shell(storage, tuple(values[slot] for values, slot in places))
        for values, slot in places:
            values[slot] = None
        storage.resize_(0)
        self._registry.remove(tensor)

    def copy_out(
        self, tensor: int, target: torch.Tensor, step: int = -1, event: int = -1, delay_us: int = 0, codec: int = 0
    ) -> None:
        """Starts a copy to `target` in host memory, coded if `codec` is not 0. The tensor may be read, and neither
        written nor freed, until `wait_out`."""
        self.copies.pop(tensor, None)
        value, look = self.value(tensor), None
        chunks = Chunks.of(codec, value) if codec else None
        if self.looks is not None:
            look = self.looks[tensor] = Look(value.element_size())
        transfer = self._device.copy_out(bytes_of(value.untyped_storage()), target, delay_us, chunks, look)
        self._under_way[tensor] = (transfer, HostCopy(target, chunks))
        self.moved.append(Moved(step, tensor, event, transfer, False))

    def wait_out(self, tensor: int, step: int = -1) -> None:
        """Waits for the copy, which is the current one from here on."""
        transfer, copy = self._under_way[tensor]
        self._device.wait(transfer)
        del self._under_way[tensor]
        self.copies[tensor] = copy
        self.waited.append(Waited(step, tensor, transfer))

    # ---- coming ----

    def allocate(self, tensor: int, operator: Callable[[], str]) -> None:
        """Makes room for a tensor that is away. Raises OutOfDeviceMemoryError that names `operator`."""
        size = self.copies[tensor].memory.numel()
        self._registry.add(tensor, size, operator)
        self.shells[tensor].storage.resize_(size)

    def copy_in(self, tensor: int, step: int = -1, event: int = -1, delay_us: int = 0, passive: bool = False) -> None:
        """Starts the copy into the room made by `allocate`."""
        source = self.copies[tensor]
        target = bytes_of(self.shells[tensor].storage)
        transfer = self._device.copy_in(source.memory, target, delay_us, source.chunks)
        self._under_way[tensor] = (transfer, source)
        self.moved.append(Moved(step, tensor, event, transfer, passive))

    def wait_in(self, tensor: int, step: int = -1) -> None:
        """Waits for the copy; the tensor's values are there from here on."""
        transfer, _ = self._under_way[tensor]
        self._device.wait(transfer)
        del self._under_way[tensor]
        self._fill(tensor)
        self.waited.append(Waited(step, tensor, transfer))

    def _fill(self, tensor: int) -> None:
        """In an order in which an interrupt at any point loses no view: the tensor counts as away until all are made,
        and making them again does no harm."""
        for (values, slot), value in zip(self.places[tensor], self.shells[tensor].values, strict=True):
            values[slot] = value
        for make_views in self._unmade.get(tensor, ()):
            make_views()
        del self.shells[tensor]
        self._unmade.pop(tensor, None)

    def bring_in(self, tensor: int, operator: Callable[[], str], step: int = -1) -> None:
        """A passive swap-in: what is not there is brought in while the compute waits."""
        self.allocate(tensor, operator)
        self.copy_in(tensor, step, passive=True)
        self.wait_in(tensor, step)

    # ---- the end ----

    def clear(self) -> None:
        """Forgets every tensor."""
        for tensors in (self.places, self._unmade, self.copies, self.shells):
            tensors.clear()

    # ---- after a failure ----

    def settle(self) -> None:
        """Brings every transfer under way to an end, and every tensor to a place: either on the device or away with a
        host copy. What failed to come in is away, what failed to go out is on the device."""
        for tensor in tuple(self._under_way):
            transfer, _ = self._under_way.pop(tensor)
            try:
                self._device.wait(transfer)
            except LinkError:
                continue
            if transfer.direction == Direction.IN:
                self._fill(tensor)
        for tensor, shell in self.shells.items():
            for values, slot in self.places[tensor]:
                values[slot] = None
            shell.storage.resize_(0)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The whole storage as uint8[bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
