"""What is on the device: the executor's books, held against the budget."""

from __future__ import annotations

from collections.abc import Callable

from pg_tensile.errors import OutOfDeviceMemoryError


class Registry:
    """The bytes of every tensor on the device, and of all of them. One executor's, one thread's.

    The executor's loop counts what operators create in `resident` and `in_use` itself, after `check`."""

    def __init__(self, budget_bytes: int | None) -> None:
        self.wanted_bytes = budget_bytes  # the budget that plans have to keep to
        self._hold_to(budget_bytes)
        self.resident: dict[int, int] = {}
        self.in_use = 0

    def change_budget(self, budget_bytes: int) -> None:
        """Until `settle`, the larger of the old and the new budget is what memory is held against."""
        self.wanted_bytes = budget_bytes
        self._hold_to(None if self.budget_bytes is None else max(self.budget_bytes, budget_bytes))

    def settle(self) -> None:
        """After an iteration within the new budget."""
        if self.budget_bytes != self.wanted_bytes:
            self._hold_to(self.wanted_bytes)

    def _hold_to(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.limit: float = float("inf") if budget_bytes is None else budget_bytes

    def check(self, requested: int, operator: Callable[[], str]) -> None:
        """Raises OutOfDeviceMemoryError if that many bytes more exceed the budget; `operator` names who asks."""
        if self.in_use + requested > self.limit:
            raise OutOfDeviceMemoryError(operator(), requested, self.in_use, self.budget_bytes)

    def add(self, tensor: int, size: int, operator: Callable[[], str]) -> None:
        """Counts a tensor before it is allocated. Raises OutOfDeviceMemoryError as `check` does."""
        self.check(size, operator)
        self.resident[tensor] = size
        self.in_use += size

    def remove(self, tensor: int) -> None:
        self.in_use -= self.resident.pop(tensor, 0)  # 0: while it is loaded

    def replace(self, resident: dict[int, int]) -> None:
        """Starts again from what is really there."""
        self.resident = resident
        self.in_use = sum(resident.values())
