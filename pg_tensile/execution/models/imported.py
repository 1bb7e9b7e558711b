"""Models provided by users: a callable of an installed module, or Python source that defines `build`.

Both are called as f(n_inputs, n_outputs, **kwargs) and return a torch.nn.Module whose input is one float32 matrix
[rows, n_inputs]. Any exception in them becomes the cause of an ArchitectureError.
"""

from __future__ import annotations

import importlib
import linecache
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution.data.preprocessing import Features, ModelInputs

MAX_INPUTS = 65_536
SOURCE_NAME = "<architecture>"


@dataclass(frozen=True)
class ImportArchitecture:
    """Architecture `import`; `callable` is package.module:function."""

    callable: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module:
        module, _, name = self.callable.partition(":")
        try:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
        except Exception as error:
            hint = "It must be installed for the Python that pg_tensile.python names."
            raise ArchitectureError(f'could not import "{self.callable}": {error}', hint=hint) from error
        return _wrap(function, self.kwargs, inputs, outputs, f'"{self.callable}"')  # type: ignore[arg-type]


@dataclass(frozen=True)
class PythonArchitecture:
    """Architecture `python`; `source` defines build(n_inputs, n_outputs)."""

    source: str

    def build(self, inputs: ModelInputs, outputs: int) -> nn.Module:
        namespace: dict[str, Any] = {"__name__": "pg_tensile_architecture"}
        lines = self.source.splitlines(keepends=True)
        linecache.cache[SOURCE_NAME] = (len(self.source), None, lines, SOURCE_NAME)  # for tracebacks
        try:
            exec(compile(self.source, SOURCE_NAME, "exec"), namespace)
        except (Exception, SystemExit) as error:
            raise ArchitectureError(
                f"the architecture's source raised {_describe(error)}", hint="See the traceback."
            ) from error
        if not callable(namespace.get("build")):
            raise ArchitectureError(
                "the architecture's source does not define build", hint="Define build(n_inputs, n_outputs)."
            )
        return _wrap(namespace["build"], {}, inputs, outputs, "build")


class FlatModel(nn.Module):
    """Adapter that passes a user's module one matrix: numeric features, one-hot categories, array elements."""

    def __init__(self, module: nn.Module, inputs: ModelInputs, outputs: int) -> None:
        super().__init__()
        self.module = module
        self._cardinalities = inputs.cardinalities
        self._outputs = outputs

    def forward(self, features: Features) -> Tensor:
        parts = [features.numeric]
        for column, cardinality in enumerate(self._cardinalities):
            parts.append(F.one_hot(features.categories[:, column], cardinality).to(torch.float32))
        parts.extend(array.to(torch.float32) for array in features.arrays)
        rows = len(features.numeric)
        try:
            outputs = self.module(torch.cat(parts, 1))
        except (torch.AcceleratorError, torch.OutOfMemoryError):  # they may come from any call, and are the device's
            raise
        except Exception as error:
            raise ArchitectureError(f"the model raised {_describe(error)}", hint="See the traceback.") from error
        if not isinstance(outputs, Tensor) or outputs.shape != (rows, self._outputs):
            returned = list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            hint = f"It must return a tensor [rows, {self._outputs}]."
            raise ArchitectureError(f"the model returned {returned} for {rows} rows", hint=hint)
        return outputs


def _wrap(
    function: Callable[..., Any], kwargs: dict[str, Any], inputs: ModelInputs, outputs: int, name: str
) -> nn.Module:
    """Return the model that `function` builds, after a trial on two rows of zeros."""
    width = inputs.numeric + sum(inputs.cardinalities) + sum(array.length for array in inputs.arrays)
    if width > MAX_INPUTS:
        hint = "Leave out or group categories with many values; they are one-hot encoded."
        raise ArchitectureError(f"the features are {width} inputs, more than {MAX_INPUTS}", hint=hint)
    try:
        module = function(width, outputs, **kwargs)
    except (Exception, SystemExit) as error:
        raise ArchitectureError(f"{name} raised {_describe(error)}", hint="See the traceback.") from error
    if not isinstance(module, nn.Module):
        hint = "Return an instance of torch.nn.Module."
        raise ArchitectureError(f"{name} returned {type(module).__name__} instead of a module", hint=hint)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ArchitectureError(f"{name} returned a module without parameters to train")
    model = FlatModel(module, inputs, outputs)
    zeros = [torch.zeros(2, inputs.numeric), torch.zeros(2, len(inputs.cardinalities), dtype=torch.int64)]
    arrays = [torch.zeros(2, array.length) for array in inputs.arrays]
    with torch.no_grad():
        model.eval()(Features.from_flat([*zeros, *arrays]))
    return model.train()


def _describe(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
