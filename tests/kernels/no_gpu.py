"""A driver of Triton for a GPU that is not there: kernels are specialised and, if wanted, compiled, but never run.

The coder works under it with tensors of the CPU, which keep what was in them before a launch.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

_numbers = count(1000)  # of devices: Triton keeps compiled kernels by the number of their device


class Loaded(NamedTuple):
    """A kernel that was compiled to a cubin, for a block of `warps` warps that takes `shared_bytes` of its memory."""

    name: str
    cubin: bytes
    shared_bytes: int
    warps: int

    def resources(self, folder: Path) -> dict[str, int]:
        """Return what cuobjdump finds in the cubin: for a thread its REG(isters), and bytes of STACK and LOCAL memory.

        The cubin is written into a folder.
        """
        path = folder / "kernel.cubin"
        path.write_bytes(self.cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        (line,) = re.findall(rf"Function {self.name}:\n(.*)", done.stdout)
        return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", line)}


class NoGpu(DriverBase):
    """Driver of a GPU of compute capability `capability` (90 for 9.0)."""

    def __init__(self, capability: int) -> None:
        self.launched: set[tuple[str, str]] = set()  # kernels, and what Triton compiles them for: one cubin each
        self.loaded: list[Loaded] = []
        self.utils = self
        self._number = next(_numbers)
        self._target = GPUTarget("cuda", capability, 32)
        self._warps = 0

    def launcher_cls(self, source: Any, metadata: Any) -> Any:
        """Return what launches a compiled kernel; it is loaded next."""
        self._warps = metadata.num_warps
        return lambda *_: None

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[object, object, int, int, int]:
        self.loaded.append(Loaded(name, cubin, shared, self._warps))
        return object(), object(), 0, 0, 1024  # module, function, registers, spills, most threads

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 48 << 10}  # what every GPU has

    def get_current_device(self) -> int:
        return self._number

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError

    def get_active_torch_device(self) -> Any:
        raise NotImplementedError

    def get_benchmarker(self) -> Any:
        raise NotImplementedError


@contextmanager
def no_gpu(capability: int = 90, compile_into: Path | None = None) -> Iterator[NoGpu]:
    """Have Triton use the driver of such a GPU.

    Kernels are compiled only if a folder is given, which becomes Triton's cache.
    """
    driver, config = NoGpu(capability), triton.runtime.driver
    before = config._active

    def before_compiling(*, key: str, fn: Any, **_: object) -> bool:
        driver.launched.add((fn.name, key))
        return compile_into is None  # true: neither compile nor launch

    with triton.knobs.runtime.scope(), triton.knobs.cache.scope():
        triton.knobs.runtime.jit_cache_hook = before_compiling
        if compile_into is not None:
            triton.knobs.cache.dir = str(compile_into)
        config.set_active(driver)
        try:
            yield driver
        finally:
            config._active = before
