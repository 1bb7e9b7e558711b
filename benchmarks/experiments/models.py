"""Models of `make bench-core` that no package offers as a callable with JSON arguments; all weights are random."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel


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
