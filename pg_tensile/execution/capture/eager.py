"""Eager execution of a `StepSpec`: by PyTorch itself, with autograd and torch.optim.

Results of every plan are compared with it, bit by bit, so it uses the same kernels as the captured step: fused
optimizers, and clipping with foreach=False. It also trains under the policy none, models that cannot be captured
included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from pg_tensile.execution.capture.optimizers import WEIGHT_DECAY, average, average_states, make_state
from pg_tensile.execution.capture.spec import OptimizerSpec, StepSpec
from pg_tensile.execution.capture.training_step import clip_gradients, forward_loss, micro_batches, output_of
from pg_tensile.execution.distributed.all_reduce import arrivals, buckets
from pg_tensile.execution.distributed.eager_exchange import EagerExchange
from pg_tensile.execution.distributed.group import check_alike


class EagerResult(NamedTuple):
    """Loss (one element) and, if the spec returns outputs, those picked from each micro-batch."""

    loss: Tensor
    outputs: tuple[Tensor, ...]


def make_optimizer(model: nn.Module, optimizer: OptimizerSpec, one_group: bool = False) -> Optimizer:
    """Return torch.optim's optimizer, fused, with a parameter group for each trainable parameter.

    With `one_group`, a single call updates all of them, to the same bits."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [{"params": [parameter]} for parameter in trained]
    if one_group:
        groups = [{"params": trained}]
    decay = WEIGHT_DECAY[optimizer.name] if optimizer.weight_decay is None else optimizer.weight_decay
    options: dict[str, Any] = {
        "lr": optimizer.learning_rate,
        "weight_decay": decay,
        "maximize": optimizer.maximize,
        "fused": True,
    }
    if optimizer.name == "sgd":
        return SGD(groups, momentum=optimizer.momentum, nesterov=optimizer.nesterov, **options)
    kind = Adam if optimizer.name == "adam" else AdamW
    return kind(groups, betas=optimizer.betas, eps=optimizer.eps, amsgrad=optimizer.amsgrad, **options)


class EagerStep:
    """Training of `model` in place; random operators draw from PyTorch's default generators.

    `one_group` as in `make_optimizer`."""

    def __init__(self, model: nn.Module, spec: StepSpec, one_group: bool = False) -> None:
        self.model = model.train()
        self.spec = spec
        self.optimizer = make_optimizer(model, spec.optimizer, one_group)
        self._trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._exchange: EagerExchange | None = None  # known after the first backward, and the same for all steps

    def step(
        self,
        inputs: Sequence[Any],
        targets: Sequence[Tensor],
        learning_rate: float | None = None,
        share: float | None = None,
    ) -> EagerResult:
        """Execute one training step in the model's current mode.

        `inputs` are the model's arguments, tensors if the spec accumulates; `learning_rate` None means the spec's.
        `share`: the rank's part of the batch's rows, if the spec has ranks; None means an equal one.

        Raises CaptureError if the loss or the outputs do not fit the spec, TrainingError if the ranks disagree about
        the gradients that there are, and any exception of the model."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.optimizer.learning_rate if learning_rate is None else learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        total: Tensor | None = None
        outputs: list[Tensor] = []
        share = 1 / self.spec.ranks.size if self.spec.ranks is not None and share is None else share
        parts = micro_batches(inputs, targets, self.spec.accumulation)
        for number, (part, part_targets) in enumerate(parts, 1):
            picked, loss = forward_loss(self.model, part, part_targets, self.spec)
            total = loss.detach() if total is None else total + loss.detach()
            if self.spec.returns_outputs:
                outputs.append(output_of(picked))
            self._backward(loss, share, number == len(parts))
        if self._exchange is not None:
            self._exchange.end()
        if self.spec.clip is not None:
            clip_gradients(self.model.parameters(), self.spec.clip)
        self.optimizer.step()
        self._average()
        assert total is not None
        return EagerResult(total, tuple(outputs))

    def _backward(self, loss: Tensor, share: float | None, last: bool) -> None:
        """Compute gradients, and begin to exchange those of the `last` part of a batch."""
        if self.spec.ranks is None:
            loss.backward()
            return
        assert share is not None
        if self._exchange is not None:
            if last:
                self._exchange.begin(share)
            loss.backward()
            return
        with arrivals(self._trainable) as order:
            loss.backward()
        names = buckets(self._trainable, order, self.spec.ranks.bucket_bytes)
        check_alike("the gradients that they exchange", str(names))
        self._exchange = EagerExchange(self._trainable, names, self.spec.ranks.size)
        if last:
            self._exchange.begin(share, arrived=True)

    @torch.no_grad()
    def _average(self) -> None:
        """Move the averages of all parameters that the step has updated; they are part of the optimizer's state."""
        power = self.spec.optimizer.averaging
        if not power:
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.optimizer.state[parameter]
                for kept in average_states(power):
                    if kept.key not in state:
                        state[kept.key] = make_state(kept, parameter).fill_(kept.initial)
                average(power, parameter, state)
