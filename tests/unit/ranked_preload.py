"""Imports and first captures, done once before the processes of ranks are forked."""

from __future__ import annotations

import importlib

import torch

from pg_tensile.execution.capture import capture
from pg_tensile.execution.training.warm_up import warm_up
from tests.unit.ranked import Job

for module in ("tests.unit.ranked_runs", "torch._dynamo"):  # the latter is what PyTorch's optimizers load
    importlib.import_module(module)
if torch.accelerator.current_accelerator() is None:  # whose threads of autograd would not survive the fork
    warm_up()
    inputs, targets, _ = next(Job().batches())
    capture(Job().net(), inputs, targets, Job().spec(2), early_update=True)
