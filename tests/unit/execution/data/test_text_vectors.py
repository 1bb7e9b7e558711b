"""Text columns: which ones are text, and vectors that are the same in every batch, bounded and worth something."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from pg_tensile.execution.data import text_fitting
from pg_tensile.execution.data.drift import Counter, reference_of, sample
from pg_tensile.execution.data.preprocessing import CategoryInput, Inputs, Preprocessing
from pg_tensile.execution.data.text_vectors import MOST_CHARACTERS
from pg_tensile.execution.data.warm_start import begun_with, difference
from tests.examples import examples
from tests.unit.rows import Prepared, Rows

GOOD, BAD = ["lovely", "tasty", "fresh", "crisp", "sweet"], ["stale", "bitter", "broken", "awful", "greasy"]
PLAIN = ["the", "parcel", "came", "with", "coffee", "and", "biscuits", "for", "our", "office", "on", "monday"]
COUNT = 400
TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60), max_size=8)


def reviews(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Return texts and the labels that some of their words give away."""
    rng = np.random.default_rng(seed)
    labels = rng.choice(["good", "bad"], count).tolist()
    texts = [
        " ".join([*rng.choice(PLAIN, 8), *rng.choice(GOOD if label == "good" else BAD, 2), f"no{rng.integers(10**6)}"])
        for label in labels
    ]
    return texts, labels


@cache
def trained() -> Prepared:
    texts, labels = reviews(COUNT)
    return Rows({"review": ("text", [*texts[:-4], None, "", None, None]), "y": ("text", labels)}).prepare(0.25)


def vectors(preprocessing: Preprocessing, texts: Sequence[str | None]) -> np.ndarray:
    """Return the array that a model gets."""
    strings = [*{text: 0 for text in texts if text is not None}]
    places = np.array([-1 if text is None else strings.index(text) for text in texts], np.int32)
    inputs = Inputs(len(texts), np.empty((0, len(texts))), [CategoryInput(places, preprocessing.table(0, strings))], [])
    features = preprocessing.apply(inputs)
    assert np.array_equal(features.numeric[:, 0], places < 0)
    return features.arrays[0]


def test_a_stored_encoder_is_the_fitted_one() -> None:
    preprocessing = trained().fitted.preprocessing
    text = json.dumps(preprocessing.to_json(), allow_nan=False)
    assert Preprocessing.from_json(json.loads(text)) == preprocessing and len(text) < 3 << 20
    (array,) = preprocessing.model_inputs.arrays
    assert preprocessing.model_inputs.vectors == 1 and preprocessing.model_inputs.cardinalities == ()
    table = trained().dataset.training.features.arrays[0]
    assert table.shape[1] == array.length and table.dtype == np.float32
    assert np.abs(table.mean(axis=0)).max() < 0.2 and np.abs(table).max() < 30


@given(TEXTS)
@examples(25, long=400)
def test_a_text_has_the_same_vector_in_every_batch(texts: list[str]) -> None:
    preprocessing = trained().fitted.preprocessing
    given_, known = [*texts, None, "", "lovely fresh coffee"], trained()
    together = vectors(preprocessing, given_)
    assert known.fitted.preprocessing is preprocessing and np.isfinite(together).all()
    assert together.tobytes() == np.concatenate([vectors(preprocessing, [text]) for text in given_]).tobytes()
    assert together.tobytes() == vectors(preprocessing, given_[::-1])[::-1].tobytes()


@pytest.mark.parametrize(
    "text",
    [
        "x" * (1 << 20),
        "ein Wort " * 200_000,
        "色は匂へど散りぬるを 我が世誰ぞ常ならむ",
        "Всё хорошо, прекрасная маркиза",
        "\u202e\ufeff\x01\x7f \U0001f600\u0301",
        "\u2028\t\n\r",
    ],
)
def test_any_text_has_a_vector(text: str) -> None:
    preprocessing = trained().fitted.preprocessing
    vector = vectors(preprocessing, [text])
    assert np.isfinite(vector).all() and np.array_equal(vector, vectors(preprocessing, [text[:MOST_CHARACTERS]]))


def test_null_is_like_the_empty_text_but_marked() -> None:
    null, empty = vectors(trained().fitted.preprocessing, [None, ""])
    assert np.array_equal(null, empty)


def test_training_and_prediction_differ_in_what_a_text_says_of_itself_only() -> None:
    """Scores of training texts come from regressions without them; validation rows are predicted like later ones."""
    fitted, store = trained().fitted, trained().store
    (block,) = store.blocks()
    chosen = fitted.division.validation_rows(block)
    known = [*(store.dictionaries[0] or []), None]
    strings = [known[code] for code in block.columns[0].data[chosen].tolist()]
    later = vectors(fitted.preprocessing, strings)
    assert np.array_equal(trained().dataset.validation.features.arrays[0], later)


def test_the_vectors_tell_what_words_tell() -> None:
    fitted = trained().fitted.preprocessing
    training = trained().dataset.training
    texts, labels = reviews(300, seed=1)
    model = LogisticRegression(max_iter=500).fit(training.features.arrays[0], training.target)
    found = model.predict(vectors(fitted, texts))
    assert (np.array(fitted.labels)[found.astype(int)] == labels).mean() > 0.95


def test_scores_of_noise_are_noise() -> None:
    texts, _ = reviews(COUNT)
    labels = np.random.default_rng(2).choice(["a", "b"], COUNT).tolist()
    training = Rows({"t": ("text", texts), "y": ("text", labels)}).prepare(0.0).dataset.training
    score = training.features.arrays[0][:, -3]
    assert abs(np.corrcoef(score, training.target)[0, 1]) < 0.3


@pytest.mark.parametrize("labels", [[f"c{i % 7}" for i in range(COUNT)], np.linspace(0, 9, COUNT).tolist()])
def test_a_text_predicts_any_target(labels: list[str] | list[float]) -> None:
    texts, _ = reviews(COUNT)
    kind = "text" if isinstance(labels[0], str) else "float8"
    fitted = Rows({"t": ("text", texts), "y": (kind, labels)}).prepare(0.0).fitted
    scores = 7 if kind == "text" else 1
    (array,) = fitted.preprocessing.model_inputs.arrays
    assert array.length <= text_fitting.DIRECTIONS + scores + 2 and array.vocabulary == 0


def test_several_texts_share_the_bytes() -> None:
    columns = {f"t{i}": ("text", reviews(COUNT, i)[0]) for i in range(6)}
    preprocessing = Rows({**columns, "y": ("text", reviews(COUNT)[1])}).prepare(0.0).fitted.preprocessing
    assert preprocessing.model_inputs.vectors == 6
    assert len(json.dumps(preprocessing.to_json())) < text_fitting.MOST_BYTES + (1 << 20)


RNG = np.random.default_rng(5)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (reviews(COUNT)[0], True),
        ([f"日本語の文章は分かち書きをしない第{i}番の文" for i in range(COUNT)], True),
        ([f"https://example.org/some-page/of_this/{i}" for i in range(COUNT)], False),
        ([f"2024-01-{i % 28 + 1:02} 12:{i % 60:02}:00 +{i}" for i in range(COUNT)], False),
        ([f"{i:032x}" for i in range(COUNT)], False),
        ([f"a category of few strings {i % 30}" for i in range(COUNT)], False),
        ([f"Ann Smith{i}" for i in range(COUNT)], False),
        (["only one text that all rows have"] * COUNT, False),
        ([None] * COUNT, False),
        ([f"{i} {i + 1} {i + 2} {i + 3}" for i in range(COUNT)], False),
    ],
)
def test_which_columns_are_text(values: list[str | None], text: bool) -> None:
    fitted = Rows({"t": ("text", values), "y": ("float8", RNG.normal(size=COUNT).tolist())}).prepare(0.2).fitted
    assert (fitted.preprocessing.features[0].vectors is not None) == text


def test_rows_are_counted_by_length_and_known_words() -> None:
    fitted, store = trained().fitted, trained().store
    reference = reference_of(fitted, store.blocks())
    assert [histogram.name for histogram in reference.histograms] == ["review: length", "review: known words"]
    assert [sum(histogram.counts) for histogram in reference.histograms] == [fitted.training_rows] * 2
    assert [histogram.counts[0] for histogram in reference.histograms] == [fitted.preprocessing.features[0].nulls] * 2

    def psi(texts: list[str]) -> list[float]:
        preprocessing = fitted.preprocessing
        inputs = [CategoryInput(np.arange(len(texts), dtype=np.int32), preprocessing.table(0, texts))]
        counter = Counter(reference)
        counter.add(sample(preprocessing, Inputs(len(texts), np.empty((0, len(texts))), inputs, []), slice(None)))
        parts = np.split(counter.counts, reference.starts[1:-1])
        shares = [(np.array(h.counts) + 0.5, part + 0.5) for h, part in zip(reference.histograms, parts, strict=True)]
        return [float(((p / p.sum() - q / q.sum()) * np.log((p / p.sum()) / (q / q.sum()))).sum()) for p, q in shares]

    alike, foreign = psi(reviews(300, 7)[0]), psi(["das kennt hier niemand sonst auf der ganzen Welt"] * 300)
    assert max(alike) < 0.3 < min(foreign)


def test_training_again_begins_with_the_earlier_encoder() -> None:
    earlier = trained().fitted.preprocessing
    texts, labels = reviews(300, seed=3)
    later = Rows({"review": ("text", [*texts[:-1], None]), "y": ("text", labels)}).prepare(0.2).fitted.preprocessing
    assert difference(earlier, later) is None
    assert begun_with(earlier, later).features[0].vectors == earlier.features[0].vectors
    category = replace(later, features=(replace(later.features[0], vectors=None, length=None, categories=("a",)),))
    assert difference(earlier, category) == 'the feature "review" has another type or length'
