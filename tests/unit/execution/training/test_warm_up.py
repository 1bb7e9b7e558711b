"""Warming up changes no random numbers, starts no threads, and is left out where accelerators are added."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import pytest
import torch

from pg_tensile.execution import backends
from pg_tensile.execution.training import warm_up as warming
from pg_tensile.execution.training.warm_up import warm_up


def states() -> list[Any]:
    return [random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()]


def test_draws_no_numbers_and_starts_no_threads():
    before, threads = states(), set(os.listdir("/proc/self/task"))
    warm_up()
    assert states() == before
    assert set(os.listdir("/proc/self/task")) <= threads


def test_captures_nothing_where_an_accelerator_may_come_later(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backends, "added_types", lambda: ["emulated"])
    monkeypatch.delattr(warming, "capture_graphs")
    warm_up()
