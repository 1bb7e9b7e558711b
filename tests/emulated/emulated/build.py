"""Compilation of the emulator's C++ sources, once for each version of sources, PyTorch and Python."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "csrc"
# Debugging symbols and optimisation cost more than they give: the kernels are PyTorch's.
FLAGS = ["-std=c++20", "-O1", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wno-unused-local-typedefs"]
LIBRARIES = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]


def build(folder: Path | None = None) -> Path:
    """Compile the extension unless that has been done, and return the path of the shared library.

    It lies in a folder named by what it is made of, below `folder` (default: build/ of the checkout). Several processes
    may build at once: one compiles, the others wait. Raises RuntimeError with the compiler's messages."""
    if folder is None:
        folder = Path(__file__).parents[3] / "build"
    built = folder / f"emulated-{_digest()}"
    library = built / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"
    if library.exists():
        return library
    built.mkdir(parents=True, exist_ok=True)
    with open(built / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(built, library)
    return library


def _digest() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {FLAGS}".encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def _compile(folder: Path, library: Path) -> None:
    # One translation unit: PyTorch's headers, of which most sources need nearly all, take longer than the sources.
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    paths = [part for path in cpp_extension.library_paths() for part in (f"-L{path}", f"-Wl,-rpath,{path}")]
    unit, unfinished = folder / "all.cpp", library.with_suffix(".new")
    unit.write_text("".join(f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp"))))
    headers = (f"-isystem{path}" for path in includes)
    _run(["c++", *FLAGS, *headers, "-shared", str(unit), *paths, *LIBRARIES, "-o", str(unfinished)])
    unfinished.chmod(0o755)
    unfinished.rename(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


if __name__ == "__main__":
    build()
