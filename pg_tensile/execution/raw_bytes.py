"""The bytes of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def raw_bytes(tensor: Tensor) -> Tensor:
    """Return the elements' bytes in their order, uint8[n], on the tensor's device; the memory may be the tensor's."""
    flat = tensor.detach().contiguous().flatten()
    # One element or none may have a stride of 0, with which no tensor can be viewed as another type.
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)
