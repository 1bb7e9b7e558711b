"""Group of the ranks of one job: which one this process is, its part of the rows, and what they tell each other.

All ranks call the same methods in the same order. With a single rank nothing is exchanged, and no process group is
needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from pg_tensile.errors import TrainingError
from pg_tensile.execution.distributed.all_reduce import check_group

T = TypeVar("T")


def is_grouped() -> bool:
    """Return whether this process is in torch.distributed's default group."""
    return dist.is_available() and dist.is_initialized()


def rank_here(ranks: int) -> int:
    """Return the number of this process among `ranks`; 0, the rank with the most rows, outside a process group."""
    return dist.get_rank() if ranks > 1 and is_grouped() else 0


def part_of(rows: int, rank: int, ranks: int) -> slice:
    """Return the rows of one rank: neighbouring ones, at most one more than those of the ranks after it."""
    each, rest = divmod(rows, ranks)
    first = rank * each + min(rank, rest)
    return slice(first, first + each + (rank < rest))


def rows_here(rows: int, ranks: int) -> int:
    """Return the number of rows of this process's rank."""
    part = part_of(rows, rank_here(ranks), ranks)
    return part.stop - part.start


def check_alike(what: str, text: str) -> None:
    """Raise TrainingError, on every rank, unless all ranks of the process group pass the same text about `what`."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    different = next((rank for rank, other in enumerate(texts) if other != texts[0]), None)
    if different is not None:
        hint = "Start all ranks with the same model, settings, data, and versions of Python and PyTorch."
        detail = f"rank 0: {texts[0]}\nrank {different}: {texts[different]}"
        raise TrainingError(f"ranks 0 and {different} differ in {what}", hint=hint, detail=detail)


class Group:
    """The `size` ranks of a job; this process is number `rank`. Raises ExecutorError if it is in no such group."""

    def __init__(self, size: int = 1) -> None:
        if size > 1:
            check_group(size)
        self.size = size
        self.rank = rank_here(size)

    def summed(self, numbers: Sequence[float]) -> list[float]:
        """Return the sums over all ranks, in float64."""
        if self.size == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        sums: list[float] = total.tolist()
        return sums

    def collected(self, value: T) -> list[T]:
        """Return the values of all ranks, objects that can be pickled, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the rows of all ranks' tensors, in the order of the ranks; one without rows may pass none."""
        parts = self.collected({name: tensor.cpu() for name, tensor in tensors.items()})
        names = dict.fromkeys(name for part in parts for name in part)
        return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}

    def of_first(self, value: T) -> T:
        """Return the value of rank 0, an object that can be pickled."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values)
        first: T = values[0]
        return first

    def tensors_of_first(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of rank 0, on the devices of this rank's; all ranks have the same names and layouts."""
        return {name: self._of_first(tensor) for name, tensor in tensors.items()}

    def _of_first(self, tensor: Tensor) -> Tensor:
        copy = tensor.detach().to(self._device, copy=True).contiguous()
        dist.broadcast(copy, 0)
        return copy.to(tensor.device)

    def check_alike(self, what: str, parts: Iterable[object]) -> None:
        """Raise TrainingError unless all ranks pass the same text about `what`."""
        if self.size > 1:
            check_alike(what, ", ".join(map(str, parts)))

    def seed(self, seed: int) -> int:
        """Return the seed of this rank's random numbers: another one for each rank, and `seed` itself for a single."""
        if self.size == 1:
            return seed
        sequence = np.random.SeedSequence([seed & 0xFFFFFFFFFFFFFFFF, self.rank])
        return int(sequence.generate_state(1, np.uint64)[0] >> np.uint64(1))

    @property
    def _device(self) -> torch.device:
        """The device of what is exchanged: the host, if the process group's backend can."""
        if "cpu:" in dist.get_backend_config():
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())
