"""What is installed: the lock file, and which build of PyTorch."""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from pathlib import Path
from typing import NamedTuple

from scripts.pg_tensile_setup.common import SetupError, amount, say

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
TORCH_FOR_CPU_MB = 192  # the wheel of 2.13
DRIVER = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg")  # the last one under WSL


class Lock(NamedTuple):
    """A lock file.

    `torch` is the version of PyTorch; `packages` and `constraints` are requirements of the other packages, the former
    with hashes. `sizes`: megabytes to fetch by Python, of the other packages and of PyTorch with CUDA. `digest` tells
    lock files apart.
    """

    torch: str
    packages: str
    constraints: str
    sizes: dict[str, tuple[int, int]]
    digest: str


class Build(NamedTuple):
    """Which PyTorch: `kind` cpu or cuda, from the index `url`, that of pip's own configuration if empty."""

    kind: str
    url: str

    def requirement(self, version: str) -> str:
        """Return pip's requirement: with the label of the index, no other index can bring another build."""
        label = re.search(r"/(cpu|cu\d+)/?$", self.url)
        return f"torch=={version}" + (f"+{label[1]}" if label else "")


def read_lock(path: Path) -> Lock:
    """Read a lock file. Raises SetupError."""
    try:
        text = path.read_text()
        (torch,) = re.findall(r"^torch==(\S+)$", text, re.MULTILINE)
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} is no lock file: {error}", "Install the package pg-tensile-common again.") from None
    packages = re.sub(r"^torch==.*\n", "", text, flags=re.MULTILINE)
    sizes = re.findall(r"^#   (3\.\d+): (\d+) (\d+)$", text, re.MULTILINE)
    return Lock(
        torch=torch,
        packages=packages,
        constraints=re.sub(r"\s*\\\n\s*--hash=\S+", "", packages),
        sizes={python: (int(others), int(cuda)) for python, others, cuda in sizes},
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def has_nvidia_driver() -> bool:
    return any(Path(path).exists() for path in DRIVER)


def choose_build(options: argparse.Namespace, sizes: tuple[int, int], has_driver: bool) -> Build:
    """Return the build that the options name, else the one that the user or the machine's driver chooses."""
    if index := options.torch_index:
        return Build("cpu" if index.rstrip("/").endswith("/cpu") else "cuda", index)
    if options.cpu or options.cuda:
        return Build("cpu", CPU_INDEX) if options.cpu else Build("cuda", "")
    if options.find_links:
        return Build("cpu", "")  # whatever is there
    default = "cuda" if has_driver else "cpu"
    seen = "an NVIDIA driver is here" if has_driver else "no NVIDIA driver is here"
    if sys.stdin.isatty():
        cpu, cuda = amount(sizes[0] + TORCH_FOR_CPU_MB), amount(sum(sizes))
        print(f"PyTorch comes for the CPU ({cpu} to fetch) or with CUDA for NVIDIA GPUs ({cuda}); {seen}.")
        while (answer := input(f"Which one, cpu or cuda? [{default}] ").strip().lower() or default) not in (
            "cpu",
            "cuda",
        ):
            pass
    else:
        answer = default
        say(f"{seen}, so PyTorch is taken {'with CUDA' if has_driver else 'for the CPU'} (--cpu and --cuda choose)")
    return Build("cpu", CPU_INDEX) if answer == "cpu" else Build("cuda", "")
