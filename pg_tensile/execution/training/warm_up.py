"""Warming up of a process that others are forked from: what PyTorch and capturing do only once is done before the fork.

The first capture of a process takes several times as long as later ones: PyTorch looks up operators, decompositions and
kernels for fake tensors, and imports modules of its own. Nothing is computed.
"""

from __future__ import annotations

import numpy as np
import torch

from pg_tensile.execution import backends
from pg_tensile.execution.data.preprocessing import ModelInputs, Task
from pg_tensile.execution.models.mlp import MLPArchitecture
from pg_tensile.execution.training.graphs import Sizes, capture_graphs
from pg_tensile.execution.training.settings import Settings

ROWS = 8


def warm_up() -> None:
    """Capture a small model. The generators of random numbers are left as they were.

    Does nothing where PyTorch was built for an accelerator, or another distribution adds one: fake tensors ask whether
    there is one, and autograd starts a thread for each, neither of which a fork survives; it knows none that comes
    later."""
    if torch.accelerator.current_accelerator() is not None or backends.added_types():
        return
    row = (((1,), np.float32), ((1,), np.int64), ((), np.float32))
    with torch.random.fork_rng(devices=()):
        model = MLPArchitecture(hidden=(2,), embedding=2).build(ModelInputs(1, (2,), ()), 1)
    settings = Settings(epochs=1, batch_size=ROWS)
    capture_graphs(model, settings, Task.BINARY, Sizes(ROWS, ROWS, row), torch.device("cpu"))
