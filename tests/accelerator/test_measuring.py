"""Measurements of an accelerator: its profile, its codecs, and processes that keep it busy meanwhile."""

from __future__ import annotations

import pytest
import torch

from pg_tensile.execution.backends import backend_of, device_load, module_of
from pg_tensile.execution.measuring import codecs
from pg_tensile.execution.measuring import device as measuring
from pg_tensile.execution.measuring.busy_processes import BusyProcesses
from tests.accelerator.target import DEVICE, TYPE


def test_a_profile_has_the_memory_of_a_process_besides_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    flops_per_s = measuring._flops_per_s
    monkeypatch.setattr(measuring, "_flops_per_s", lambda device, size, best: flops_per_s(device, 256, best))
    profile = measuring.measure(DEVICE)
    assert profile.kind == TYPE and profile.memory_bytes > 1 << 30
    assert 1e9 < profile.out_bytes_per_s < 1e12
    used = backend_of(TYPE).process_bytes(torch.device(DEVICE))
    if used is None:
        assert profile.process_bytes == 0
    else:
        assert 0 < profile.process_bytes <= used - torch.accelerator.memory_reserved(DEVICE)


def test_codecs_are_measured_with_the_coder_of_the_device() -> None:
    times, error = codecs.calibrate(torch.device(DEVICE), 0.0, sizes=(1 << 16, 1 << 18), word_bytes=(4,))
    assert times.codecs and 0 < error < 10


def test_processes_keep_the_last_device_busy() -> None:
    """The device need not be known to PyTorch by itself, nor be the first one."""
    last = torch.device(TYPE, module_of(torch.device(DEVICE)).device_count() - 1)
    with BusyProcesses(1, str(last)) as busy:
        load = device_load(last)
        assert load is not None and 0 <= load() <= 1
        assert busy._processes[0].poll() is None
