"""What a training step is, besides its model: the loss, the optimizer, clipping, autocast, accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pg_tensile.errors import CaptureError

OPTIMIZERS = ("sgd", "adam", "adamw")


class OptimizerSpec(NamedTuple):
    """An optimizer of torch.optim by its name, with its arguments; None stands for PyTorch's default.

    `momentum`, `dampening` and `nesterov` are of sgd; `betas`, `eps` and `amsgrad` of adam and adamw. The learning
    rate is an input of every step, so a schedule may change it."""

    name: str = "adamw"
    learning_rate: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    amsgrad: bool = False
    weight_decay: float | None = None
    maximize: bool = False


@dataclass(frozen=True)
class StepSpec:
    """One training step.

    `loss(outputs, *targets)` returns a tensor of one element. `output_key` picks what `loss` gets (and what the step
    returns, if it `returns_outputs`) from outputs that are not a single tensor: a key, an attribute or a place.
    `clip`: the largest norm of all gradients together. `autocast`: "bf16", over forward and loss.
    `accumulation`: the batch is cut into that many equal parts along dimension 0; the loss is the mean of theirs."""

    loss: Callable[..., Tensor]
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    clip: float | None = None
    autocast: str | None = None
    accumulation: int = 1
    output_key: str | int | None = None
    returns_outputs: bool = False

    def __post_init__(self) -> None:
        """Raises CaptureError on a step that does not exist or would be trained silently wrong."""
        optimizer = self.optimizer
        if optimizer.name not in OPTIMIZERS:
            raise CaptureError(f'unknown optimizer "{optimizer.name}"', hint="Use sgd, adam or adamw.")
        if optimizer.dampening:
            # the first step of a run ignores dampening, all others do not: they have different graphs
            hint = "Use SGD without dampening, or train with the policy none."
            raise CaptureError("SGD with dampening cannot be captured: its first step differs", hint=hint)
        if optimizer.nesterov and not optimizer.momentum:
            raise CaptureError("nesterov needs a momentum above 0", hint="Set momentum, 0.9 for example.")
        if self.autocast not in (None, "bf16"):
            hint = "Use bf16, or train without autocast: fp16 needs a GradScaler, whose steps depend on the data."
            raise CaptureError(f"autocast to {self.autocast!r} cannot be captured", hint=hint)
        if self.clip is not None and not (math.isfinite(self.clip) and self.clip > 0):
            raise CaptureError(f"clip is {self.clip}, but must be a number above 0")
        if self.accumulation < 1:
            raise CaptureError(f"accumulation is {self.accumulation}, but must be at least 1")

    def pick(self, outputs: Any) -> Any:
        """What the loss gets of a model's outputs."""
        key = self.output_key
        if key is None:
            return outputs
        try:
            if isinstance(key, str) and not isinstance(outputs, Mapping):
                return getattr(outputs, key)
            return outputs[key]
        except (AttributeError, KeyError, IndexError, TypeError) as error:
            message = f"the model's outputs ({type(outputs).__name__}) have no {key!r}"
            raise CaptureError(message, hint="Check output_key.") from error
