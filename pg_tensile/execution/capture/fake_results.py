"""Results of operators on fake tensors, remembered by the layouts of their arguments.

PyTorch's fake mode takes a millisecond or more of the CPU for a call: it looks for a kernel in Python, often runs a
decomposition, and checks everything on the way. A step has many calls that are alike, and each step is recorded twice.
So the layouts of a call's results are kept by the operator, the layouts of the tensors given to it and its other
arguments, and the next such call makes tensors of these layouts.

Only results with layouts that follow from the arguments are kept: of PyTorch's own operators, on tensors without known
values, all of which are new memory, a view of an argument or an argument itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

LIMIT = 1 << 14  # results that are kept
OWN_NAMESPACES = ("aten", "prims")
UNSTEADY = {  # of operators whose results depend on data, or that change what a tensor is
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}


class Layout(NamedTuple):
    """Layout of a tensor on its memory, which has `nbytes`."""

    nbytes: int
    device: torch.device
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    @staticmethod
    def of(tensor: FakeTensor) -> Layout:
        return Layout(
            tensor.untyped_storage().nbytes(),
            tensor.fake_device,
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )


class _Result(NamedTuple):
    """One result: an argument itself (without a layout), a view of an argument, or a tensor on new memory."""

    argument: int | None
    layout: Layout | None


class _Results(NamedTuple):
    """Results of a call; `kind` is the type of what has several, else None."""

    kind: type | None
    items: tuple[_Result | None, ...]


_cache: dict[tuple[Any, ...], _Results] = {}  # by what `Arguments.key` returns
# of layouts, which are hashed often; threads that capture at the same time never draw the same number
_layout_numbers: defaultdict[Layout, int] = defaultdict(count().__next__)


def layout_number(layout: Layout) -> int:
    """Return the number of a layout, by which results are kept. Equal numbers mean equal layouts."""
    return _layout_numbers[layout]


@cache
def _is_steady(func: Any) -> bool:
    """Return whether the layouts of an operator's results follow from its arguments, none of which it resizes."""
    writes_out = any(argument.is_out for argument in func._schema.arguments)
    return func.namespace in OWN_NAMESPACES and UNSTEADY.isdisjoint(func.tags) and not writes_out


def _modes() -> tuple[Any, ...]:
    """Return what decides on layouts beside the arguments: types, workspaces and the libraries of convolutions."""
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch._C._get_cudnn_enabled(),
        torch._C._get_mkldnn_enabled(),
    )


def new_fake(
    mode: FakeTensorMode,
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """Return a fake tensor on new memory, as torch.empty_strided does under the mode."""
    with in_kernel_invocation_manager(mode):
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, device)


class Arguments:
    """Arguments of one call, gathered one by one: its tensors, and what else its results depend on."""

    def __init__(self) -> None:
        self.tensors: list[FakeTensor] = []
        self._memories: list[int] = []
        self._parts: list[Any] = []
        self._steady = True

    def add_tensor(self, tensor: Any, layout: int, memory: int) -> None:
        """Add a tensor; `layout` is its `layout_number`, and equal numbers of `memory` mean the same memory."""
        if type(tensor) is not FakeTensor or tensor.constant is not None:
            self._steady = False
            return
        self.tensors.append(tensor)
        self._memories.append(memory)
        self._parts.append(layout)

    def add(self, value: Any) -> None:
        """Add anything else; the type is a part of it, as 1 and 1.0 have different results."""
        if isinstance(value, torch.device) and value.index is None and value.type != "cpu":
            self._steady = False  # the current device of this type, which may be another one at the next call
        self._parts += (type(value), value)

    def key(self, func: Any) -> tuple[Any, ...] | None:
        """Return the key of the call; None if its results must not be kept."""
        if not self._steady or not _is_steady(func) or torch.is_inference_mode_enabled():
            return None  # a view of an ordinary tensor stays one in inference mode; one made here would not
        memories = self._memories
        same = tuple(map(memories.index, memories)) if len(set(memories)) < len(memories) else None
        key = (func, _modes(), same, *self._parts)
        try:
            hash(key)
        except TypeError:
            return None
        return key

    def remember(self, key: tuple[Any, ...], returned: Any) -> None:
        """Keep what the call has returned, if all of it can be made again from its layouts."""
        kind = type(returned) if type(returned) in (tuple, list) else None
        items = returned if kind is not None else (returned,)
        memories = {tensor.untyped_storage()._cdata: number for number, tensor in reversed([*enumerate(self.tensors)])}
        identities = {id(tensor): number for number, tensor in enumerate(self.tensors)}
        results: list[_Result | None] = []
        for item in items:
            if item is None:
                results.append(None)
                continue
            if type(item) is not FakeTensor or item.constant is not None or item.layout != torch.strided:
                return
            if id(item) in identities:
                results.append(_Result(identities[id(item)], None))
                continue
            layout = Layout.of(item)
            memory = item.untyped_storage()._cdata
            argument = memories.get(memory)
            if layout.is_conj or layout.is_neg or (argument is None and not _is_plain(layout)):
                return
            if argument is None:
                memories[memory] = -1  # a second result on the same new memory cannot be made
            elif argument < 0:
                return
            results.append(_Result(argument, layout))
        if len(_cache) >= LIMIT:
            _cache.clear()
            _layout_numbers.clear()
        _cache[key] = _Results(kind, tuple(results))

    def cached(self, key: tuple[Any, ...], mode: FakeTensorMode) -> tuple[Any] | None:
        """Return the results of the call, in a tuple of one, made again from layouts; None if they are not kept."""
        cached = _cache.get(key)
        if cached is None:
            return None
        items = [None if item is None else self._make(item, mode) for item in cached.items]
        return (items[0],) if cached.kind is None else (cached.kind(items),)

    def _make(self, result: _Result, mode: FakeTensorMode) -> Any:
        argument, layout = result
        if layout is None:
            assert argument is not None
            return self.tensors[argument]
        if argument is None:
            return new_fake(mode, layout.shape, layout.stride, layout.dtype, layout.device)
        storage = self.tensors[argument].untyped_storage()
        with in_kernel_invocation_manager(mode):
            meta = torch.empty(0, dtype=layout.dtype, device="meta")
            meta.set_(storage, layout.offset, layout.shape, layout.stride)
        return FakeTensor(mode, meta, layout.device)


def _is_plain(layout: Layout) -> bool:
    """Return whether new memory for this layout would have as many bytes as the memory that it has."""
    elements = 0 if 0 in layout.shape else 1
    if elements:
        elements += sum((size - 1) * stride for size, stride in zip(layout.shape, layout.stride, strict=True))
    return layout.offset == 0 and layout.nbytes == elements * layout.dtype.itemsize
