"""Registry of the tensors on the device, checked against the budget."""

from __future__ import annotations

from collections.abc import Callable

from pg_tensile.errors import OutOfDeviceMemoryError


class Registry:
    """Bytes of each tensor on the device (`resident`, by key) and their sum (`in_use`).

    It belongs to one executor and is changed by one thread at a time. For tensors that operators create, the executor's
    loop updates `resident` and `in_use` itself, after checking the limit."""

    def __init__(self, budget_bytes: int | None, limit_memory: Callable[[int | None], None]) -> None:
        """`limit_memory` is called with the budget whenever it changes."""
        self.wanted_bytes = budget_bytes  # the budget that plans must fit; None means no limit
        self._limit_memory = limit_memory
        self._hold_to(budget_bytes)
        self.resident: dict[int, int] = {}
        self.in_use = 0

    def change_budget(self, budget_bytes: int) -> None:
        """Change the budget. Until `settle`, memory is checked against the larger of the old and the new one."""
        self.wanted_bytes = budget_bytes
        self._hold_to(None if self.budget_bytes is None else max(self.budget_bytes, budget_bytes))

    def settle(self) -> None:
        """Enforce the new budget from now on, after an iteration within it."""
        if self.budget_bytes != self.wanted_bytes:
            self._hold_to(self.wanted_bytes)

    def _hold_to(self, budget_bytes: int | None) -> None:
        self.budget_bytes = budget_bytes
        self.limit: float
        self.release_limit()
        self._limit_memory(budget_bytes)

    def release_limit(self) -> None:
        """Hold to the whole budget again, after steps that were held to less of it."""
        self.limit = float("inf") if self.budget_bytes is None else self.budget_bytes

    def check(self, requested: int, operator: Callable[[], str]) -> None:
        """Raise OutOfDeviceMemoryError if `requested` more bytes exceed the budget; `operator` returns its label."""
        if self.in_use + requested > self.limit:
            raise OutOfDeviceMemoryError(operator(), requested, self.in_use, self.budget_bytes)

    def add(self, tensor: int, size: int, operator: Callable[[], str]) -> None:
        """Register a tensor before it is allocated. Raises OutOfDeviceMemoryError as `check` does."""
        self.check(size, operator)
        self.resident[tensor] = size
        self.in_use += size

    def remove(self, tensor: int) -> None:
        self.in_use -= self.resident.pop(tensor, 0)  # 0 for a tensor that is loaded straight to the host

    def replace(self, resident: dict[int, int]) -> None:
        """Replace all entries by the tensors that are really resident."""
        self.resident = resident
        self.in_use = sum(resident.values())
