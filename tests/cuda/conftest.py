"""Tests that need a GPU: where PyTorch sees none, nothing here is collected. `make test-cuda` insists on one."""

from __future__ import annotations

import pytest
import torch

from pg_tensile.planning.device.profile import A100_40GB

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def device():
    from pg_tensile.execution.runtime.cuda import CudaDevice

    cuda = CudaDevice(0, profile=A100_40GB, strict=True)
    yield cuda
    cuda.close()
