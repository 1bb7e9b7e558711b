"""Specification of a training step, apart from its model: loss, optimizer, clipping, autocast and accumulation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from pg_tensile.errors import CaptureError

OPTIMIZERS = ("sgd", "adam", "adamw")
BUCKET_BYTES = 4 << 20  # with larger ones the peak of memory grows, as all gradients of a bucket wait for the last one


class OptimizerSpec(NamedTuple):
    """Name and arguments of an optimizer of torch.optim.

    `momentum`, `dampening` and `nesterov` apply to sgd; `betas`, `eps` and `amsgrad` to adam and adamw. None as
    `weight_decay` means PyTorch's default. The learning rate is an input of every step, so a schedule may change it.

    `averaging` is the power η of polynomial-decay averaging (Shamir and Zhang 2013): step t moves an average of each
    parameter, which is part of the optimizer state, by (η + 1) / (η + t) towards the parameter. 0: no average."""

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
    averaging: int = 0


class RankSpec(NamedTuple):
    """Ranks that take each step together: their number, and the most bytes of gradients that are exchanged at once."""

    size: int
    bucket_bytes: int = BUCKET_BYTES


@dataclass(frozen=True)
class StepSpec:
    """One training step, apart from its model.

    `loss(outputs, *targets)` returns a tensor of one element. `output_key` (a key, an attribute or an index) selects
    the argument of `loss`, and the result of the step if it `returns_outputs`, from outputs that are not a single
    tensor. `clip` is the largest norm of all gradients together. `autocast` is None or "bf16", which covers forward
    and loss. `accumulation` is the number of equal parts into which the batch is cut along dimension 0; the loss is the
    mean of their losses. With `ranks`, each of several processes takes the step on its part of the batch's rows, and
    the gradients are averaged over all rows before clipping and update; None means that this process is the only one.
    """

    loss: Callable[..., Tensor]
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    clip: float | None = None
    autocast: str | None = None
    accumulation: int = 1
    output_key: str | int | None = None
    returns_outputs: bool = False
    ranks: RankSpec | None = None

    def __post_init__(self) -> None:
        """Raise CaptureError if the specification is invalid, or would silently be trained wrongly."""
        optimizer = self.optimizer
        if optimizer.name not in OPTIMIZERS:
            raise CaptureError(f'unknown optimizer "{optimizer.name}"', hint="Use sgd, adam or adamw.")
        if optimizer.dampening:
            # the first step of a run ignores dampening, the others apply it: their graphs differ
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
        if self.ranks is not None and self.ranks.size < 2:
            raise CaptureError(f"a step of {self.ranks.size} ranks exchanges nothing", "Leave ranks out.")

    def pick(self, outputs: Any) -> Any:
        """Return the part of a model's outputs that the loss takes. Raises CaptureError if `output_key` is missing."""
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
