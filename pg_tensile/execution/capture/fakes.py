"""Corrections where PyTorch's kernels for fake tensors differ from the real ones: layouts, sizes and missing kernels.

All differences were found by running every operator of PyTorch's own test samples both ways, in several memory layouts;
the tests repeat that for the operators listed here. The rules for layouts apply to the CPU: CUDA uses other libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten

# ---- kernels that are missing, fail (on empty tensors) or are slow: these create the results from fake tensors ----


def _like_second(gradient: Tensor, like: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _parameters_type(default: torch.dtype, parameters: Iterable[Any]) -> torch.dtype:
    """Return the type of a norm's values per channel: its parameters' (under autocast not that of its input)."""
    return next((tensor.dtype for tensor in parameters if isinstance(tensor, Tensor)), default)


def _batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *args: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _parameters_type(x.dtype, (weight, bias, mean, variance))
    shape = (x.shape[1] if training else 0,)
    saved = x.new_empty(shape, dtype=dtype), x.new_empty(shape, dtype=dtype)
    return torch.empty_like(x, memory_format=suggest_memory_format(x)), *saved


def _batch_norm_backward(
    gradient: Tensor, x: Tensor, weight: Any, mean: Any, variance: Any, *args: Any
) -> tuple[Tensor | None, ...]:
    dtype = _parameters_type(x.dtype, (weight, mean, variance))
    mask = args[-1]
    return (
        torch.empty_like(x, memory_format=suggest_memory_format(x)) if mask[0] else None,
        *(x.new_empty((x.shape[1],), dtype=dtype) if is_wanted else None for is_wanted in mask[1:]),
    )


KERNELS: dict[Any, Callable[..., Any]] = {
    aten.mse_loss_backward.default: _like_second,
    aten.smooth_l1_loss_backward.default: _like_second,
    aten.huber_loss_backward.default: _like_second,
    aten.multi_margin_loss_backward.default: _like_second,
    aten.multilabel_margin_loss_backward.default: _like_second,
    # fused updates return nothing; without an entry here, the fake mode would execute those that it has no kernel for
    aten._fused_adamw_.tensor_lr: lambda *args, **kwargs: None,
    aten._fused_adam_.tensor_lr: lambda *args, **kwargs: None,
    aten._fused_sgd_.tensor_lr: lambda *args, **kwargs: None,
}
CPU_KERNELS: dict[Any, Callable[..., Any]] = {  # PyTorch's fake kernels take 13 ms each
    aten.native_batch_norm.default: _batch_norm,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}

# ---- layouts: functions that create a result again, in the layout or type of the real kernel ----


def _contiguous(result: Tensor, args: tuple[Any, ...]) -> Tensor:
    return torch.empty_like(result, memory_format=torch.contiguous_format)


def _like_first(result: Tensor, args: tuple[Any, ...]) -> Tensor:
    return torch.empty_like(args[0], dtype=result.dtype)


def _as_suggested_by(index: int) -> Callable[[Tensor, tuple[Any, ...]], Tensor]:
    return lambda result, args: torch.empty_like(result, memory_format=suggest_memory_format(args[index]))


def _of_parameters_type(result: Tensor, args: tuple[Any, ...]) -> Tensor:
    return torch.empty_like(result, dtype=_parameters_type(result.dtype, args[1:5]))


def _of_inputs_type(result: Tensor, args: tuple[Any, ...]) -> Tensor:
    """Return the gradient of a norm's input in the type of that input."""
    return torch.empty_like(result, dtype=args[1].dtype, memory_format=suggest_memory_format(result))


def _if_gradients(result: Tensor, args: tuple[Any, ...]) -> Tensor | None:
    """Return the workspace for backward, or None in an evaluation, which has none."""
    return result if torch.is_grad_enabled() else None


def _if_weights_needed(result: Tensor, args: tuple[Any, ...]) -> Tensor | None:
    return result if len(args) <= 10 or args[10] else None


NORM = {1: _of_parameters_type, 2: _of_parameters_type}
LAYOUTS: dict[Any, Mapping[int, Callable[[Tensor, tuple[Any, ...]], Tensor | None]]] = {  # by index of the result
    aten.mkldnn_rnn_layer.default: {3: _if_gradients},
    aten._native_multi_head_attention.default: {1: _if_weights_needed},
    aten.native_group_norm.default: NORM,
    aten.native_layer_norm.default: NORM,
    aten.native_group_norm_backward.default: {0: _of_inputs_type},
    aten.native_layer_norm_backward.default: {0: _of_inputs_type},
    aten._log_softmax_backward_data.default: {0: _contiguous},
    aten.log_sigmoid_forward.default: {0: _contiguous, 1: _contiguous},
    aten.native_dropout_backward.default: {0: _like_first},
    aten.binary_cross_entropy.default: {0: _like_first},
    aten.replication_pad2d_backward.default: {0: _as_suggested_by(1)},
    aten.max_unpool2d.default: {0: _as_suggested_by(0)},
    aten.channel_shuffle.default: {0: _as_suggested_by(0)},
    aten.pow.Scalar: {0: _contiguous},
}

# ---- sizes ----

# losses whose result keeps the storage of all the terms that were summed
REDUCED_IN_PLACE = (
    aten.mse_loss.default,
    aten.smooth_l1_loss.default,
    aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
)
# indices of the results whose size only the real kernel determines
UNKNOWN_SIZES: dict[Any, tuple[int, ...]] = {
    aten.mkldnn_rnn_layer.default: (3,),  # workspace
    aten._cudnn_rnn.default: (3, 4),  # reserve space, weights
    aten.cudnn_batch_norm.default: (3,),  # reserve space
    aten._batch_norm_with_update.default: (3,),
    aten._embedding_bag.default: (1, 2, 3),  # depend on the kernel chosen
}


def fake_call(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of an operator for fake tensors, under a fake mode."""
    kernel = KERNELS.get(func)
    if kernel is not None:
        return kernel(*args, **kwargs)
    if func in CPU_KERNELS and args[0].device.type == "cpu" and args[0].numel():
        return CPU_KERNELS[func](*args, **kwargs)
    returned = func(*args, **kwargs)
    if func in REDUCED_IN_PLACE and returned.dim() == 0:
        return returned.new_empty(torch.broadcast_shapes(args[0].shape, args[1].shape)).as_strided((), ())
    relay = LAYOUTS.get(func)
    if relay is None:
        return returned
    results = returned if isinstance(returned, tuple) else (returned,)
    relaid = tuple(
        relay[index](result, args) if index in relay and result is not None and result.device.type == "cpu" else result
        for index, result in enumerate(results)
    )
    return relaid if isinstance(returned, tuple) else relaid[0]
