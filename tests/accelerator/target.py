"""The accelerator that these tests run on: the emulated one or, with PG_TENSILE_ACCELERATOR=cuda, a GPU."""

from __future__ import annotations

import os
from typing import Any

TYPE = os.environ.get("PG_TENSILE_ACCELERATOR", "emulated")
DEVICE = f"{TYPE}:0"
CYCLES_PER_MS = 2_000_000  # at 2 GHz; slower clocks only sleep longer


def module() -> Any:
    """Return the device's module, as torch.cuda."""
    import torch

    return torch.get_device_module(TYPE)


def sleep_ms(milliseconds: int) -> None:
    """Keep the current stream busy for at least that long."""
    module()._sleep(milliseconds * CYCLES_PER_MS)
