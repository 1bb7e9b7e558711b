"""Results of operators on fake tensors are remembered only for calls that are alike in all that decides on them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pg_tensile.execution.capture import StepSpec, capture
from pg_tensile.execution.capture import fake_results as remembered
from pg_tensile.execution.capture.fake_results import Arguments, Layout, layout_number, new_fake

aten = torch.ops.aten


class Mixed(nn.Module):
    """Equal numbers of different types, views with different offsets, one memory given twice, and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        whole, real = counts * 2, counts * 2.0
        first, last = x[:, :2], x[:, 2:]
        same, other = torch.hypot(first, first), torch.hypot(first, last)
        return self.inner(x) * (whole + real) + (same + other).sum()


def test_what_is_remembered_changes_no_trace():
    model, x, counts = Mixed(), torch.randn(3, 4), torch.arange(12).view(3, 4)
    spec = StepSpec(lambda output: output.square().mean())
    remembered._cache.clear()
    fresh = capture(model, [x, counts], [], spec)
    assert remembered._cache
    again = capture(model, [x, counts], [], spec)
    assert again.values == fresh.values
    assert again.trace.fingerprint == fresh.trace.fingerprint
    assert again.trace.tensor_bytes.tolist() == fresh.trace.tensor_bytes.tolist()
    products = [
        fresh.values[slot].dtype
        for operator in fresh.operators
        if operator.call is not None and operator.call.target is torch.ops.aten.mul.Tensor
        for slot in operator.call.results
        if slot is not None
    ]
    assert products[:2] == [torch.int64, torch.float32]


def test_results_that_depend_on_more_than_layouts_are_not_remembered():
    def key(func: Any, *others: Any) -> Any:
        given = Arguments()
        given.add_tensor(x, layout_number(Layout.of(x)), 0)
        for other in others:
            given.add(other)
        return given.key(func)

    x = new_fake(FakeTensorMode(), (2, 3), (3, 1), torch.float32, torch.device("cpu"))
    assert key(aten.add.Tensor, 1) == key(aten.add.Tensor, 1) is not None
    assert key(aten.add.Tensor, 1) != key(aten.add.Tensor, 1.0)
    assert key(aten.nonzero.default) is None
    assert key(aten.add.out, 1) is None, "which resizes what it is to write into"
    assert key(aten._to_copy.default, torch.device("cuda")) is None, "whichever is current"
    assert key(aten._to_copy.default, torch.device("cuda:1")) is not None
    with torch.inference_mode():
        assert key(aten.add.Tensor, 1) is None
