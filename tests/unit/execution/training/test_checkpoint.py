"""Checkpoints hold everything, and nothing but tensors and JSON."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from pg_tensile.errors import ArchitectureError, CheckpointError
from pg_tensile.execution.training import checkpoint as ckpt
from pg_tensile.execution.training.checkpoint import Checkpoint


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(1).item()]


def test_generators_continue_where_they_were() -> None:
    ckpt.seed_generators(-3)
    draw()
    state = Checkpoint({})
    ckpt.generator_states(state, torch.device("cpu"))
    expected = [draw() for _ in range(3)]
    stored = Checkpoint.from_bytes(state.to_bytes(), json.loads(json.dumps(state.meta)))
    ckpt.seed_generators(1)
    ckpt.restore_generators(stored, torch.device("cpu"))
    assert [draw() for _ in range(3)] == expected


def test_seeding_repeats() -> None:
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        ckpt.seed_generators(seed)
        first = draw()
        ckpt.seed_generators(seed)
        assert draw() == first


def test_tied_weights_are_stored_under_each_name() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
            self.b.weight = self.a.weight

    model, other = Tied(), Tied()
    ckpt.load_model(other, ckpt.from_bytes(ckpt.to_bytes(ckpt.model_tensors(model))))
    assert torch.equal(other.a.weight, model.a.weight) and other.a.weight is other.b.weight


def test_views_and_strides_are_stored_as_they_read() -> None:
    tensors = {"t": torch.arange(6.0).reshape(2, 3).t(), "row": torch.arange(6.0)[2:4], "empty": torch.empty(0, 3)}
    loaded = ckpt.from_bytes(ckpt.to_bytes(tensors))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


def test_damaged_files_are_an_error() -> None:
    good = ckpt.to_bytes({"a": torch.zeros(10)})
    for data in (b"", good[:-1], b"\x80\x04" + good, b"\xff" * 64):
        with pytest.raises(CheckpointError, match="damaged"):
            ckpt.from_bytes(data)


def test_weights_of_another_model_are_an_error() -> None:
    with pytest.raises(CheckpointError, match="do not fit the model") as error:
        ckpt.load_model(nn.Linear(2, 3), ckpt.from_bytes(ckpt.to_bytes(nn.Linear(2, 4).state_dict())))
    assert "size mismatch" in str(error.value.detail)


def test_state_that_is_no_tensor_is_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 1}

        def set_extra_state(self, state: object) -> None:
            pass

    with pytest.raises(ArchitectureError, match="is not a tensor"):
        ckpt.model_tensors(Extra(2, 2))
