"""The networks that the papers' tables need and no package has: their shapes and sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.experiments.recurrent import BidirectionalLSTM


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_wide_networks_have_more_channels_between_the_same_images_and_classes() -> None:
    from benchmarks.experiments.models import widened  # imports transformers

    with torch.device("meta"):
        plain, wide = (widened("pytorchcv.models.inceptionv4:inceptionv4", times) for times in (1, 4))
        assert wide(torch.empty(2, 3, 299, 299)).shape == (2, 1000)
    assert parameters(plain) == 42_679_816  # as pytorchcv's own
    convolutions = [[layer for layer in model.modules() if isinstance(layer, nn.Conv2d)] for model in (plain, wide)]
    ratios = [after.weight.numel() / before.weight.numel() for before, after in zip(*convolutions, strict=True)]
    assert ratios == [4] + [16] * (len(ratios) - 1)
    assert [layer.stride for layer in convolutions[0]] == [layer.stride for layer in convolutions[1]]


def test_grouped_convolutions_are_not_widened() -> None:
    from benchmarks.experiments.models import widened

    with pytest.raises(AssertionError, match="grouped"), torch.device("meta"):
        widened("pytorchcv.models.mobilenet:mobilenet_w1", 2)


def test_googlenet_is_that_of_its_paper() -> None:
    """Sizes of its table 1, and as many parameters as Caffe's without auxiliary classifiers."""
    from benchmarks.experiments.models import googlenet

    with torch.device("meta"):
        model = googlenet()
        shapes: list[tuple[int, ...]] = []
        x = torch.empty(2, 3, 224, 224)
        for layer in model:
            x = layer(x)
            shapes.append(tuple(x.shape[1:]))
    assert x.shape == (2, 1000)
    assert {(480, 28, 28), (832, 14, 14), (1024, 7, 7), (1024, 1, 1)} <= set(shapes)
    assert parameters(model) == 6_998_552


def test_both_directions_see_the_sequence_from_their_end() -> None:
    torch.manual_seed(0)
    model = BidirectionalLSTM(width=8, layers=2, classes=3)
    reference = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True)
    for direction, (into, over) in enumerate(zip(model.inputs, model.hidden, strict=True)):
        suffix = f"l{direction // 2}" + "_reverse" * (direction % 2)
        with torch.no_grad():
            getattr(reference, f"weight_ih_{suffix}").copy_(into.weight)
            getattr(reference, f"bias_ih_{suffix}").copy_(into.bias)
            getattr(reference, f"weight_hh_{suffix}").copy_(over.weight)
            getattr(reference, f"bias_hh_{suffix}").zero_()
    sequence = torch.randn(4, 5, 8)
    outputs, _ = reference(sequence)
    ends = torch.cat((outputs[:, -1, :8], outputs[:, 0, 8:]), 1)
    assert torch.allclose(model(sequence), model.head(ends), atol=1e-6)
