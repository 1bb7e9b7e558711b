"""Backend of CUDA: registration of host memory, cuBLAS and cuDNN, and what NVML tells."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from pg_tensile.errors import DeviceError
from pg_tensile.execution.backends import nvml
from pg_tensile.execution.backends.conditions import Conditions, read_conditions
from pg_tensile.execution.backends.memory_limits import HardLimit, hard_limit

if TYPE_CHECKING:
    from pg_tensile.execution.codecs.device import Coder

_PORTABLE = 1  # cudaHostRegisterPortable: registered for every context
_abandoned: list[Any] = []  # graphs, which PyTorch's allocator of pinned memory keeps asking what belongs to them


class CudaBackend:
    """A `Backend` for NVIDIA's GPUs."""

    code_bytes = 256 << 20  # jobs took up to 250 MiB more than was measured before them, on an H100 with PyTorch 2.11

    def register(self, address: int, size: int, device: torch.device) -> None:
        with torch.cuda.device(device):
            status = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE))
        if status != 0:
            with contextlib.suppress(RuntimeError):  # consumes the error that CUDA keeps for the next launch
                torch.zeros(1, device=device)
            raise DeviceError("host memory cannot be registered", detail=f"cudaHostRegister answers {status}")

    def unregister(self, address: int) -> None:
        status = int(torch.cuda.cudart().cudaHostUnregister(address))
        if status != 0:
            raise DeviceError("host memory cannot be unregistered", detail=f"cudaHostUnregister answers {status}")

    @contextlib.contextmanager
    def near(self, device: torch.device) -> Iterator[None]:
        before = os.sched_getaffinity(0)
        near = _cpus_near(device) & before
        if near:
            os.sched_setaffinity(0, near)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)

    def create_context(self, device: torch.device) -> None:
        nvml.create_context(device)

    def process_bytes(self, device: torch.device) -> int | None:
        return nvml.process_bytes(device, self.code_bytes)

    def hard_limit(self, device: torch.device) -> HardLimit | None:
        limit = hard_limit(device, _pci_address(device))
        return None if limit.enforced_by is None else limit

    def load_of_others(self, device: torch.device) -> float:
        return nvml.load_of_others(device)

    def conditions(self, device: torch.device) -> Conditions | None:
        return nvml.ask(device, read_conditions)

    def use_deterministic_libraries(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts

    def release_library_memory(self) -> None:
        torch._C._cuda_clearCublasWorkspaces()

    def graph_pool(self) -> tuple[int, int] | None:
        return torch.cuda.graph_pool_handle()  # a graph does not tell its own one after a failure

    def abandon_capture(self, device: torch.device, graph: Any, pool: tuple[int, int] | None) -> None:
        """Mend what PyTorch leaves undone when a capture of `graph` with this pool fails; raises nothing.

        Where CUDA refuses the capture, `capture_end` raises before it has told PyTorch's allocator and generator of
        random numbers that it is over: the one holds back memory, the other raises at each draw."""
        assert device.index is not None and pool is not None
        # It raises where PyTorch has ended this itself, and releases the pool with the graph then.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            _abandoned.append(graph)
            torch._C._cuda_releasePool(device.index, pool)
        # The end of a capture, even of nothing, ends the generator's. A new state for the generator would do as well,
        # but not for other graphs, which draw from the one that they were captured with. After a fault of the device
        # all of this raises, and nothing can be mended.
        with contextlib.suppress(RuntimeError), warnings.catch_warnings(), torch.cuda.device(device):
            warnings.simplefilter("ignore")  # of an empty graph
            nothing = torch.cuda.CUDAGraph()
            nothing.capture_begin(capture_error_mode="thread_local")
            nothing.capture_end()
            nothing.reset()

    def coder(self, device: torch.device) -> Coder:
        from pg_tensile.execution.codecs.device import coder_of

        return coder_of(device)


def _pci_address(device: torch.device) -> str:
    properties = torch.cuda.get_device_properties(device)
    domain, bus, number = (getattr(properties, f"pci_{part}_id") for part in ("domain", "bus", "device"))
    return f"{domain:04x}:{bus:02x}:{number:02x}.0"


def _cpus_near(device: torch.device) -> set[int]:
    try:
        return parse_cpus(Path("/sys/bus/pci/devices", _pci_address(device), "local_cpulist").read_text())
    except (AttributeError, OSError, ValueError):
        return set()


def parse_cpus(text: str) -> set[int]:
    """Parse the kernel's list of CPUs, "0-3,8" for example."""
    ranges = [part.split("-") for part in text.strip().split(",") if part]
    return {cpu for bounds in ranges for cpu in range(int(bounds[0]), int(bounds[-1]) + 1)}
