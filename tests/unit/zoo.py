"""Small models that train in moments and cover the habits of real ones, for tests of capture and runtime.

`NAMED` has models for bitwise comparisons (narrow versions of well-known networks, and one for each error-prone way of
handling tensors); `OTHERS` has further habits. Every case is built anew from the given seed. Other packages are
imported when a model is built, because every process that runs tests imports this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

from pg_tensile.execution.capture import OptimizerSpec, StepSpec

Loss = Callable[..., Tensor]


@dataclass(frozen=True)
class Case:
    """A model with a batch; `inputs` and `targets` build tensors with a generator."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    targets: Callable[[], tuple[Tensor, ...]]
    loss: Loss
    options: dict[str, Any] = field(default_factory=dict)  # of StepSpec

    def make(self, seed: int = 0) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...], StepSpec]:
        """Build a new model, inputs, targets and step."""
        torch.manual_seed(seed)
        model = self.model()
        optimizer = OptimizerSpec("adamw", 1e-3)
        return model, self.inputs(), self.targets(), StepSpec(self.loss, **{"optimizer": optimizer, **self.options})


def thin(model: nn.Module, factor: int) -> nn.Module:
    """Return the network with 1/`factor` of the channels and a final pooling for images of any size."""

    def less(channels: int) -> int:
        return channels if channels <= 3 else max(1, channels // factor)

    def keep_classes(channels: int) -> int:
        return channels if channels <= 10 else less(channels)

    for name, module in list(model.named_modules()):
        new: nn.Module | None = None
        if isinstance(module, nn.Conv2d):
            new = nn.Conv2d(
                less(module.in_channels),
                keep_classes(module.out_channels),
                module.kernel_size,  # type: ignore[arg-type]
                module.stride,  # type: ignore[arg-type]
                module.padding,  # type: ignore[arg-type]
                module.dilation,  # type: ignore[arg-type]
                less(module.groups),
                module.bias is not None,
            )
        elif isinstance(module, nn.BatchNorm2d):
            new = nn.BatchNorm2d(less(module.num_features), module.eps)
        elif isinstance(module, nn.Linear):
            new = nn.Linear(less(module.in_features), keep_classes(module.out_features))
        elif name.endswith("final_pool"):
            new = nn.AdaptiveAvgPool2d(1)
        if new is not None:
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, new)
    return model


def constructor(path: str) -> Callable[..., nn.Module]:
    """Return a function of pytorchcv, `module.name`."""
    module, name = path.split(".")
    return getattr(importlib.import_module(f"pytorchcv.models.{module}"), name)


def thinned(path: str, factor: int, size: int | None = None) -> Callable[[], nn.Module]:
    """Return a function that builds a thin network of pytorchcv, `module.name`, with ten classes.

    `size`: of its images, if its first dense layer depends on that."""

    def build() -> nn.Module:
        with torch.device("meta"):  # filling all the weights would take a second
            whole = constructor(path)(num_classes=10)
        model = thin(whole, factor)
        if size is not None:
            features = model.features(torch.zeros(1, 3, size, size)).numel()  # type: ignore[operator]
            name, first = next((name, part) for name, part in model.named_modules() if isinstance(part, nn.Linear))
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, nn.Linear(features, first.out_features))
        return model

    return build


def images(size: int, batch: int = 2, channels: int = 3) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(batch, channels, size, size),)


def rows(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape),)


def ids(below: int, *shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randint(0, below, shape),)


def classified(name: str, model: Callable[[], nn.Module], size: int, **options: Any) -> tuple[str, Case]:
    return name, Case(model, images(size), ids(10, 2), F.cross_entropy, options)


def regressed(
    name: str,
    model: Callable[[], nn.Module],
    *shape: int,
    inputs_type: torch.dtype = torch.float32,
    **options: Any,
) -> tuple[str, Case]:
    """A model trained towards a fixed pattern of any shape."""
    return name, Case(model, lambda: (torch.randn(shape or (4, 8), dtype=inputs_type),), tuple, towards_waves, options)


def towards_waves(output: Tensor) -> Tensor:
    output = torch.view_as_real(output) if output.is_complex() else output.float()
    return F.mse_loss(output, torch.linspace(0, 5, output.numel()).sin().view(output.shape))


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


# ---- well-known networks ----


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    config.num_labels = 3
    return BertForSequenceClassification(config)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=50,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def small_nasnet() -> nn.Module:
    return constructor("nasnet.get_nasnet")(
        repeat=1,
        penultimate_filters=96,
        init_block_channels=8,
        final_pool_size=2,
        extra_padding=True,
        skip_reduction_layer_input=False,
        in_size=(64, 64),
        num_classes=10,
    )


class LSTMClassifier(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 8)
        self.lstm = nn.LSTM(8, 12, 2, dropout=0.3, batch_first=True, **options)
        self.head = nn.LazyLinear(10)
        self(torch.zeros(1, 2, dtype=torch.long))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


class GCN(nn.Module):
    """Two graph convolutions; nodes [nodes, features], adjacency [nodes, nodes]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 10)
        self.dropout = nn.Dropout(0.5)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        weights = torch.softmax(adjacency, 1)
        return weights @ self.second(self.dropout(torch.relu(weights @ self.first(nodes))))


# ---- ways of handling tensors ----


class Shared(nn.Module):
    """A weight shared by three layers, and frozen weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.first.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Linear(8, 8)
        self.out = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.again(torch.tanh(self.frozen(self.first(x))))) @ self.first.weight)


class OldNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = weight_norm_old(nn.Linear(8, 8)), spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def weight_norm_old(module: nn.Module) -> nn.Module:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return weight_norm(module)


class NewNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(8, 8))
        self.second = parametrizations.spectral_norm(nn.Linear(8, 8))
        self.third = parametrizations.orthogonal(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(torch.tanh(self.first(x))))


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * torch.sigmoid(x * scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x * ctx.scale)
        return gradient * (s + x * ctx.scale * s * (1 - s)), None


class CustomFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Swish.apply(self.first(x), 1.5))


class InPlace(nn.Module):
    """In-place operators on activations, views and slices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y.add_(1.0).relu_()
        z = self.second(y * 2)
        z[:, 2:4].mul_(0.5)
        z[0] = z[1]
        z.t_().mul_(0.3).t_()
        return z.unsqueeze_(1).squeeze_(1).exp_()


class Views(nn.Module):
    """Views that are used long after the last direct use of their bases."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.inner(x).chunk(3, dim=1)
        kept = a.t()[2:5]
        y = torch.sin(b) * torch.cos(c)
        for _ in range(3):
            y = self.out(torch.tanh(y))
        wide = kept.sum(0, keepdim=True).t().expand(-1, 8)
        return y + wide + x.diagonal().sum() + c.unbind(1)[3].unsqueeze(1)


class BatchNormNet(nn.Module):
    """Batch norms with statistics, with frozen statistics, and a group norm without them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 6, 3),
            nn.BatchNorm2d(6),
            nn.ReLU(inplace=True),
            nn.Conv2d(6, 6, 3),
            nn.BatchNorm2d(6, affine=False, momentum=0.3),
            nn.InstanceNorm2d(6, affine=True, track_running_stats=True),
            nn.BatchNorm2d(6, track_running_stats=False),
            nn.GroupNorm(2, 6),
            nn.Flatten(),
            nn.LayerNorm(6 * 16),
            nn.Linear(6 * 16, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def channels_last() -> nn.Module:
    return BatchNormNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


NAMED: dict[str, Case] = dict(
    (
        classified("vgg16", thinned("vgg.vgg16", 32, 64), 64),
        classified("inceptionv3", thinned("inceptionv3.inceptionv3", 16), 75),
        classified("inceptionv4", thinned("inceptionv4.inceptionv4", 32), 75),
        classified("resnet26", thinned("resnet.resnetbc26b", 16), 33),
        classified("resnet50", thinned("resnet.resnet50", 16), 33),
        classified("densenet121", thinned("densenet.densenet121", 8), 32),
        classified("alexnet", thinned("alexnet.alexnet", 16, 95), 95),
        classified("squeezenet", thinned("squeezenet.squeezenet_v1_0", 4), 64),
        classified("mobilenet", thinned("mobilenet.mobilenet_w1", 8), 33),
        classified("nasnet", small_nasnet, 64),
        ("bert", Case(bert, ids(50, 2, 12), ids(2, 2), F.cross_entropy, {"output_key": "logits"})),
        ("gpt2", Case(gpt2, ids(50, 2, 12), ids(50, 2, 12), next_token, {"output_key": "logits"})),
        ("lstm", Case(LSTMClassifier, ids(50, 3, 5), ids(10, 3), F.cross_entropy)),
        ("gcn", Case(GCN, lambda: (torch.randn(7, 6), torch.randn(7, 7)), ids(10, 7), F.cross_entropy)),
        ("shared", Case(Shared, rows(4, 8), ids(8, 4), F.cross_entropy, {"clip": 0.1})),
        ("averaged", Case(Shared, rows(4, 8), ids(8, 4), F.cross_entropy, {"optimizer": OptimizerSpec(averaging=7)})),
        regressed("old_norms", OldNorms),
        regressed("new_norms", NewNorms),
        regressed("custom_function", CustomFunction),
        regressed("in_place", InPlace),
        regressed("views", Views, 8, 8),
        ("batch_norm", Case(BatchNormNet, images(8, 3), ids(10, 3), F.cross_entropy)),
        (
            "channels_last",
            Case(
                channels_last,
                lambda: (torch.randn(3, 3, 8, 8).to(memory_format=torch.channels_last),),
                ids(10, 3),
                F.cross_entropy,
            ),
        ),
    )
)

DEEP = ("densenet121", "inceptionv3", "inceptionv4", "nasnet", "resnet50")  # thousands of operators: seconds a test


def names(cases: Iterable[str]) -> list[Any]:
    """Return the parameters of tests of all these cases, of which those of deep networks are long."""
    return [pytest.param(name, marks=[pytest.mark.long] * (name in DEEP)) for name in cases]
