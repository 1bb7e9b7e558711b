"""The emulated accelerator: a PyTorch device on the CPU on which work is really late, and every race is seen.

Importing this package compiles its C++ extension once (`build`), names PyTorch's PrivateUse1 device "emulated" and
registers it, for the whole process: `torch.accelerator.current_accelerator()` is "emulated" from then on, and
`torch.emulated` is the module `device`. `control` steers and asks the emulator.

Each stream has a thread, which executes kernels (PyTorch's for the CPU) and copies later, in order. Memory comes from
a copy of PyTorch's caching allocator, freed memory is overwritten, copies are asynchronous only from and to pinned
memory. A detector compares every access with all others by vector clocks when work is given, so what it reports does
not depend on time.
"""

from __future__ import annotations

import atexit

import torch

from tests.emulated.emulated import control, device
from tests.emulated.emulated.build import build
from tests.emulated.emulated.native import native
from tests.emulated.emulated.tensor_data import allow_data_of_other_devices

__all__ = ["build", "control", "device"]

if not hasattr(torch, "emulated"):
    torch.utils.rename_privateuse1_backend("emulated")
    torch._register_device_module("emulated", device)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    allow_data_of_other_devices()
    # Nothing may run when the interpreter takes its modules down.
    atexit.register(lambda: [native.drain(index) for index in range(native.DEVICES)])
