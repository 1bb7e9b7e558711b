"""What the results of a run depend on."""

from __future__ import annotations

import json
import platform
import time
from importlib import metadata

from pg_tensile.tools.bench.report import revision
from scripts.cluster import REPOSITORY
from scripts.gpu_bundle.manifest import NAME

NAMED = ("torch", "triton", "transformers", "numpy", "nvidia-ml-py", "nvidia-nvcomp-cu13")


def machine(device: str, quick: bool) -> dict[str, str]:
    """Return the revision, the time, the device, and the versions of what it runs with."""
    import torch

    facts = {
        "revision": revision() or bundled_revision(),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "device": device + (", small networks" if quick else ""),
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    facts |= {name: version for name in NAMED if (version := installed(name))}
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {
            "gpu": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
            "cuda": str(torch.version.cuda),
            "driver": driver(),
        }
    return facts


def bundled_revision() -> str:
    """Return the revision that the bundle of a machine without git was made of."""
    try:
        return f"{json.loads((REPOSITORY / 'gpu-bundle' / NAME).read_text())['revision']}, of the bundle"
    except (OSError, ValueError, KeyError):
        return "unknown"


def installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str:
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return f"unknown ({error})"
