"""Operators `all_reduce_` and `wait_`: a bucket of gradients, averaged in place over all ranks.

The first begins, the second ends. The operators between them, those of the backward pass for the next bucket, are
executed while the network is busy. In between a bucket belongs to the collective: nothing reads or writes it.

They are collectives of torch.distributed: every rank executes the same ones in the same order, whatever its plan, or
all of them wait for each other. So each operator changes one tensor, the step's `turn`, and by the rules for tensors
that are changed in place no plan reorders two of them, and none executes one a second time. It also makes them end in
the order in which they begin.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pg_tensile.errors import ExecutorError

_LIBRARY = torch.library.Library("pg_tensile", "DEF")
_LIBRARY.define("all_reduce_(Tensor(a!) bucket, Tensor(b!) turn, Tensor share, int ranks) -> ()")
_LIBRARY.define("wait_(Tensor(a!) bucket, Tensor(b!) turn) -> ()")


def _all_reduce_(bucket: Tensor, turn: Tensor, share: Tensor, ranks: int) -> None:
    """Begin to replace the bucket by the sum over all ranks of `share` times the rank's bucket.

    `turn` is int64 and `share` float64, without dimensions, on the CPU; the share is the rank's part of the batch's
    rows. The sum has the same bits on all ranks and in every run. Raises ExecutorError unless this process is one of
    `ranks` in torch.distributed's default group."""
    check_group(ranks)
    if not turn.item():
        _under_way.clear()  # what a failed step has left
    turn.add_(1)
    bucket.mul_(share.item())
    _begun[0] += 1
    _under_way.append(dist.all_reduce(bucket, async_op=True))


def _wait_(bucket: Tensor, turn: Tensor) -> None:
    """Wait for the sum of the bucket, the first of those under way. Raises the errors of torch.distributed."""
    turn.add_(1)
    _under_way.popleft().wait()


def _no_result(*arguments: object) -> None:
    """Do nothing: the operators return nothing, and change no shape."""


_LIBRARY.impl("all_reduce_", _all_reduce_, "CompositeExplicitAutograd")
_LIBRARY.impl("wait_", _wait_, "CompositeExplicitAutograd")
torch.library.register_fake("pg_tensile::all_reduce_", _no_result, lib=_LIBRARY)
torch.library.register_fake("pg_tensile::wait_", _no_result, lib=_LIBRARY)
ALL_REDUCE = torch.ops.pg_tensile.all_reduce_.default
WAIT = torch.ops.pg_tensile.wait_.default
COLLECTIVES = frozenset(map(str, (ALL_REDUCE, WAIT)))
_begun = [0]
_under_way: deque[dist.Work] = deque()  # the operators do not return it, because a plan could move it


def begun() -> int:
    """Return how many of these collectives the process has begun; a step that has begun one must not be repeated."""
    return _begun[0]


def land() -> None:
    """Wait for all buckets under way, which may be read afterwards. Each still has its `wait_` to come."""
    for work in _under_way:
        work.wait()


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


def bucket_of(gradients: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients in one piece of memory, [elements], and a view of it for each gradient, in its layout.

    Gradients are of one type, and dense or contiguous, as autograd's are. A single one stays where it is."""
    flat = [gradient.as_strided((gradient.numel(),), (1,)) for gradient in gradients]
    if len(gradients) == 1:
        return flat[0], list(gradients)
    bucket = torch.cat(flat)
    views, offset = [], 0
    for gradient in gradients:
        views.append(bucket.as_strided(gradient.shape, gradient.stride(), offset))
        offset += gradient.numel()
    return bucket, views


def pipelined(count: int) -> Iterator[tuple[bool, int]]:
    """Yield the order of a step's collectives: (True, n) where bucket n begins, (False, n) where it is waited for.

    A bucket is waited for when the next one has begun, so that the network always has one, and no more than two buckets
    are in memory."""
    for number in range(count):
        yield True, number
        if number:
            yield False, number - 1
    if count:
        yield False, count - 1


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
