"""Exchange of the gradients of steps that autograd executes: a bucket begins as soon as backward has completed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from pg_tensile.errors import TrainingError
from pg_tensile.execution.distributed.all_reduce import ALL_REDUCE, WAIT, bucket_of


class EagerExchange:
    """Buckets of the gradients of `parameters`, exchanged among `ranks`: their names, in the order of backward."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], buckets: Sequence[Sequence[str]], ranks: int) -> None:
        self._parameters = parameters
        self._buckets = buckets
        self._ranks = ranks
        self._missing: list[int] | None = None  # gradients of each bucket; None while nothing is exchanged
        self._begun: list[Tensor] = []
        for number, names in enumerate(buckets):
            for name in names:
                parameters[name].register_post_accumulate_grad_hook(partial(self._arrived, number))

    def begin(self, share: float, arrived: bool = False) -> None:
        """Exchange the gradients of the backward pass that comes now or, if they have `arrived`, those that are there.

        `share`: the rank's part of the batch's rows."""
        self._share = torch.tensor(share, dtype=torch.float64)
        self._turn = torch.zeros((), dtype=torch.int64)
        self._begun = []
        self._missing = [0 if arrived else len(names) for names in self._buckets]
        self._begin_complete()

    def end(self) -> None:
        """Wait until all gradients are averages. Raises TrainingError unless they are those of the buckets."""
        self._missing = None
        there = {name for name, parameter in self._parameters.items() if parameter.grad is not None}
        different = there ^ {name for names in self._buckets for name in names}
        if different:
            hint = "Train it as a single process."
            raise TrainingError(f'not every step has a gradient of "{min(different)}", which ranks need', hint=hint)
        for bucket in self._begun:
            WAIT(bucket, self._turn)

    def _arrived(self, number: int, parameter: Tensor) -> None:
        if self._missing is not None:
            self._missing[number] -= 1
            self._begin_complete()

    @torch.no_grad()
    def _begin_complete(self) -> None:
        """Begin the buckets that are complete, in their order, which all ranks have in common."""
        assert self._missing is not None
        while len(self._begun) < len(self._buckets) and not self._missing[len(self._begun)]:
            parameters = [self._parameters[name] for name in self._buckets[len(self._begun)]]
            bucket, views = bucket_of([parameter.grad for parameter in parameters if parameter.grad is not None])
            for parameter, view in zip(parameters, views, strict=True):
                parameter.grad = view
            self._begun.append(bucket)
            ALL_REDUCE(bucket, self._turn, self._share, self._ranks)
