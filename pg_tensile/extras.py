"""Optional packages: what each extra of the distribution consists of, and the error if one of its packages is missing.

A module that needs an extra is imported inside `needing`, by the command or method that needs it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from pg_tensile.errors import TensileError, noted

# As in pyproject.toml. They are repeated here because a clone and the server's copy are no installed distribution, and
# because "pip install pg_tensile[…]" would ask an index for a package of that name.
EXTRAS = {
    "report": ("bokeh>=3.9,<4", "jinja2>=3.1", "numpy>=2"),
    "frames": ("pandas>=2.2",),
    "onnx": ("numpy>=2", "onnxruntime>=1.22"),
    "onnx-export": ("onnx>=1.19", "onnxscript>=0.5", "onnxruntime>=1.22"),
    "server": (
        *("torch>=2.11", "numpy>=2", "safetensors>=0.5", "nvidia-ml-py>=12", "scikit-learn>=1.8", "lightgbm>=4.5"),
        *("tabm>=0.0.3", "rtdl_num_embeddings>=0.0.12", "optuna>=5", "sqlglot>=30"),
    ),
    "ray": ("ray[client]>=2.59", "grpcio<1.75"),
}


class MissingPackageError(TensileError):
    """A package that only this method or command needs is not installed."""


def pip_install(extra: str) -> str:
    """Return the command that installs the packages of an extra."""
    return f"pip install {shlex.join(EXTRAS[extra])}"


@contextmanager
def needing(extra: str, what: str) -> Iterator[None]:
    """Raise an import of the block that fails for want of a package as MissingPackageError.

    `what` is the beginning of the message, such as "reports need"."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "pg_tensile", "benchmarks"):
            raise
        message = f'{what} the extra "{extra}" of pg_tensile, of which {package} is not installed'
        raise noted(MissingPackageError(message, f"{pip_install(extra)} installs it.")) from None
