"""Protection of a model's tensors while an executor holds them.

Between two steps, parameters and buffers may be in host memory only, and PyTorch would read through a null pointer. So
as long as an executor has a model, each of its parameters and buffers that the iteration uses has another class (as
PyTorch's own uninitialised parameters do): its shape, type and layout are available, all other uses raise.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from pg_tensile.errors import ExecutorError
from pg_tensile.execution.capture.captured import Captured, Persistent
from pg_tensile.planning.trace.trace import Kind

_T: Any = torch.Tensor
_ALLOWED = frozenset(
    [
        *(_T.shape.__get__, _T.ndim.__get__, _T.dtype.__get__, _T.device.__get__, _T.layout.__get__),
        *(_T.requires_grad.__get__, _T.is_leaf.__get__, _T.grad.__get__, _T.grad.__set__, _T.grad_fn.__get__),
        *(_T.size, _T.stride, _T.dim, _T.numel, _T.element_size, _T.is_floating_point, _T.is_complex, _T.__hash__),
    ]
)


class _Held:
    """Mixin of the class of a tensor that an executor holds: raises ExecutorError on all but the allowed functions."""

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function in _ALLOWED:
            with torch._C.DisableTorchFunctionSubclass():
                return function(*args, **(kwargs or {}))
        hint = "Use it inside `with executor.resident():`, or close the executor first; its state_dict() works always."
        raise ExecutorError("the model is held by an executor: its tensors may not be in memory", hint)


@cache
def _held_class(original: type[torch.Tensor]) -> type[torch.Tensor]:
    return types.new_class(f"Held{original.__name__}", (_Held, original))


class Bound(NamedTuple):
    """A parameter or buffer of the model that realises a persistent tensor."""

    persistent: Persistent
    tensor: torch.Tensor
    original_class: type[torch.Tensor]
    device: torch.device  # where it was before the executor took it

    def hold(self) -> None:
        self.tensor.__class__ = _held_class(self.original_class)

    def release(self) -> None:
        self.tensor.__class__ = self.original_class


def bind(captured: Captured, persistents: Iterable[Persistent], model: nn.Module) -> tuple[Bound, ...]:
    """Return the parameters and buffers of `model` that are among `persistents`.

    Raises ExecutorError if the model lacks one, if its shape or type is not as captured, or if another executor holds
    it."""
    bound = []
    for persistent in persistents:
        if persistent.kind not in (Kind.PARAMETER, Kind.BUFFER):
            continue
        try:
            is_parameter = persistent.kind == Kind.PARAMETER
            tensor = (model.get_parameter if is_parameter else model.get_buffer)(persistent.name)
        except AttributeError:
            raise ExecutorError(f'the model has no {persistent.kind.name.lower()} "{persistent.name}"') from None
        if isinstance(tensor, _Held):
            raise ExecutorError("another executor holds the model", hint="Close it first.")
        value = captured.values[persistent.slot]
        if (tuple(tensor.shape), tensor.dtype) != (value.shape, value.dtype):
            message = f'"{persistent.name}" is {tensor.dtype} {list(tensor.shape)}, but was captured as {value.dtype}'
            raise ExecutorError(f"{message} {list(value.shape)}", hint="Capture the model again.")
        bound.append(Bound(persistent, tensor, type(tensor), tensor.device))
    return tuple(bound)
