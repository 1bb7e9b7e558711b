"""Effects of an operator on its arguments: from its schema, and from tables where the schema is incomplete or wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import torch

from pg_tensile.planning.trace.trace import Mode

aten = torch.ops.aten
BATCH_NORMS = (  # change running_mean and running_var; in training no other result depends on them
    aten.native_batch_norm.default,
    aten.cudnn_batch_norm.default,
    aten.miopen_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._batch_norm_with_update.default,
)
STATISTICS = ("running_mean", "running_var")
UNDECLARED_WRITES = {aten.mkldnn_rnn_layer_backward.default: ("workspace",)}  # arguments used as scratch
FUSED_UPDATES = (  # declared to change their gradients, but only do so to unscale them, which is never requested here
    aten._fused_adamw_.tensor_lr,
    aten._fused_adam_.tensor_lr,
    aten._fused_sgd_.tensor_lr,
)


@cache
def mutates(func: Callable[..., Any]) -> bool:
    """Return whether the operator may change one of its arguments."""
    declared = any(argument.is_write for argument in func._schema.arguments)  # type: ignore[attr-defined]
    return declared or func in BATCH_NORMS or func in UNDECLARED_WRITES


@cache
def is_random(func: Callable[..., Any]) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags  # type: ignore[attr-defined]


def arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield every argument of the schema that is given, with its value."""
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args):
            yield argument, args[index]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def modes(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[Any, Mode]]:
    """Yield the value of every given argument, with the mode in which the operator accesses the tensors in it."""
    given = {argument.name: value for argument, value in arguments(func, args, kwargs)}
    for argument, value in arguments(func, args, kwargs):
        writes = argument.is_write or argument.name in UNDECLARED_WRITES.get(func, ())
        mode = Mode.WRITE if writes else Mode.READ
        if func in BATCH_NORMS and argument.name in STATISTICS:
            mode = Mode.STATS if given.get("training", True) else Mode.READ
        elif func in FUSED_UPDATES and argument.name == "grads":
            mode = Mode.READ
        yield value, mode
