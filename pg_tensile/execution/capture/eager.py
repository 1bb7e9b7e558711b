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

from pg_tensile.errors import TrainingError
from pg_tensile.execution.capture.optimizers import WEIGHT_DECAY, average, average_states, make_state
from pg_tensile.execution.capture.spec import OptimizerSpec, StepSpec
from pg_tensile.execution.capture.training_step import forward_loss, micro_batches, output_of
from pg_tensile.execution.distributed.all_reduce import ALL_REDUCE, arrivals, buckets
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
        self._buckets: list[list[str]] | None = None  # known after the first backward, and the same for all steps

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
        for part, part_targets in micro_batches(inputs, targets, self.spec.accumulation):
            picked, loss = forward_loss(self.model, part, part_targets, self.spec)
            total = loss.detach() if total is None else total + loss.detach()
            if self.spec.returns_outputs:
                outputs.append(output_of(picked))
            if self.spec.ranks is None or self._buckets is not None:
                loss.backward()
                continue
            with arrivals(self._trainable) as order:
                loss.backward()
            self._buckets = buckets(self._trainable, order, self.spec.ranks.bucket_bytes)
            check_alike("the gradients that they exchange", str(self._buckets))
        if self.spec.ranks is not None:
            self._exchange(self.spec.ranks.size, share)
        if self.spec.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.clip, foreach=False)
        self.optimizer.step()
        self._average()
        assert total is not None
        return EagerResult(total, tuple(outputs))

    @torch.no_grad()
    def _exchange(self, ranks: int, share: float | None) -> None:
        """Average the gradients over all ranks. Raises TrainingError if there are not those of the first step."""
        assert self._buckets is not None
        gradients = {name: parameter.grad for name, parameter in self._trainable.items() if parameter.grad is not None}
        different = gradients.keys() ^ {name for bucket in self._buckets for name in bucket}
        if different:
            hint = "Train it as a single process."
            raise TrainingError(f'not every step has a gradient of "{min(different)}", which ranks need', hint=hint)
        turn = torch.zeros((), dtype=torch.int64)
        part = torch.tensor(1 / ranks if share is None else share, dtype=torch.float64)
        for bucket in self._buckets:
            ALL_REDUCE([gradients[name] for name in bucket], turn, part, ranks)

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
