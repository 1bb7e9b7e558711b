"""Optimizers as one fused update per parameter, with state that is part of the trace.

torch.optim's fused kernels are called for one parameter at a time, which gives the same bits as torch.optim with
`fused=True` and a parameter group for each parameter. An average of the parameter, if there is one, follows the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from pg_tensile.errors import CaptureError
from pg_tensile.execution.capture.spec import OptimizerSpec

aten = torch.ops.aten
WEIGHT_DECAY = {"sgd": 0.0, "adam": 0.0, "adamw": 1e-2}  # PyTorch's defaults
AVERAGE, STEPS = "average", "averaged_steps"  # keys of the state that averaging adds


class StateSpec(NamedTuple):
    """One tensor of a parameter's optimizer state: one float32 if `is_scalar`, else in the parameter's layout."""

    key: str
    is_scalar: bool = False
    initial: float = 0.0


def states(optimizer: OptimizerSpec) -> tuple[StateSpec, ...]:
    """Return the state that an optimizer keeps for each parameter that has a gradient."""
    kept = [StateSpec("exp_avg"), StateSpec("exp_avg_sq"), StateSpec("step", is_scalar=True)]
    if optimizer.name == "sgd":
        # −0.0 × momentum + gradient equals the gradient to the last bit, as in PyTorch's first step
        kept = [StateSpec("momentum_buffer", initial=-0.0)] if optimizer.momentum else []
    elif optimizer.amsgrad:
        kept.append(StateSpec("max_exp_avg_sq"))
    return (*kept, *average_states(optimizer.averaging))


def average_states(power: int) -> tuple[StateSpec, ...]:
    """Return the state of an average: itself, and (power + t) / (power + 1) after step t."""
    if not power:
        return ()
    return (StateSpec(AVERAGE), StateSpec(STEPS, is_scalar=True, initial=power / (power + 1)))


def make_state(spec: StateSpec, parameter: Tensor) -> Tensor:
    """Return an uninitialised tensor for one entry of a parameter's optimizer state."""
    if spec.is_scalar:
        return torch.empty((), dtype=torch.float32, device=parameter.device)
    return torch.empty_like(parameter, requires_grad=False)


def check_parameter(name: str, parameter: Tensor) -> None:
    """Raise CaptureError if the fused kernels cannot update a parameter."""
    if not parameter.is_floating_point():
        hint = "Keep complex weights as two real parameters, or train with the policy none."
        raise CaptureError(f'the parameter "{name}" is of type {parameter.dtype}, which fused optimizers lack', hint)


def update(
    optimizer: OptimizerSpec, parameter: Tensor, gradient: Tensor, state: dict[str, Tensor], learning_rate: Tensor
) -> None:
    """Update one parameter by one step. `learning_rate`: float64, no dimensions, on the CPU."""
    weight_decay = optimizer.weight_decay
    if weight_decay is None:
        weight_decay = WEIGHT_DECAY[optimizer.name]
    if optimizer.name == "sgd":
        aten._fused_sgd_.tensor_lr(
            [parameter],
            [gradient],
            [state["momentum_buffer"]] if optimizer.momentum else [],
            weight_decay=weight_decay,
            momentum=optimizer.momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=optimizer.nesterov,
            maximize=optimizer.maximize,
            is_first_step=False,
        )
    else:
        _update_adam(optimizer, parameter, gradient, state, learning_rate, weight_decay)
    if optimizer.averaging:
        average(optimizer.averaging, parameter, state)


def average(power: int, parameter: Tensor, state: Mapping[str, Tensor]) -> None:
    """Move the average towards a parameter that was just updated; the first step sets it to the parameter."""
    state[STEPS].add_(1 / (power + 1))
    state[AVERAGE].lerp_(parameter, state[STEPS].reciprocal().to(parameter.dtype))


def _update_adam(
    optimizer: OptimizerSpec,
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    learning_rate: Tensor,
    weight_decay: float,
) -> None:
    state["step"].add_(1)
    kernel = aten._fused_adam_.tensor_lr if optimizer.name == "adam" else aten._fused_adamw_.tensor_lr
    kernel(
        [parameter],
        [gradient],
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [state["max_exp_avg_sq"]] if optimizer.amsgrad else [],
        [state["step"]],
        lr=learning_rate,
        beta1=optimizer.betas[0],
        beta2=optimizer.betas[1],
        weight_decay=weight_decay,
        eps=optimizer.eps,
        amsgrad=optimizer.amsgrad,
        maximize=optimizer.maximize,
    )
