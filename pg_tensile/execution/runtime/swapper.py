"""Swapper: moves tensors between device and host memory (the Swap Executor of TENSILE, section III).

A tensor is one storage. When it is swapped out, its bytes are copied to host memory and its storage is emptied, but the
storage object and the values on it (views, all of the same storage) are kept in a `Shell`; a swap-in fills the storage
again, so every value is what it was. While a tensor is off the device, its values are removed from the executor's list:
an operator that reads it nevertheless fails, instead of touching freed memory.

Each graph of an executor has a list of values; a tensor that several graphs use has values in each of their lists.
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
    """An emptied storage and the values on it, in the order of `Swapper.positions`; None is a view not created yet."""

    storage: torch.UntypedStorage
    values: tuple[Any, ...]


class Moved(NamedTuple):
    """A transfer of the iteration. `step` is the step after which it was requested (before which, if passive), −1 if
    before the iteration, at a change of plan; `event` is the index into the plan, −1 if none."""

    step: int
    tensor: int
    event: int
    transfer: Transfer
    passive: bool


class Waited(NamedTuple):
    """A wait for a transfer, before `step` for a swap-in, after it for a swap-out; −1 as in `Moved`."""

    step: int
    tensor: int
    transfer: Transfer


class Swapper:
    """Location of each tensor of one executor, and its transfers.

    `positions` maps each tensor's key to the positions (list, slot) of its values in the lists of the graphs; the
    storage is taken from the first."""

    def __init__(self, device: Device, registry: Registry) -> None:
        self._device = device
        self._registry = registry
        self.positions: dict[int, list[tuple[list[Any], int]]] = {}
        self._unmade: dict[int, list[Callable[[], None]]] = {}  # create a graph's views once the tensor is resident
        self.copies: dict[int, HostCopy] = {}  # tensor → its current host copy
        self.shells: dict[int, Shell] = {}  # tensors off the device that come back
        self.moved: list[Moved] = []  # in this iteration
        self.waited: list[Waited] = []
        self.looks: dict[int, Look] | None = None  # samples of what is copied out, by tensor; None for no samples
        self._under_way: dict[int, tuple[Transfer, HostCopy]] = {}  # in flight, with the copy on the host

    def forget_transfers(self) -> None:
        """Forget the transfers of the last iteration, when the next one begins."""
        self.moved.clear()
        self.waited.clear()

    def join(self, tensor: int, values: list[Any], slots: Sequence[int], make_views: Callable[[], None]) -> None:
        """Add the slots of another graph that uses a tensor; `make_views` fills all but the first from that one."""
        base = self.value(tensor)
        shell = self.shells.get(tensor)
        self.positions[tensor] += [(values, slot) for slot in slots]
        if shell is None:
            values[slots[0]] = base
            make_views()
        else:
            self.shells[tensor] = Shell(shell.storage, (*shell.values, base, *[None] * (len(slots) - 1)))
            self._unmade.setdefault(tensor, []).append(make_views)

    def value(self, tensor: int) -> torch.Tensor:
        """Return the first value of a tensor; its storage is empty if the tensor is off the device."""
        shell = self.shells.get(tensor)
        values, slot = self.positions[tensor][0]
        value: torch.Tensor = values[slot] if shell is None else shell.values[0]
        return value

    def storage(self, tensor: int) -> torch.UntypedStorage:
        """Return the storage of a tensor, empty if the tensor is off the device."""
        return self.value(tensor).untyped_storage()

    # ---- swap out ----

    def drop(self, tensor: int) -> None:
        """Free a tensor for good: no value refers to its storage afterwards."""
        for values, slot in self.positions[tensor]:
            values[slot] = None
        self._registry.remove(tensor)

    def empty(self, tensor: int) -> None:
        """Free the device memory of a tensor that is swapped in again later."""
        storage = self.storage(tensor)
        positions = self.positions[tensor]
        self.shells[tensor] = Shell(storage, tuple(values[slot] for values, slot in positions))
        for values, slot in positions:
            values[slot] = None
        storage.resize_(0)
        self._registry.remove(tensor)

    def copy_out(
        self, tensor: int, target: torch.Tensor, step: int = -1, event: int = -1, delay_us: int = 0, codec: int = 0
    ) -> None:
        """Start a copy to `target` in host memory, compressed if `codec` is not 0. Until `wait_out` the tensor may be
        read, but neither written nor freed."""
        self.copies.pop(tensor, None)
        value, look = self.value(tensor), None
        chunks = Chunks.of(codec, value) if codec else None
        if self.looks is not None:
            look = self.looks[tensor] = Look(value.element_size())
        transfer = self._device.copy_out(bytes_of(value.untyped_storage()), target, delay_us, chunks, look)
        self._under_way[tensor] = (transfer, HostCopy(target, chunks))
        self.moved.append(Moved(step, tensor, event, transfer, False))

    def wait_out(self, tensor: int, step: int = -1) -> None:
        """Wait for the copy out, which becomes the tensor's current host copy."""
        transfer, copy = self._under_way[tensor]
        self._device.wait(transfer)
        del self._under_way[tensor]
        self.copies[tensor] = copy
        self.waited.append(Waited(step, tensor, transfer))

    # ---- swap in ----

    def allocate(self, tensor: int, operator: Callable[[], str]) -> None:
        """Allocate device memory for a tensor to be swapped in. Raises OutOfDeviceMemoryError that names `operator`."""
        size = self.copies[tensor].memory.numel()
        self._registry.add(tensor, size, operator)
        self.shells[tensor].storage.resize_(size)

    def copy_in(self, tensor: int, step: int = -1, event: int = -1, delay_us: int = 0, passive: bool = False) -> None:
        """Start the copy into the device memory that `allocate` provided."""
        source = self.copies[tensor]
        target = bytes_of(self.shells[tensor].storage)
        transfer = self._device.copy_in(source.memory, target, delay_us, source.chunks)
        self._under_way[tensor] = (transfer, source)
        self.moved.append(Moved(step, tensor, event, transfer, passive))

    def wait_in(self, tensor: int, step: int = -1) -> None:
        """Wait for the copy in, and restore the tensor's values."""
        transfer, _ = self._under_way[tensor]
        self._device.wait(transfer)
        del self._under_way[tensor]
        self.fill(tensor)
        self.waited.append(Waited(step, tensor, transfer))

    def fill(self, tensor: int) -> None:
        """Restore the values of a tensor, in an order in which an interrupt at any point loses no view: the tensor has
        its shell until all views are made, and making them twice does no harm."""
        for (values, slot), value in zip(self.positions[tensor], self.shells[tensor].values, strict=True):
            values[slot] = value
        for make_views in self._unmade.get(tensor, ()):
            make_views()
        del self.shells[tensor]
        self._unmade.pop(tensor, None)

    def bring_in(self, tensor: int, operator: Callable[[], str], step: int = -1) -> None:
        """Swap a tensor in passively, that is, while the compute waits."""
        self.allocate(tensor, operator)
        self.copy_in(tensor, step, passive=True)
        self.wait_in(tensor, step)

    def refill(self, tensor: int, source: torch.Tensor) -> None:
        """Overwrite a tensor on the device by uint8[bytes] in host memory."""
        self._device.wait(self._device.copy_in(source, bytes_of(self.storage(tensor))))

    # ---- the end ----

    def clear(self) -> None:
        """Forget every tensor."""
        for tensors in (self.positions, self._unmade, self.copies, self.shells):
            tensors.clear()

    # ---- after a failure ----

    def restore(self, copies: dict[int, HostCopy], shells: dict[int, Shell]) -> None:
        """Return to the locations before an iteration that was not executed, in which no other tensor was emptied."""
        self.forget_transfers()
        self._under_way.clear()
        self.copies, self.shells = copies, shells
        self._empty_shells()

    def settle(self) -> None:
        """Complete every transfer in flight, and leave every tensor either resident or swapped out.

        After a failed swap-in a tensor is swapped out, after a failed copy out it is resident."""
        for tensor in tuple(self._under_way):
            transfer, _ = self._under_way.pop(tensor)
            try:
                self._device.wait(transfer)
            except LinkError:
                continue
            if transfer.direction == Direction.IN:
                self.fill(tensor)
        self._empty_shells()

    def _empty_shells(self) -> None:
        for tensor, shell in self.shells.items():
            for values, slot in self.positions[tensor]:
                values[slot] = None
            shell.storage.resize_(0)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the whole storage as uint8[bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
