"""Operator `pg_tensile::all_reduce_`: a bucket of gradients, averaged in place over all ranks.

It is a collective of torch.distributed: every rank executes the same collectives in the same order, whatever its plan,
or all of them wait for each other. So each collective of a step changes one tensor, the step's `turn`, and by the rules
for tensors that are changed in place no plan reorders two of them, and none executes one a second time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pg_tensile.errors import ExecutorError

_LIBRARY = torch.library.Library("pg_tensile", "DEF")
_LIBRARY.define("all_reduce_(Tensor(a!)[] gradients, Tensor(b!) turn, Tensor share, int ranks) -> ()")


def _all_reduce_(gradients: Sequence[Tensor], turn: Tensor, share: Tensor, ranks: int) -> None:
    """Replace each gradient by the sum over all ranks of `share` times the rank's gradient.

    `gradients` are of one type, `turn` int64 and `share` float64 without dimensions on the CPU: the rank's part of the
    batch's rows. The sum has the same bits on all ranks and in every run. Raises ExecutorError unless this process is
    one of `ranks` in torch.distributed's default group."""
    check_group(ranks)
    first = gradients[0]
    in_place = len(gradients) == 1 and first.is_contiguous()
    flat = first.view(-1) if in_place else torch.cat([gradient.reshape(-1) for gradient in gradients])
    flat.mul_(share.item())
    turn.add_(1)
    _begun[0] += 1
    dist.all_reduce(flat)
    if not in_place:
        for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view(gradient.shape))


def _fake(gradients: Sequence[Tensor], turn: Tensor, share: Tensor, ranks: int) -> None:
    """Do nothing: the operator returns nothing, and changes no shape."""


_LIBRARY.impl("all_reduce_", _all_reduce_, "CompositeExplicitAutograd")
torch.library.register_fake("pg_tensile::all_reduce_", _fake, lib=_LIBRARY)
ALL_REDUCE = torch.ops.pg_tensile.all_reduce_.default
_begun = [0]


def begun() -> int:
    """Return how many of these collectives the process has begun; a step that has begun one must not be repeated."""
    return _begun[0]


def check_group(ranks: int) -> None:
    """Raise ExecutorError unless this process is one of `ranks` in torch.distributed's default group."""
    hint = "Call torch.distributed.init_process_group() in each rank's process first."
    if not dist.is_available() or not dist.is_initialized():
        raise ExecutorError(f"the step is one of {ranks} ranks, but this process is in no process group", hint)
    there = dist.get_world_size()
    if there != ranks:
        raise ExecutorError(f"the step is one of {ranks} ranks, but the process group has {there}", hint)


# ---- buckets ---------------------------------------------------------------------------------------------------------


@contextmanager
def arrivals(parameters: Mapping[str, nn.Parameter]) -> Iterator[list[str]]:
    """Yield the names of the parameters in the order in which backward computes their gradients inside.

    It is the same for `backward()`, for `torch.autograd.grad`, and on fake tensors."""
    names: list[str] = []

    def arrived(name: str, gradient: Tensor) -> None:
        if name not in names:  # of the first backward, if there are several
            names.append(name)

    handles = [parameter.register_hook(partial(arrived, name)) for name, parameter in parameters.items()]
    try:
        yield names
    finally:
        for handle in handles:
            handle.remove()


def buckets(parameters: Mapping[str, nn.Parameter], order: Sequence[str], most_bytes: int) -> list[list[str]]:
    """Return the names of the parameters in `order`, divided into buckets: one collective for the gradients of each.

    Gradients of a bucket have one type and at most `most_bytes` together, or it has a single one. Buckets are in the
    order in which they are complete."""
    complete: list[list[str]] = []
    filling: dict[torch.dtype, list[str]] = {}
    filled: dict[torch.dtype, int] = {}
    for name in order:
        parameter = parameters[name]
        dtype = parameter.dtype
        if filling.get(dtype) and filled[dtype] + parameter.nbytes > most_bytes:
            complete.append(filling.pop(dtype))
        filled[dtype] = parameter.nbytes + (filled[dtype] if dtype in filling else 0)
        filling.setdefault(dtype, []).append(name)
    position = {name: number for number, name in enumerate(order)}
    return complete + sorted(filling.values(), key=lambda names: position[names[-1]])
