"""The bytes of tensors of any layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from pg_tensile.execution.raw_bytes import raw_bytes

TENSORS = {
    "transposed": torch.arange(6).reshape(2, 3).T,
    "expanded": torch.arange(3.0).expand(2, 3),
    "one element without a stride": torch.tensor([7.0]).as_strided((1,), (0,)),
    "no elements, without a stride": torch.from_numpy(np.cumsum([0])[:-1]),
    "a number": torch.tensor(2.5, dtype=torch.bfloat16),
    "of complex numbers": torch.tensor([1 + 2j]),
    "of truth values": torch.tensor([True, False]),
    "that needs a gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_bytes_are_those_of_the_elements_in_their_order(tensor: Tensor) -> None:
    raw = raw_bytes(tensor)
    assert raw.dtype == torch.uint8 and raw.shape == (tensor.numel() * tensor.itemsize,)
    back = raw.clone().view(tensor.dtype).reshape(tensor.shape)
    assert torch.equal(back, tensor)
