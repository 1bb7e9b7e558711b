"""Results of operators on fake tensors are remembered only for calls that are alike in all that decides on them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pg_tensile.execution.capture import StepSpec, capture
from pg_tensile.execution.capture import fake_results as remembered


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
    remembered._kept.clear()
    fresh = capture(model, [x, counts], [], spec)
    assert remembered._kept
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
