"""Device memory of processes by the driver's count."""

from __future__ import annotations

from pg_tensile.execution.device_choice import choose_device


def process_bytes(device: str) -> dict[int, int]:
    """Return the bytes of each process on a CUDA device, by its number; nothing for other types of devices.

    A process whose memory the driver does not tell is left out. In a container the numbers are the host's."""
    if device.partition(":")[0] != "cuda":
        return {}
    import pynvml
    import torch

    uuid = torch.cuda.get_device_properties(choose_device(device)).uuid
    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return {process.pid: process.usedGpuMemory for process in processes if process.usedGpuMemory is not None}
    finally:
        pynvml.nvmlShutdown()
