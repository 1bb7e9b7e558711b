"""Layers that the named models of zoo.py do not have: recurrent, attending, convolving, normalising, indexing."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.unit.zoo import Case, regressed, towards_waves


class Of(nn.Module):
    """A module whose forward is a given function of the module; submodules and parameters are given by name."""

    def __init__(self, forward: Any, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *inputs: Tensor) -> Any:
        return self._forward(self, *inputs)


def of(forward: Any, **parts: Any) -> Any:
    """Return a function that builds such a module; it calls the `parts`."""
    return lambda: Of(forward, **{name: part() for name, part in parts.items()})


def linear(inputs: int = 8, outputs: int = 8) -> nn.Linear:
    return nn.Linear(inputs, outputs)


# ---- recurrent ----


def recurrent(kind: Any, **options: Any) -> Any:
    return of(lambda self, x: self.cell(x)[0], cell=lambda: kind(6, 8, batch_first=True, **options))


def unrolled_cell(self: Any, x: Tensor) -> Tensor:
    hidden = torch.zeros(x.shape[0], 8)
    for step in x.unbind(1):
        hidden = self.cell(step, hidden)
    return hidden


# ---- attention ----


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def translation() -> nn.Module:
    return nn.Transformer(8, 2, 1, 1, 16, batch_first=True)


def causal_attention(self: Any, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
    return self.out(mixed.transpose(1, 2).flatten(2))


def masked_attention(self: Any, x: Tensor) -> Tensor:
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    return self.attention(x, x, x, attn_mask=~mask, need_weights=True)[0]


def einsum(self: Any, x: Tensor) -> Tensor:
    scores = torch.einsum("bid,bjd->bij", self.query(x), x).softmax(-1)
    return torch.einsum("bij,bjd->bid", scores, x)


# ---- convolutional ----


def convolutional(*layers: Any) -> Any:
    return lambda: nn.Sequential(*(layer() for layer in layers))


def unet(self: Any, x: Tensor) -> Tensor:
    down = F.relu(self.down(x))
    up = F.interpolate(F.relu(self.deep(down)), scale_factor=2, mode="bilinear", align_corners=False)
    return self.up(torch.cat([x, F.pad(up, (1, 1, 1, 1), "reflect")[:, :, : x.shape[2], : x.shape[3]]], 1))


def tied_filters(self: Any, x: Tensor) -> Tensor:
    return F.conv_transpose2d(torch.tanh(self.conv(x)), self.conv.weight, padding=1)


# ---- indexing, masks, scatter ----


def scattered(self: Any, x: Tensor) -> Tensor:
    y = self.inner(x)
    index = torch.tensor([0, 2, 1, 3])
    out = torch.zeros_like(y).index_add(0, index, y)
    out[index, torch.tensor([1, 1, 5, 5])] = 2.0
    out = out.scatter_add(1, torch.zeros(4, 8, dtype=torch.long), y)
    out.index_put_((index,), y, accumulate=True)
    return torch.where(out > 0.1, out, y.cumsum(1)).gather(1, torch.arange(8).flip(0).expand(4, 8))


def masked(self: Any, x: Tensor) -> Tensor:
    y = self.inner(x)
    y = y.masked_fill(x < 0, 0.0)
    values, places = y.topk(3, 1)
    return y * torch.zeros_like(y).scatter(1, places, 1.0) + values.sum() + y.sort(1)[0].flip(1) + y.roll(2, 1)


def constants(self: Any, x: Tensor) -> Tensor:
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    scale += 1
    return self.inner(x) * scale * self.plain + torch.linspace(0, 1, 8) * torch.tensor(0.5)


def norms(self: Any, x: Tensor) -> Tensor:
    y = self.inner(x)
    return (
        F.normalize(y) + torch.linalg.norm(y, dim=1, keepdim=True) + y.std(1, keepdim=True) + y.logsumexp(0) + y.var()
    )


def fourier(self: Any, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(self.inner(x)) * self.filter
    return (
        torch.fft.irfft(spectrum, n=8) + spectrum.abs().sum(1, keepdim=True) + (spectrum * spectrum.conj()).real.mean()
    )


LAYERS: dict[str, Case] = dict(
    (
        regressed("gru", recurrent(nn.GRU, num_layers=2, dropout=0.2), 3, 5, 6),
        regressed("rnn", recurrent(nn.RNN, nonlinearity="relu"), 3, 5, 6),
        regressed("lstm_bidirectional", recurrent(nn.LSTM, bidirectional=True, num_layers=2), 3, 5, 6),
        regressed("lstm_projection", recurrent(nn.LSTM, proj_size=4), 3, 5, 6),
        regressed("gru_cell", of(unrolled_cell, cell=lambda: nn.GRUCell(6, 8)), 3, 5, 6),
        regressed("transformer", transformer, 2, 5, 8),
        ("translation", Case(translation, lambda: (torch.randn(2, 4, 8), torch.randn(2, 3, 8)), tuple, towards_waves)),
        regressed("causal", of(causal_attention, qkv=lambda: linear(8, 24), out=linear), 2, 5, 8),
        regressed(
            "attention",
            of(masked_attention, attention=partial(nn.MultiheadAttention, 8, 2, 0.1, batch_first=True)),
            2,
            5,
            8,
        ),
        regressed("einsum", of(einsum, query=linear), 2, 5, 8),
        regressed(
            "unet",
            of(
                unet,
                down=partial(nn.Conv2d, 3, 4, 3, 2, 1),
                deep=partial(nn.Conv2d, 4, 4, 3, 1, 1),
                up=partial(nn.Conv2d, 7, 2, 1),
            ),
            2,
            3,
            8,
            8,
        ),
        regressed(
            "transposed",
            convolutional(partial(nn.ConvTranspose2d, 3, 8, 3, stride=2), nn.PReLU, partial(nn.PixelShuffle, 2)),
            2,
            3,
            5,
            5,
        ),
        regressed(
            "volumes",
            convolutional(partial(nn.Conv3d, 2, 4, 3), partial(nn.BatchNorm3d, 4), nn.SiLU, partial(nn.MaxPool3d, 2)),
            2,
            2,
            6,
            6,
            6,
        ),
        regressed(
            "signals",
            convolutional(
                partial(nn.Conv1d, 3, 6, 3, groups=3), nn.GELU, partial(nn.BatchNorm1d, 6), partial(nn.AvgPool1d, 2)
            ),
            2,
            3,
            9,
        ),
        regressed(
            "turned_batch_norm",
            of(
                lambda self, x: self.norm(self.inner(x).transpose(1, 2)).transpose(1, 2),
                inner=linear,
                norm=partial(nn.BatchNorm1d, 8),
            ),
            2,
            5,
            8,
        ),
        regressed(
            "odd_activations",
            convolutional(
                linear,
                partial(nn.RReLU, inplace=True),
                nn.Hardswish,
                nn.ELU,
                nn.LogSigmoid,
                nn.Softplus,
                nn.CELU,
                partial(nn.GLU, 1),
            ),
            4,
            8,
        ),
        regressed(
            "odd_dropouts",
            convolutional(
                partial(nn.Conv2d, 3, 4, 3),
                partial(nn.Dropout2d, 0.3),
                partial(nn.AlphaDropout, 0.1),
                partial(nn.FeatureAlphaDropout, 0.2),
            ),
            2,
            3,
            6,
            6,
        ),
        regressed(
            "local_response",
            convolutional(
                partial(nn.Conv2d, 3, 4, 3),
                partial(nn.LocalResponseNorm, 2),
                partial(nn.FractionalMaxPool2d, 2, output_size=3),
            ),
            2,
            3,
            8,
            8,
        ),
        regressed(
            "unpooled",
            of(
                lambda self, x: F.max_unpool2d(*F.max_pool2d(self.conv(x), 2, return_indices=True), [2, 2]),
                conv=partial(nn.Conv2d, 3, 4, 3),
            ),
            2,
            3,
            6,
            6,
        ),
        regressed("tied_filters", of(tied_filters, conv=partial(nn.Conv2d, 3, 4, 3, padding=1)), 2, 3, 6, 6),
        regressed("scattered", of(scattered, inner=linear)),
        regressed("masked", of(masked, inner=linear)),
        regressed("constants", of(constants, inner=linear, plain=partial(torch.full, (8,), 0.3))),
        regressed("norms", of(norms, inner=linear)),
        regressed("fourier", of(fourier, inner=linear, filter=lambda: nn.Parameter(torch.randn(5)))),
    )
)
