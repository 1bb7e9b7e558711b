"""Models with habits that those of zoo.py do not have: uses of state, outputs, losses and optimizers."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from pg_tensile.execution.capture import OptimizerSpec
from tests.unit.zoo import NAMED, Case, ids, images, regressed, rows, towards_waves
from tests.unit.zoo_layers import linear, of

# ---- parameters and state ----


class Containers(nn.Module):
    """Parameters in lists, dictionaries and without dimensions; buffers that are not saved, of integers, updated."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(2)])
        self.biases = nn.ParameterDict({"a": nn.Parameter(torch.zeros(8)), "b": nn.Parameter(torch.zeros(8))})
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 8))
        self.also = [self.weights[0], {"bias": self.biases["a"]}]
        self.register_buffer("mask", torch.ones(8, 8).tril(), persistent=False)
        self.calls: Tensor
        self.mean: Tensor
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = torch.tanh(x @ self.also[0] + self.also[1]["bias"]) @ (self.weights[1] * self.mask)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        with torch.no_grad():
            self.biases["b"].clamp_(-0.01, 0.01)
        return (y + self.biases["b"] - self.mean) / self.temperature + self.empty.sum() + self.calls


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def parametrized() -> nn.Module:
    module = linear()
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


def hooked() -> nn.Module:
    """Hooks on modules, tensors and parameters, of the forward and of the backward pass."""
    first, middle, last = linear(), nn.Tanh(), linear()
    first.register_forward_hook(lambda module, args, output: output * 1.5)
    last.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    middle.register_full_backward_hook(lambda module, incoming, outgoing: (incoming[0] * 0.5,))
    last.weight.register_hook(lambda gradient: gradient * 2)
    return nn.Sequential(first, middle, last)


def checkpointed(self: Any, x: Tensor) -> Tensor:
    x = checkpoint(lambda y: F.dropout(torch.tanh(self.first(y)), 0.3), x, use_reentrant=False)
    x = torch.utils.checkpoint.checkpoint(self.second, x, use_reentrant=True)
    return checkpoint_sequential(nn.Sequential(self.third, nn.Dropout(0.2)), 2, x, use_reentrant=False)


def penalised(self: Any, x: Tensor) -> Tensor:
    """A gradient within the forward pass, as in gradient penalties."""
    x = x.detach().requires_grad_()
    y = torch.tanh(self.inner(x)).sum()
    (slope,) = torch.autograd.grad(y, x, create_graph=True)
    return slope + y


def gradient_free(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = self.teacher(x)
    return self.student(x) - teacher


def offloaded(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return torch.tanh(self.inner(x)) * x


def deep_residual(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = x + 0.1 * F.dropout(layer(x).relu(), 0.1)
    return x


# ---- outputs and losses ----

Pair = namedtuple("Pair", "logits features")


@dataclass
class Output:
    logits: Tensor
    extra: Any = None


def adamw(**options: Any) -> OptimizerSpec:
    return OptimizerSpec("adamw", 1e-2, **options)


def sgd(**options: Any) -> OptimizerSpec:
    return OptimizerSpec("sgd", 1e-2, **options)


HABITS: dict[str, Case] = dict(
    (
        regressed("containers", Containers),
        regressed("parametrized", parametrized),
        regressed("hooked", hooked),
        regressed("checkpointed", of(checkpointed, first=linear, second=linear, third=linear)),
        regressed("penalised", of(penalised, inner=linear)),
        regressed("gradient_free", of(gradient_free, teacher=linear, student=linear)),
        regressed("offloaded", of(offloaded, inner=linear)),
        regressed("deep_residual", of(deep_residual, layers=lambda: nn.ModuleList(linear() for _ in range(30)))),
        regressed(
            "double_precision", lambda: nn.Sequential(linear(), nn.Tanh()).double(), 4, 8, inputs_type=torch.float64
        ),
        regressed(
            "half_precision",
            lambda: nn.Sequential(linear(), nn.LayerNorm(8)).bfloat16(),
            4,
            8,
            inputs_type=torch.bfloat16,
        ),
        regressed("one_row", lambda: nn.Sequential(linear(), nn.Tanh()), 1, 8),
        regressed("no_batch", lambda: nn.Sequential(linear(), nn.Tanh()), 8),
        regressed("no_rows", lambda: nn.Sequential(linear(), nn.Tanh()), 0, 8),
        regressed(
            "dictionary",
            of(lambda self, x: {"items": self.inner(x), "z": x}, inner=linear),
            4,
            8,
            output_key="items",
            returns_outputs=True,
        ),
        regressed("pair", of(lambda self, x: Pair(self.inner(x), x), inner=linear), 4, 8, output_key="logits"),
        regressed("record", of(lambda self, x: Output(self.inner(x)), inner=linear), 4, 8, output_key="logits"),
        (
            "several_outputs",
            Case(
                of(lambda self, x: (self.one(x), self.two(x)), one=linear, two=linear),
                rows(4, 8),
                rows(4, 8),
                lambda outputs, target: F.l1_loss(outputs[0], target) + F.huber_loss(outputs[1], target),
            ),
        ),
        (
            "smoothed",
            Case(
                linear,
                rows(4, 8),
                lambda: (torch.tensor([1, -100, 7, 0]),),
                partial(F.cross_entropy, label_smoothing=0.1),
            ),
        ),
        (
            "segmented",
            Case(
                partial(nn.Conv2d, 3, 5, 1),
                images(4),
                ids(5, 2, 4, 4),
                partial(F.cross_entropy, weight=torch.linspace(0.5, 1, 5)),
            ),
        ),
        (
            "turned_logits",
            Case(
                linear,
                rows(2, 5, 8),
                ids(8, 2, 5),
                lambda logits, target: F.cross_entropy(logits.transpose(1, 2), target),
            ),
        ),
        ("bce", Case(linear, rows(4, 8), lambda: (torch.rand(4, 8).round(),), F.binary_cross_entropy_with_logits)),
        (
            "margins",
            Case(
                linear,
                rows(4, 8),
                ids(8, 4),
                lambda output, target: (
                    F.multi_margin_loss(output, target) + F.multilabel_margin_loss(output, F.one_hot(target, 8))
                ),
            ),
        ),
        (
            "triplet",
            Case(
                of(lambda self, *x: tuple(map(self.inner, x)), inner=linear),
                lambda: tuple(torch.randn(3, 4, 8)),
                tuple,
                lambda outputs: F.triplet_margin_loss(*outputs) + F.cosine_similarity(*outputs[:2]).mean(),
            ),
        ),
        (
            "bag",
            Case(
                partial(nn.EmbeddingBag, 50, 8, mode="mean"),
                lambda: (torch.randint(0, 50, (7,)), torch.tensor([0, 3, 4])),
                tuple,
                towards_waves,
            ),
        ),
        (
            "renormed",
            Case(
                partial(nn.Embedding, 20, 8, padding_idx=0, max_norm=1.0, scale_grad_by_freq=True),
                ids(20, 3, 4),
                tuple,
                towards_waves,
            ),
        ),
        regressed(
            "clipped_sgd",
            of(lambda self, x: self.two(torch.relu_(self.one(x))), one=linear, two=linear),
            4,
            8,
            optimizer=sgd(momentum=0.9, nesterov=True, weight_decay=0.01),
            clip=0.05,
        ),
        regressed("plain_sgd", linear, 4, 8, optimizer=sgd()),
        regressed("momentum", linear, 4, 8, optimizer=sgd(momentum=0.9, maximize=True)),
        regressed(
            "adam", linear, 4, 8, optimizer=OptimizerSpec("adam", 1e-2, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-6)
        ),
        regressed("amsgrad", linear, 4, 8, optimizer=adamw(amsgrad=True, maximize=True)),
        (
            "accumulated",
            Case(
                NAMED["lstm"].model,
                ids(50, 6, 5),
                ids(10, 6),
                F.cross_entropy,
                {"accumulation": 3, "clip": 0.5, "returns_outputs": True},
            ),
        ),
        (
            "accumulated_images",
            Case(NAMED["batch_norm"].model, images(8, 8), ids(10, 8), F.cross_entropy, {"accumulation": 2}),
        ),
        ("autocast", Case(NAMED["batch_norm"].model, images(8, 3), ids(10, 3), F.cross_entropy, {"autocast": "bf16"})),
        (
            "autocast_shared",
            Case(
                NAMED["shared"].model, rows(4, 8), ids(8, 4), F.cross_entropy, {"autocast": "bf16", "accumulation": 2}
            ),
        ),
        (
            "autocast_gpt2",
            Case(
                NAMED["gpt2"].model,
                ids(50, 2, 12),
                ids(50, 2, 12),
                NAMED["gpt2"].loss,
                {"output_key": "logits", "autocast": "bf16"},
            ),
        ),
    )
)
