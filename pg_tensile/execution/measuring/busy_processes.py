"""Processes that keep a device busy while operators or codecs are measured, as other jobs would."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time

import torch

from pg_tensile.errors import MeasurementError
from pg_tensile.execution.device_choice import choose_device

_START_S = 60.0  # most time for a process to start, which includes importing PyTorch
_PR_SET_PDEATHSIG = 1


class BusyProcesses:
    """Processes that keep the device busy, as other jobs would.

    They end with the `with` block, and also when this process ends, in whatever way: they read a pipe that only this
    process holds open, and the kernel kills them with the thread that started them.
    """

    def __init__(self, count: int, device: str, threads: int = 1) -> None:
        self._count, self._arguments = count, f"{device!r}, {threads}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> BusyProcesses:
        program = f"from {__name__} import keep_busy; keep_busy({os.getpid()}, {self._arguments})"
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        try:
            for _ in range(self._count):
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-c", program],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                        env=environment,
                    )
                )
            self._await()
        except BaseException:
            self.close()
            raise
        return self

    def _await(self) -> None:
        """Wait until each process has reported that it is running. Raises MeasurementError."""
        deadline = time.monotonic() + _START_S
        for process in self._processes:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not (ready and process.stdout.read(1)):
                detail = f"exit status {process.poll()}"
                raise MeasurementError("a process that keeps the device busy did not start", detail=detail)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                assert stream is not None
                stream.close()
        self._processes.clear()


def keep_busy(parent: int, device: str, threads: int) -> None:
    """Run convolutions on the device until standard input ends: the program of `BusyProcesses`.

    `parent` is the id of the process that started this one.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return  # it ended before this process requested the signal
    torch.set_num_threads(threads)
    chosen = choose_device(device)
    image = torch.rand(8, 64, 56, 56, device=chosen)
    weight = torch.rand(64, 64, 3, 3, device=chosen)
    with torch.no_grad():
        torch.conv2d(image, weight, padding=1)
        os.write(1, b".")
        while not select.select([0], [], [], 0)[0]:
            torch.conv2d(image, weight, padding=1).relu_()
            if not image.is_cpu:
                torch.accelerator.synchronize(chosen)
