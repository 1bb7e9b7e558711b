"""Fitting of the encoders of text columns (text_vectors.py) on a sample of the training rows.

A column is text if it has many distinct strings, most of them of several words; a category of few strings and an
identifier without spaces are none. Its vectors have three kinds of columns:

- the singular vectors of the training texts' TF-IDF (latent semantic analysis, Deerwester et al. 1990);
- predictions of the target, of each class by itself, by ridge regression on all terms. Those of a training text come
  from a regression that has not seen it, as those of later texts do (stacking, Wolpert 1992), so models do not trust
  them too much. A text that several rows have will be seen again, so that it need not be left out;
- the measures of a text. A training text does not know a term that no other training text has.

Needs numpy, and SciPy and scikit-learn where there is a text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pg_tensile.execution.data.fitting import FittedPreprocessing
from pg_tensile.execution.data.hashing import string_hash
from pg_tensile.execution.data.preprocessing import Feature, Preprocessing, Task
from pg_tensile.execution.data.splits import Rows
from pg_tensile.execution.data.text_vectors import (
    MEASURES,
    MOST_CHARACTERS,
    Counts,
    TextVectors,
    assembled,
    batches,
    count,
    kept_counts,
    weighted,
)

LEAST_DISTINCT, DISTINCT, LEAST_WORDS = 50, 0.2, 3.0  # strings of a text, their share of the rows, words of each
WORDS_SAMPLE = 1000  # strings whose words are counted
# A word begins behind a space with two letters; of scripts without spaces, two characters count as one.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]{{2}}|(?<!\S)[^\w\s]*[^\W\d_]{{2}}")
SAMPLE_ROWS, SAMPLE_CHARACTERS = 20_000, 8 << 20
MOST_TERMS = 8192
MOST_BYTES = 3_500_000  # of the encoders of all text columns, as JSON
LEAST_TEXTS = 2  # that have a term
DIRECTIONS, MOST_SCORES = 64, 64
FOLDS, RIDGE = 4, 1.0
KNOWN_ROWS = 3  # with the same text: their targets say what is to be expected of it again, that of one row does not
ITERATIONS, TOLERANCE = 25, 1e-3
PRODUCTS = 100_000_000  # of counts and scores in an iteration: half a second
LARGEST_SCORE = 5.0  # standard deviations of a regression's target


def with_text_vectors(fitted: FittedPreprocessing, rows: Rows) -> FittedPreprocessing:
    """Return what was fitted, with vectors in place of the codes of columns that are text. Reads the first rows."""
    preprocessing = fitted.preprocessing
    places = [
        (place, index)
        for place, index in enumerate(index for index in fitted.roles.features if fitted.columns[index].type == "text")
        if is_text(preprocessing.categories[place], rows.dictionaries[index] or [], fitted)
    ]
    if not places:
        return fitted
    samples, target = _sampled(fitted, rows, [index for _, index in places])
    wanted = _scored(preprocessing, target)
    features, tables = {feature.name: feature for feature in preprocessing.features}, list(fitted.tables)
    width = DIRECTIONS + wanted.shape[1] + MEASURES
    terms = min(MOST_TERMS, MOST_BYTES * 3 // 4 // (2 * width) // len(places))
    for (place, index), codes in zip(places, samples, strict=True):
        encoded = _fit(rows.dictionaries[index] or [], codes, wanted, terms, rows)
        if encoded is not None:
            feature, (vectors, tables[place]) = preprocessing.categories[place], encoded
            text = Feature(feature.name, feature.kind, feature.type, feature.nulls, sql_type=feature.sql_type)
            features[feature.name] = replace(text, length=tables[place].shape[1], vectors=vectors)
    preprocessing = replace(preprocessing, features=tuple(features.values()))
    return replace(fitted, preprocessing=preprocessing, tables=tuple(tables))


def is_text(feature: Feature, strings: Sequence[str], fitted: FittedPreprocessing) -> bool:
    """Return whether a column is text, by the distinct strings of all its rows."""
    present = 1.0 - feature.nulls / max(fitted.training_rows, 1)
    rows = (fitted.training_rows + fitted.validation_rows + fitted.skipped_rows) * present
    if len(strings) < LEAST_DISTINCT or len(strings) < DISTINCT * rows:
        return False
    some = list(islice(strings, 0, None, max(1, len(strings) // WORDS_SAMPLE)))
    words = sum(sum(1 for _ in _WORD.finditer(text[:MOST_CHARACTERS])) for text in some)
    return words >= LEAST_WORDS * len(some)


def _sampled(
    fitted: FittedPreprocessing, rows: Rows, columns: Sequence[int]
) -> tuple[list[NDArray[np.int64]], NDArray[Any]]:
    """Return the codes of each column and the encoded target of the first training rows, which are a random sample."""
    lengths = [
        np.fromiter((min(len(text), MOST_CHARACTERS) for text in rows.dictionaries[index] or []), np.int64)
        for index in columns
    ]
    codes: list[list[NDArray[Any]]] = [[] for _ in columns]
    targets: list[NDArray[Any]] = []
    left, characters = SAMPLE_ROWS, SAMPLE_CHARACTERS
    for block in rows.blocks():
        block = fitted.training_part(block)
        given = [np.where(block.columns[i].nulls, -1, block.columns[i].data)[:left].astype(np.int64) for i in columns]
        sizes = np.sum([np.append(of, 0)[part] for of, part in zip(lengths, given, strict=True)], axis=0)
        chosen = int(np.searchsorted(np.cumsum(sizes), characters, side="right"))
        targets.append(fitted.encode_target(block)[:left][:chosen])
        for parts, part in zip(codes, given, strict=True):
            parts.append(part[:chosen])
        left, characters = left - chosen, characters - int(sizes[:chosen].sum())
        if left <= 0 or chosen < len(given[0]):
            break
    return [np.concatenate(parts) for parts in codes], np.concatenate(targets)


def _scored(preprocessing: Preprocessing, target: NDArray[Any]) -> NDArray[np.float32]:
    """Return what is predicted from texts [rows, scores]: the target, or which of the most frequent labels it is."""
    if preprocessing.task != Task.MULTICLASS:
        return np.clip(target, -LARGEST_SCORE, LARGEST_SCORE).astype(np.float32)[:, None]
    labels = np.argsort(-np.bincount(target, minlength=preprocessing.outputs), kind="stable")[:MOST_SCORES]
    return (target[:, None] == labels).astype(np.float32)


class _Training(NamedTuple):
    """Distinct texts of the sample: how many rows have each [texts], and the mean of what these are to predict."""

    rows: NDArray[np.float32]
    wanted: NDArray[np.float32]  # [texts, scores], less the mean of all rows


def _fit(
    strings: Sequence[str], codes: NDArray[np.int64], wanted: NDArray[np.float32], terms: int, rows: Rows
) -> tuple[TextVectors, NDArray[np.float32]] | None:
    """Return the encoder and the table of a CategoryInput, or None if the texts have too few terms in common.

    `codes` [rows] of the sample's strings, −1 = null; `wanted` [rows, scores]."""
    from sklearn.feature_extraction.text import TfidfTransformer

    known = codes >= 0
    distinct, first, places = np.unique(codes[known], return_index=True, return_inverse=True)
    texts = [strings[code] for code in distinct.tolist()]
    counts = _counted(texts, rows)
    words, characters = (_frequent(part, terms // 2) for part in (counts.words, counts.characters))
    if len(texts) <= LEAST_DISTINCT // 2 or len(words) + len(characters) < LEAST_DISTINCT:
        return None
    kept = kept_counts(counts, words, characters)
    idf = TfidfTransformer().fit(kept).idf_.astype(np.float32)
    matrix = weighted(kept, idf)
    training = _training(wanted[known], places, len(texts))
    directions = _directions(matrix)
    coefficients, scores = _scores(matrix, training, texts, np.argsort(first))
    projection = np.concatenate([directions, coefficients], axis=1).astype(np.float16)
    frequency = np.bincount(counts.words.indices, minlength=counts.words.shape[1])[words]
    of_others = words[frequency > frequency.min(initial=len(texts))]
    vectors = assembled(matrix @ projection.astype(np.float32), counts, of_others)
    np.copyto(vectors[:, directions.shape[1] : -MEASURES], scores, where=~np.isnan(scores))
    spread = vectors.std(axis=0)
    spread[: directions.shape[1]] = spread[: directions.shape[1]].max()  # the last of them are noise, and stay small
    scale = np.where(spread > 1e-6, 1.0 / np.maximum(spread, 1e-6), 0.0)
    encoder = TextVectors.of(words, characters, idf, projection, vectors.mean(axis=0), scale)
    table = np.empty((len(strings) + 1, vectors.shape[1]), np.float32)
    table[distinct] = encoder.encoder.scaled(vectors)
    others = np.setdiff1d(np.arange(len(strings)), distinct)
    table[[*others, -1]] = encoder.encode([*(strings[code] for code in others.tolist()), ""], rows.poll)
    return encoder, table


def _counted(texts: Sequence[str], rows: Rows) -> Counts:
    import scipy.sparse

    parts = []
    for batch in batches(texts):
        rows.poll()
        parts.append(count(batch))
    words, characters, lengths = zip(*parts, strict=True)
    stack = scipy.sparse.vstack
    return Counts(stack(words, format="csr"), stack(characters, format="csr"), np.concatenate(lengths))


def _frequent(counts: Any, most: int) -> NDArray[np.intp]:
    """Return the hashes that the most texts have, ascending; of equally frequent ones the first."""
    frequency = np.bincount(counts.indices, minlength=counts.shape[1])
    order = np.argsort(-frequency, kind="stable")[:most]
    return np.sort(order[frequency[order] >= LEAST_TEXTS])


def _training(wanted: NDArray[np.float32], places: NDArray[np.intp], texts: int) -> _Training:
    rows = np.bincount(places, minlength=texts)
    centered = wanted - wanted.mean(axis=0)
    sums = [np.bincount(places, column, minlength=texts) for column in centered.T]
    return _Training(rows.astype(np.float32), (np.stack(sums, 1) / rows[:, None]).astype(np.float32))


def _directions(matrix: Any) -> NDArray[np.float32]:
    """Return the singular vectors of the largest singular values [terms, directions]."""
    from sklearn.decomposition import TruncatedSVD

    count = min(DIRECTIONS, min(matrix.shape) - 1)
    directions: NDArray[np.float32] = TruncatedSVD(count, n_iter=3, random_state=0).fit(matrix).components_.T
    return directions


def _scores(
    matrix: Any, training: _Training, texts: Sequence[str], order: NDArray[np.intp]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the coefficients of all scores [terms, scores], and scores of rare texts by regressions without them.

    Regressions see texts in this `order`, as many as time allows; the scores of other texts are NaN."""
    entries = np.cumsum(np.diff(matrix.indptr)[order])
    seen = order[: max(int(np.searchsorted(entries, PRODUCTS // training.wanted.shape[1])), LEAST_DISTINCT)]
    weights = np.zeros(len(texts), np.float32)
    weights[seen] = training.rows[seen]
    coefficients = _ridge(matrix, weights, training.wanted)
    scores = np.full(training.wanted.shape, np.nan, np.float32)
    folds = np.fromiter((string_hash(text) % FOLDS for text in texts), np.int64, len(texts))
    for fold in range(FOLDS):
        without = _ridge(matrix, np.where(folds == fold, 0, weights).astype(np.float32), training.wanted)
        left_out = np.flatnonzero((folds == fold) & (weights > 0) & (training.rows < KNOWN_ROWS))
        scores[left_out] = matrix[left_out] @ without
    return coefficients, scores


def _ridge(matrix: Any, weights: NDArray[np.float32], wanted: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the coefficients [terms, scores] of ridge regressions, by conjugate gradients for all scores at once.

    scikit-learn's takes one score after the other, which takes several times as long."""
    seen = np.flatnonzero(weights)
    chosen, share = matrix[seen], weights[seen, None]
    transposed = chosen.T.tocsr()
    result = np.zeros((matrix.shape[1], wanted.shape[1]), np.float32)
    residual = transposed @ (share * wanted[seen])
    direction = residual.copy()
    size = (residual * residual).sum(axis=0)
    least = size * TOLERANCE**2
    for _ in range(ITERATIONS):
        product = transposed @ (share * (chosen @ direction)) + RIDGE * direction
        step = size / np.maximum((direction * product).sum(axis=0), 1e-30)
        result += step * direction
        residual -= step * product
        before, size = size, (residual * residual).sum(axis=0)
        if (size <= least).all():
            break
        direction = residual + size / np.maximum(before, 1e-30) * direction
    return result
