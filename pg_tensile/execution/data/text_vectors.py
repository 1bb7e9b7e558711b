"""Texts as vectors of a fixed length: TF-IDF of hashed words and characters, projected.

A text's words, pairs of neighbouring words, and sequences of two to four characters within words are hashed and
counted. Of the hashes, the model keeps those that the most training texts have; of other hashes it knows only that
they are unknown. The counts, weighted by TF-IDF (Salton and Buckley 1988), are projected to columns that are fitted
(text_fitting.py): directions in which training texts differ most, and linear predictions of the target. Two more
columns measure the text: the logarithm of its length, and the share of its words and pairs that are known.

A text has the same vector in every batch. Needs numpy and, to encode, SciPy and scikit-learn, which are imported then:
they start OpenMP, which does not survive a fork.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

MOST_CHARACTERS = 10_000  # of a text that are looked at
BUCKETS = 1 << 18  # of words and, by themselves, of characters
BATCH_CHARACTERS, BATCH_STRINGS = 1 << 20, 4096  # of texts that are encoded at once
MEASURES = 2  # columns behind the projected ones: length and known share
LENGTH, KNOWN = -2, -1


class Counts(NamedTuple):
    """Sparse counts of hashed words and of hashed characters [texts, …], and the lengths of the texts [texts]."""

    words: Any
    characters: Any
    lengths: NDArray[np.float64]


@dataclass(frozen=True)
class TextVectors:
    """The fitted encoder of a text column, as it is stored: arrays as base64 of little-endian numbers.

    words, characters   int32 [terms]: the hashes that are kept, ascending
    idf                 float32 [terms]: weights of all terms, words first
    projection          float16 [terms, columns]
    center, scale       float32 [columns + MEASURES]: what is subtracted from a vector, and its factor then
    """

    words: str
    characters: str
    idf: str
    projection: str
    center: str
    scale: str

    @staticmethod
    def of(
        words: NDArray[Any],
        characters: NDArray[Any],
        idf: NDArray[Any],
        projection: NDArray[Any],
        center: NDArray[Any],
        scale: NDArray[Any],
    ) -> TextVectors:
        return TextVectors(
            _packed(words, "<i4"),
            _packed(characters, "<i4"),
            _packed(idf, "<f4"),
            _packed(projection, "<f2"),
            _packed(center, "<f4"),
            _packed(scale, "<f4"),
        )

    def to_json(self) -> dict[str, str]:
        return asdict(self)

    @cached_property
    def encoder(self) -> TextVectorEncoder:
        """Raises ValueError if the arrays are not such as training makes them."""
        return TextVectorEncoder(self)

    def encode(self, strings: Sequence[str], poll: Callable[[], None] = lambda: None) -> NDArray[np.float32]:
        """Return the vectors [strings, width]. `poll` is called before each batch and may raise."""
        return self.encoder.encode(strings, poll)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays once they are in use."""
        return 3 * len(self.projection) + len(self.words) + len(self.characters) + len(self.idf)


class TextVectorEncoder:
    """The arrays of a TextVectors, ready to use; `width` is the length of a vector."""

    def __init__(self, stored: TextVectors) -> None:
        self.words, self.characters = _unpacked(stored.words, "<i4"), _unpacked(stored.characters, "<i4")
        self.idf, self.center, self.scale = (_unpacked(x, "<f4") for x in (stored.idf, stored.center, stored.scale))
        self.width = len(self.center)
        terms, columns = len(self.idf), self.width - MEASURES
        flat = _unpacked(stored.projection, "<f2").astype(np.float32)
        if columns < 1 or terms < 1 or terms != len(self.words) + len(self.characters):
            raise ValueError("the numbers of terms or columns are wrong")
        self.projection = flat.reshape(terms, columns)
        for hashes in (self.words, self.characters):
            if len(hashes) and not (hashes[0] >= 0 and hashes[-1] < BUCKETS and (np.diff(hashes) > 0).all()):
                raise ValueError("the hashes are not ascending")
        numbers = (self.idf, self.projection, self.center, self.scale)
        if len(self.scale) != self.width or not all(np.isfinite(x).all() for x in numbers):
            raise ValueError("a number is missing or not finite")

    def encode(self, strings: Sequence[str], poll: Callable[[], None]) -> NDArray[np.float32]:
        """Return the vectors [strings, width], as `TextVectors.encode`."""
        vectors = np.empty((len(strings), self.width), np.float32)
        start = 0
        for batch in batches(strings):
            poll()
            vectors[start : start + len(batch)] = self._encode(count(batch))
            start += len(batch)
        return vectors

    def _encode(self, counts: Counts) -> NDArray[np.float32]:
        matrix = weighted(kept_counts(counts, self.words, self.characters), self.idf)
        return self.scaled(assembled(matrix @ self.projection, counts, self.words))

    def scaled(self, vectors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Center and scale vectors in place, and return them."""
        vectors -= self.center
        vectors *= self.scale
        return vectors


def batches(strings: Sequence[str]) -> Iterator[list[str]]:
    """Yield the texts in batches, each cut to what is looked at of it."""
    batch: list[str] = []
    characters = 0
    for text in strings:
        batch.append(text[:MOST_CHARACTERS])
        characters += len(batch[-1])
        if characters >= BATCH_CHARACTERS or len(batch) == BATCH_STRINGS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def count(strings: Sequence[str]) -> Counts:
    """Return the hashed counts of texts, all of which is looked at."""
    words, characters = (vectorizer.transform(strings) for vectorizer in _vectorizers())
    return Counts(words, characters, np.fromiter(map(len, strings), np.float64, len(strings)))


@cache
def _vectorizers() -> tuple[Any, Any]:
    """Return scikit-learn's vectorizers of words and of characters."""
    from sklearn.feature_extraction.text import HashingVectorizer

    common: dict[str, Any] = {
        "n_features": BUCKETS,
        "norm": None,
        "alternate_sign": False,
        "dtype": np.float32,
    }
    words = HashingVectorizer(ngram_range=(1, 2), **common)
    return words, HashingVectorizer(analyzer="char_wb", ngram_range=(2, 4), **common)


def weighted(counts: Any, idf: NDArray[np.float32]) -> Any:
    """Return sublinear TF-IDF of counts [texts, terms], whose rows have the length 1; `counts` is overwritten."""
    from sklearn.preprocessing import normalize

    counts.data = _frequencies()[counts.data.astype(np.int64)] * idf[counts.indices]
    return normalize(counts, copy=False)


@cache
def _frequencies() -> NDArray[np.float32]:
    """Return the weight of each count: 1 + its logarithm. A table has the same bits wherever a count stands."""
    counts = np.arange(3 * MOST_CHARACTERS + 1, dtype=np.float64)
    return (1.0 + np.log(np.maximum(counts, 1.0))).astype(np.float32)


def kept_counts(counts: Counts, words: NDArray[Any], characters: NDArray[Any]) -> Any:
    """Return the counts of these hashes [texts, terms], ascending ones each, words first."""
    import scipy.sparse

    return scipy.sparse.hstack((_kept(counts.words, words), _kept(counts.characters, characters)), format="csr")


def _kept(counts: Any, hashes: NDArray[Any]) -> Any:
    """Return the columns with these hashes; SciPy's way looks at all columns, which is slow for a single text."""
    import scipy.sparse

    places = np.searchsorted(hashes, counts.indices)
    is_kept = np.append(hashes, -1)[places] == counts.indices
    starts = np.append(0, np.cumsum(is_kept))[counts.indptr]
    return scipy.sparse.csr_matrix((counts.data[is_kept], places[is_kept], starts), (counts.shape[0], len(hashes)))


def assembled(projected: NDArray[np.float32], counts: Counts, known: NDArray[Any]) -> NDArray[np.float32]:
    """Return projected texts [texts, columns] with their measures, of which `known` are the hashes of known words.

    The known share of a text without words is 1."""
    total, found = (x.sum(axis=1).A1.astype(np.float64) for x in (counts.words, _kept(counts.words, known)))
    share = np.where(total > 0, found / np.maximum(total, 1.0), 1.0)
    return np.column_stack((projected, np.log1p(counts.lengths), share)).astype(np.float32)


def _packed(numbers: NDArray[Any], dtype: DTypeLike) -> str:
    return base64.b64encode(np.ascontiguousarray(numbers, dtype).tobytes()).decode()


def _unpacked(text: str, dtype: DTypeLike) -> NDArray[Any]:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype)
