"""Memory, pending work and threads that work on the emulated device must not leave behind."""

from __future__ import annotations

import gc
import threading

import torch

from tests.emulated.emulated import control


def leftovers() -> dict[str, object]:
    """Wait for the device and return what is left on it and for it."""
    gc.collect()
    torch.accelerator.synchronize()
    return {
        "blocks": sorted(size for _, size, _ in control.blocks_alive()),
        "registered bytes": control.registered_bytes(),
        "pending work": control.pending(),
        "threads": sorted(thread.name for thread in threading.enumerate() if "pg_tensile" in thread.name),
    }
