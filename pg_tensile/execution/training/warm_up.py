"""Warming up of a process that others are forked from: what PyTorch and capturing do only once is done before the fork.

The first capture of a process takes several times as long as later ones: PyTorch looks up operators, decompositions and
kernels for fake tensors, and imports modules of its own. Nothing is computed, and no device is used.
"""

from __future__ import annotations

import numpy as np
import torch

from pg_tensile.execution.capture import capture_inference
from pg_tensile.execution.data.preprocessing import ModelInputs, Task
from pg_tensile.execution.models.mlp import MLPArchitecture
from pg_tensile.execution.training.graphs import Sizes, capture_graphs, taking_tensors
from pg_tensile.execution.training.settings import Settings

ROWS = 8


def warm_up() -> None:
    """Capture a small model. The generators of random numbers are left as they were.

    Where PyTorch has an accelerator it only predicts: a backward pass would make autograd look for devices and start
    threads, which do not survive a fork."""
    state = torch.get_rng_state()
    try:
        _warm_up()
    finally:
        torch.set_rng_state(state)


def _warm_up() -> None:
    inputs = ModelInputs(numeric=1, cardinalities=(2,), arrays=())
    model = MLPArchitecture(hidden=(2,), embedding=2).build(inputs, 1)
    row = (((1,), np.float32), ((1,), np.int64), ((), np.float32))
    if torch.accelerator.current_accelerator() is None:
        settings = Settings(epochs=1, batch_size=ROWS)
        capture_graphs(model, settings, Task.BINARY, Sizes(ROWS, ROWS, row), torch.device("cpu"))
    else:
        with taking_tensors(model):
            capture_inference(model, [torch.zeros(ROWS, 1), torch.zeros(ROWS, 1, dtype=torch.int64)])
