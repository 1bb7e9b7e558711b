"""Pretrained transformers: tokens, pooling, what a version stores, and training under a plan."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pg_tensile.errors import ArchitectureError, CheckpointError, DataError, TensileError
from pg_tensile.execution import models
from pg_tensile.execution.data.preprocessing import ArrayInput, Features, ModelInputs, Preprocessing
from pg_tensile.execution.data.pretrained_folder import MODEL_PATH_VARIABLE
from pg_tensile.execution.data.texts import TextSource
from pg_tensile.execution.models.pretrained import Pretrained
from pg_tensile.execution.training import checkpoint
from tests.pretrained import VOCABULARY, WORDS, minilm, save_bert, save_gpt2, save_mpnet
from tests.unit.execution.training.test_steps import assert_same, at_half, case
from tests.unit.execution.training.test_training import Recorder, weights
from tests.unit.rows import Prepared, Rows

RNG = np.random.default_rng(0)
ONE_TEXT = ModelInputs(0, (), (ArrayInput(12, VOCABULARY + 1),))
SAVED: dict[str, Callable[[Path], Path]] = {"bert": save_bert, "gpt2": save_gpt2, "mpnet": save_mpnet}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name, save in SAVED.items():
        save(root / name)
    (root / "minilm").symlink_to(root / "real")
    shutil.copytree(minilm(), root / "real")
    return root


@pytest.fixture(autouse=True)
def model_path(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL_PATH_VARIABLE, str(folders))


def build(name: str, inputs: ModelInputs = ONE_TEXT, outputs: int = 1, **keys: Any) -> Pretrained:
    checkpoint.seed_generators(0)
    model = models.build(models.parse({"type": "pretrained", "path": name, **keys}), inputs, outputs)
    assert isinstance(model, Pretrained)
    return model


def source_of(name: str, **keys: Any) -> TextSource:
    columns = models.text_columns(models.parse({"type": "pretrained", "path": name, **keys}))
    assert columns is not None
    return columns.source


def prepare(rows: Rows, name: str, **keys: Any) -> tuple[Prepared, dict[str, Any]]:
    architecture = {"type": "pretrained", "path": name, **keys}
    return rows.prepare(texts=models.text_columns(models.parse(architecture))), architecture


def reviews(count: int = 60) -> Rows:
    """Texts with good words or bad ones, and other features."""
    label = RNG.integers(0, 2, count)
    texts = [
        " ".join([*RNG.choice(WORDS[6:], RNG.integers(1, 8)), *RNG.choice(WORDS[3 * k : 3 * k + 3], 1)]) for k in label
    ]
    texts[0], texts[1] = "", WORDS[0] * 40
    return Rows(
        {
            "body": ("text", [None if i % 17 == 5 else text for i, text in enumerate(texts)]),
            "shop": ("text", [f"shop {i % 3}" for i in range(count)]),
            "stars": ("float8", RNG.normal(size=count).tolist()),
            "y": ("bool", label.astype(bool).tolist()),
        }
    )


# ---- tokens ----


@pytest.mark.parametrize("length", [8, 128])
def test_tokens_are_those_of_transformers(folders: Path, length: int) -> None:
    from transformers import AutoTokenizer

    texts = ["Hello, World!", "", "naïve Straße 東京 🙂", "a" * 300, "word " * 400, "[SEP] [PAD] [CLS]"]
    source = source_of("minilm", length=length)
    expected = AutoTokenizer.from_pretrained(folders / "real", local_files_only=True)(
        texts, truncation=True, max_length=length
    )["input_ids"]
    tokens = source.encoder().encode(texts, length)
    assert [[int(token) - 1 for token in row if token] for row in tokens] == expected
    narrow = source.encoder().encode(texts[:2], length, padded=False)
    assert narrow.shape == (2, max(map(len, expected[:2])))
    assert (tokens[:2, : narrow.shape[1]] == narrow).all()


def test_a_text_feature_is_a_category_for_requests_and_tokens_for_the_model() -> None:
    prepared, _ = prepare(reviews(), "bert", text=["body"])
    preprocessing = Preprocessing.from_json(json.loads(json.dumps(prepared.fitted.preprocessing.to_json())))
    assert preprocessing == prepared.fitted.preprocessing
    assert [feature.kind for feature in preprocessing.features] == ["category", "category", "numeric"]
    inputs = preprocessing.model_inputs
    assert inputs.cardinalities == (4,) and inputs.numeric == 2  # with the indicator of nulls
    assert inputs.arrays == (ArrayInput(10, VOCABULARY + 1),)
    assert prepared.dataset.training.features.arrays[0].shape[1] == 10
    with_both, _ = prepare(reviews(), "bert")
    assert len(with_both.fitted.preprocessing.model_inputs.arrays) == 2
    with pytest.raises(DataError, match='text column "stars" is of type float8'):
        prepare(reviews(), "bert", text=["stars"])
    with pytest.raises(DataError, match="not in the query"):
        prepare(reviews(), "bert", text=["body", "other"])
    with pytest.raises(DataError, match="needs a text column"):
        prepare(Rows({"x": ("float8", [1.0, 2.0] * 9), "y": ("text", ["a", "b"] * 9)}), "bert")


# ---- the model ----


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_vectors_are_pooled_outputs_of_transformers_whatever_the_padding(
    folders: Path, name: str, pooling: str
) -> None:
    from transformers import AutoModel

    model = build(name, pooling=pooling, tune="full").eval()
    reference = AutoModel.from_pretrained(folders / name).eval()
    tokens = torch.zeros(3, 12, dtype=torch.int64)
    for row, length in enumerate((12, 5, 1)):
        tokens[row, :length] = torch.from_numpy(RNG.integers(1, VOCABULARY + 1, length))
    with torch.no_grad():
        vectors = model.texts(tokens)
        for row, length in enumerate((12, 5, 1)):
            hidden = reference(input_ids=tokens[row : row + 1, :length] - 1).last_hidden_state[0]
            expected = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling]
            torch.testing.assert_close(vectors[row], expected, rtol=0, atol=2e-6)
        normal = model.embed(tokens)
    torch.testing.assert_close(normal.norm(dim=1), torch.ones(3))


def test_a_row_without_a_token_has_a_finite_vector() -> None:
    for name in SAVED:
        assert torch.isfinite(build(name).eval().texts(torch.zeros(2, 12, dtype=torch.int64))).all()


def test_a_decoder_pools_its_last_token_and_an_encoder_the_mean(folders: Path) -> None:
    assert build("gpt2").texts.pooling == "last" and build("gpt2").texts.causal
    assert build("bert").texts.pooling == "mean" and not build("bert").texts.causal
    assert build("minilm", ModelInputs(0, (), (ArrayInput(8, 30523),))).texts.pooling == "mean"


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("tune", ["head", "lora", "full"])
def test_a_version_stores_only_what_was_trained(name: str, tune: str) -> None:
    model = build(name, tune=tune)
    trained = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    state = model.state_dict()
    assert trained <= set(state)
    if tune != "full":
        assert set(state) == trained
        assert any(key.startswith("texts.") for key in trained) == (tune == "lora")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    other = build(name, tune=tune)
    checkpoint.load_model(other, checkpoint.from_bytes(checkpoint.to_bytes(checkpoint.model_tensors(model))))
    tokens = torch.from_numpy(RNG.integers(0, VOCABULARY + 1, (4, 12)))
    features = Features(torch.zeros(4, 0), torch.zeros(4, 0, dtype=torch.int64), (tokens,))
    assert torch.equal(model.eval()(features), other.eval()(features))
    incomplete = dict(list(state.items())[:-1])
    with pytest.raises(CheckpointError):
        checkpoint.load_model(other, incomplete)


def test_what_is_not_trained_has_no_dropout() -> None:
    model = build("bert", tune="head").train()
    tokens = torch.from_numpy(RNG.integers(1, VOCABULARY + 1, (4, 12)))
    assert torch.equal(model.texts(tokens), model.texts(tokens))
    model = build("bert", tune="lora").train()
    assert not torch.equal(model.texts(tokens), model.texts(tokens))


def test_nothing_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"a connection to {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    for tune in ("head", "lora", "full"):
        build("bert", tune=tune)
    source_of("minilm").encoder().encode(["x"], 8)


# ---- training ----


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "gpt2"])
@pytest.mark.parametrize("tune", ["head", "lora", "full"])
def test_training_within_half_of_the_memory_gives_the_same_bits(name: str, tune: str) -> None:
    prepared, architecture = prepare(reviews(60), name, tune=tune, text=["body"], dropout=0.1)
    job = case(prepared, architecture, batch_size=16, epochs=1)
    steps, part = at_half(job)
    assert part <= 0.51 or tune == "head", part  # a frozen model takes little more than its weights
    assert_same(job, steps)


@pytest.mark.long
@pytest.mark.parametrize("tune", ["lora", "full"])
def test_a_run_is_resumed_from_a_checkpoint_of_what_is_trained(tune: str) -> None:
    prepared, architecture = prepare(reviews(40), "bert", tune=tune, text=["body"])
    job = case(prepared, architecture, batch_size=16, epochs=2)
    expected = job.eager()
    metrics = job.run(expected).without_seconds()
    interrupted = job.run(job.planned(0.3), recorder=Recorder(3))
    data, _ = interrupted.checkpoints[-1]
    frozen = sum(parameter.nbytes for parameter in expected.model.parameters() if not parameter.requires_grad)
    assert tune == "full" or len(data) < frozen
    steps = job.planned(0.3)
    resumed = job.run(steps, interrupted.checkpoints[-1])
    assert weights(steps.model) == weights(expected.model)
    assert interrupted.without_seconds() + resumed.without_seconds() == metrics


@pytest.mark.long
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_transformer_trains_in_bfloat16_and_in_parts(name: str) -> None:
    prepared, architecture = prepare(reviews(40), name, tune="lora", text=["body"])
    job = case(prepared, architecture, batch_size=8, epochs=1, precision="bfloat16", accumulate=2)
    steps, _ = at_half(job)
    assert_same(job, steps)


@pytest.mark.long
@pytest.mark.parametrize("tune", ["head", "lora"])
def test_minilm_learns_sentiment(tune: str) -> None:
    prepared, architecture = prepare(reviews(80), "minilm", tune=tune, text=["body"])
    job = case(prepared, architecture, batch_size=16, epochs=6, learning_rate=1e-2, early_stopping=None)
    steps = job.eager()
    accuracy = job.run(steps).epochs[-2].metrics.accuracy
    assert accuracy is not None and accuracy > 0.8


@pytest.mark.long
def test_minilm_within_half_of_its_memory_gives_the_same_bits() -> None:
    """Trains a model of 22 million parameters twice, which takes half a minute."""
    for tune in ("lora", "full"):
        prepared, architecture = prepare(reviews(24), "minilm", tune=tune)
        job = case(prepared, architecture, batch_size=8, epochs=1)
        steps, part = at_half(job)
        assert part <= 0.6, part
        assert_same(job, steps)


# ---- errors ----


@pytest.fixture
def broken(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the folder bert, to be damaged."""
    shutil.copytree(folders / "bert", tmp_path / "bert")
    monkeypatch.setenv(MODEL_PATH_VARIABLE, str(tmp_path))
    return tmp_path / "bert"


def text_error(**keys: Any) -> TensileError:
    with pytest.raises(ArchitectureError) as caught:
        models.text_columns(models.parse({"type": "pretrained", "path": "bert", **keys}))
    return caught.value


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_that_changes_is_noticed(broken: Path) -> None:
    source = source_of("bert")
    source.encoder()
    weights = load_file(broken / "model.safetensors")
    weights["embeddings.LayerNorm.bias"] += 1
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArchitectureError, match="has changed since the model was trained"):
        source.encoder()
    shutil.rmtree(broken)
    with pytest.raises(ArchitectureError, match='no folder "bert"'):
        source.encoder()


def test_weights_that_are_not_of_the_config_are_refused(broken: Path) -> None:
    rewrite(broken / "config.json", num_hidden_layers=2)
    with pytest.raises(ArchitectureError, match=r"not those of its config\.json"):
        build("bert")
    rewrite(broken / "config.json", num_hidden_layers=1, hidden_size=16)
    with pytest.raises(ArchitectureError, match="cannot be loaded"):
        build("bert")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no such model"}, "cannot be loaded"),
        ({"hidden_act": "exec"}, "cannot be loaded"),
        ({"num_attention_heads": 5}, "cannot be loaded"),
        ({"model_type": "vit"}, "cannot be loaded|are not those of its config"),
    ],
)
def test_a_config_that_makes_no_model_is_refused(broken: Path, change: dict[str, Any], message: str) -> None:
    rewrite(broken / "config.json", **change)
    with pytest.raises(ArchitectureError, match=message):
        build("bert")


def test_damaged_weights_are_refused(broken: Path) -> None:
    data = (broken / "model.safetensors").read_bytes()
    for damaged in (b"", data[:100], b"\xff" * 16 + data[16:], data[:-10]):
        (broken / "model.safetensors").write_bytes(damaged)
        with pytest.raises(ArchitectureError, match="cannot be loaded"):
            build("bert")


def test_a_damaged_tokenizer_is_refused(broken: Path) -> None:
    (broken / "tokenizer.json").write_text("{}")
    assert "tokenizer.json of the folder" in str(text_error())
    save_bert(broken)
    rewrite(broken / "config.json", vocab_size=7)
    assert f"has {VOCABULARY} tokens, its model only 7" in str(text_error())


def test_a_length_beyond_the_positions_is_the_positions() -> None:
    assert source_of("bert", length=1000).length == 64


def test_a_model_that_peft_does_not_know_has_adapters_in_all_linear_layers() -> None:
    model = build("mpnet", tune="lora")
    adapted = {key.partition(".lora_")[0] for key in model.state_dict() if ".lora_" in key}
    linear = {key for key, module in model.texts.base.named_modules() if isinstance(module, nn.Linear)}
    assert any("attention" in key for key in adapted) and len(adapted) > 4
    assert linear
