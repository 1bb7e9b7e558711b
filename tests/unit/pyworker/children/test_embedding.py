"""Loaded pretrained models: predictions and embeddings of requests, and requests that are no texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.errors import ArchitectureError
from pg_tensile.execution import models
from pg_tensile.execution.data.pretrained_folder import MODEL_PATH_VARIABLE
from pg_tensile.execution.models.whole import shorten
from pg_tensile.execution.training import checkpoint
from pyworker.children.embedding import decode
from pyworker.children.loaded_models import Model, Version, load, load_version
from pyworker.children.malformed import Malformed
from pyworker.wire import Frame, FrameType
from tests.pretrained import WORDS, save_bert
from tests.unit.executing import FAST
from tests.unit.rows import Rows

BERT = {"type": "pretrained", "path": "bert", "text": ["body"]}
BODIES = [None if row % 11 == 3 else " ".join(WORDS[: row % 9]) for row in range(90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(autouse=True)
def model_path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODEL_PATH_VARIABLE, str(folder.parent))


def request(bodies: list[str | None]) -> Frame:
    """Return a PREDICT frame with these texts, and with two kinds of shops of which one is unknown."""
    texts, shops = sorted({body for body in bodies if body is not None}), ["a", "never seen"]
    codes = [[-1 if body is None else texts.index(body) for body in bodies], [row % 2 for row in range(len(bodies))]]
    buffers: list[np.ndarray] = [np.zeros((1, len(bodies))), np.array(codes, np.int32)]
    header = {"rows": len(bodies), "dict": [texts, shops]}
    return Frame(FrameType.PREDICT, 1, 0, header, [memoryview(buffer.tobytes()) for buffer in buffers])


def texts_frame(texts: list[str | None]) -> Frame:
    encoded = [None if text is None else text.encode() for text in texts]
    lengths = np.array([-1 if text is None else len(text) for text in encoded], np.int32)
    data = b"".join(text for text in encoded if text is not None)
    return Frame(FrameType.EMBED, 1, 0, {"rows": len(texts)}, [memoryview(lengths.tobytes()), memoryview(data)])


def loaded(memory_budget: int = 0, **keys: Any) -> Version:
    """Return a loaded version with weights that are not trained."""
    rows = Rows(
        {
            "body": ("text", BODIES),
            "shop": ("text", ["ab"[row % 2] for row in range(90)]),
            "x": ("float8", np.sin(np.arange(90)).tolist()),
            "y": ("float8", np.cos(np.arange(90)).tolist()),
        }
    )
    architecture = models.parse(BERT | keys)
    preprocessing = rows.prepare(texts=models.text_columns(architecture)).fitted.preprocessing
    checkpoint.seed_generators(0)
    model = models.build(architecture, preprocessing.model_inputs, preprocessing.outputs)
    weights = checkpoint.to_bytes(checkpoint.model_tensors(model))
    header = {"architecture": BERT | keys, "preprocessing": preprocessing.to_json(), "memory_budget": memory_budget}
    return load_version(header, [memoryview(weights)], FAST)


def vectors(model: Model, texts: list[str | None]) -> np.ndarray:
    sizes, embedded = model.embed(texts_frame(texts))
    assert np.frombuffer(sizes, np.int32).tolist() == [len(texts), 32]
    return np.asarray(embedded)


@torch.inference_mode()
def test_rows_are_predicted_as_one_by_one_and_within_a_memory_budget() -> None:
    model = loaded()
    reply = model.predict(request(BODIES))
    assert reply.unknown.sum() == 45  # shops; a text is never unknown
    single = [model.predict(request([body, body])).answers.prediction[row % 2] for row, body in enumerate(BODIES)]
    np.testing.assert_allclose(reply.answers.prediction, single, rtol=0, atol=1e-5)
    assert len({round(number, 4) for number in reply.answers.prediction}) > 9
    with torch.inference_mode(False):
        budgeted = loaded(400_000)
    try:
        assert budgeted.planned_bytes is not None and budgeted.planned_bytes <= 400_000
        within = budgeted.predict(request(BODIES)).answers
        np.testing.assert_allclose(within.prediction, reply.answers.prediction, rtol=0, atol=1e-5)
    finally:
        budgeted.close()


@torch.inference_mode()
def test_a_version_counts_the_weights_of_its_folder() -> None:
    lora, full = loaded(tune="lora"), loaded(tune="full")
    assert abs(lora.nbytes - full.nbytes) < 30_000 < min(lora.nbytes, full.nbytes)


@torch.inference_mode()
def test_a_model_without_a_version_embeds_as_one_whose_head_was_trained() -> None:
    base = load({"architecture": BERT, "preprocessing": None}, [], None)
    texts = ["good day", None, "", "not so bad", *BODIES]
    expected = vectors(loaded(tune="head"), texts)
    np.testing.assert_array_equal(vectors(base, texts), expected)
    assert not expected[1].any() and expected[2].any()
    assert vectors(base, []).shape == (0, 32)
    with pytest.raises(Malformed):
        base.predict_in_parts(request(["x"]))
    with pytest.raises(ArchitectureError, match="not a pretrained transformer"):
        load({"architecture": {"type": "mlp"}, "preprocessing": None}, [], None)


@given(st.lists(st.none() | st.text(max_size=9), max_size=9))
def test_texts_of_a_frame_are_decoded(texts: list[str | None]) -> None:
    assert decode(texts_frame(texts)) == texts


@given(st.binary(max_size=24), st.binary(max_size=9), st.none() | st.integers(-2, 9))
def test_a_frame_that_is_not_texts_is_malformed(lengths: bytes, data: bytes, rows: int | None) -> None:
    frame = Frame(FrameType.EMBED, 1, 0, {"rows": rows}, [memoryview(lengths), memoryview(data)])
    try:
        texts = decode(frame)
    except Malformed:
        return
    assert len(texts) == rows and len(lengths) == 4 * len(texts)


def test_parts_of_a_request_have_texts_of_similar_length() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 50, 200)
    tokens = (np.arange(50) < lengths[:, None]) * rng.integers(1, 9, (200, 50))
    numbers = rng.normal(size=(200, 2))
    seen = np.zeros(200, int)
    cells = 0
    for chosen, (part, cut) in shorten([numbers, tokens], 1):
        seen[chosen] += 1
        cells += cut.size
        assert (part == numbers[chosen]).all()
        assert (tokens[chosen, : cut.shape[1]] == cut).all() and not tokens[chosen, cut.shape[1] :].any()
    assert (seen == 1).all() and cells < 0.6 * tokens.size
