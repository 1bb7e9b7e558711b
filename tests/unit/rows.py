"""Rows for tests, encoded as the feed does: from Python values to buffers of frames (docs/internals.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import numpy as np

from pg_tensile.execution.data.columns import ARRAY_TYPES, SCALAR_TYPES, Column
from pg_tensile.execution.data.dataset import Dataset, RowStore, prepare
from pg_tensile.execution.data.fitting import FittedPreprocessing, fit
from pg_tensile.execution.data.preprocessing import TokenLimits
from pg_tensile.execution.data.splits import Split
from pg_tensile.execution.data.text_fitting import with_text_vectors
from pg_tensile.execution.data.texts import TextColumns
from pg_tensile.execution.data.weights import Weighting


class Prepared(NamedTuple):
    store: RowStore
    fitted: FittedPreprocessing
    dataset: Dataset


@dataclass
class Rows:
    """`columns`: name → (element type, values; None = null); the last column is the target."""

    columns: dict[str, tuple[str, Sequence[Any]]]
    cache_bytes: int = 1 << 30
    spool_directory: str = "/tmp"
    dictionaries: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def header(self) -> list[Column]:
        last = list(self.columns)[-1]
        return [Column(name, kind, name == last) for name, (kind, _) in self.columns.items()]

    @property
    def count(self) -> int:
        return len(next(iter(self.columns.values()))[1])

    def frames(self, order: Sequence[int] | None = None, size: int = 100) -> Iterator[tuple[int, list[bytes]]]:
        """Return rows and buffers of each ROWS frame, rows in `order`; text is coded in order of appearance."""
        rows = list(range(self.count) if order is None else order)
        self.dictionaries = {name: {} for name, (kind, _) in self.columns.items() if kind == "text"}
        for start in range(0, len(rows), size):
            chosen = rows[start : start + size]
            hashes = np.array([self._hash(row) for row in chosen], np.uint64)
            buffers = [hashes.tobytes()]
            for name, (kind, values) in self.columns.items():
                buffers.extend(self._column(name, kind, [values[row] for row in chosen]))
            yield len(chosen), buffers

    def dictionary_buffers(self) -> list[bytes]:
        """Return the buffers of ROWS_END, after all frames."""
        buffers = []
        for codes in self.dictionaries.values():
            strings = [text.encode() for text in codes]
            buffers += [np.array([len(text) for text in strings], "<i4").tobytes(), b"".join(strings)]
        return buffers

    def store(self, order: Sequence[int] | None = None, size: int = 100) -> RowStore:
        store = RowStore(self.header, self.cache_bytes, self.spool_directory)
        for rows, buffers in self.frames(order, size):
            store.add(rows, buffers)
        store.finish(self.count, f"{self.count}:0", self.dictionary_buffers())
        return store

    def prepare(
        self,
        validation: float = 0.2,
        seed: int = 0,
        task: str | None = None,
        tokens: TokenLimits | None = None,
        texts: TextColumns | None = None,
        order: Sequence[int] | None = None,
        split_by: str | None = None,
        flagged: bool = False,
        weighting: Weighting | None = None,
        transform: str | None = None,
        ranks: bool = False,
    ) -> Prepared:
        store, split = self.store(order), Split(seed, validation, split_by, flagged)
        fitted = fit(store, split, task, tokens, weighting or Weighting(), transform, ranks, texts)
        if texts is None:
            fitted = with_text_vectors(fitted, store)
        return Prepared(store, fitted, prepare(store, fitted, self.cache_bytes, self.spool_directory))

    def _hash(self, row: int) -> int:
        content = repr([values[row] for _, values in self.columns.values()]).encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")

    def _column(self, name: str, kind: str, values: list[Any]) -> list[bytes]:
        nulls = np.array([value is None for value in values])
        if kind == "text":
            codes = self.dictionaries[name]
            coded = [0 if value is None else codes.setdefault(value, len(codes)) for value in values]
            return [_bitmap(nulls), np.array(coded, "<i4").tobytes()]
        if kind in SCALAR_TYPES:
            filled = [0 if value is None else value for value in values]
            return [_bitmap(nulls), np.array(filled, SCALAR_TYPES[kind]).tobytes()]
        lists = [[] if value is None else list(value) for value in values]
        elements = [element for row in lists for element in row]
        missing = np.array([element is None for element in elements], bool)
        data = np.array([0 if element is None else element for element in elements], ARRAY_TYPES[kind])
        lengths = np.array([len(row) for row in lists], "<i4")
        return [_bitmap(nulls), lengths.tobytes(), _bitmap(missing), data.tobytes()]


def _bitmap(bits: Any) -> bytes:
    return np.packbits(bits, bitorder="little").tobytes()


def every_type(count: int, seed: int = 0) -> Rows:
    """Build rows with a column of every element type, with nulls, and a target that depends on some of them."""
    rng = np.random.default_rng(seed)

    def some(values: Sequence[Any]) -> list[Any]:
        return [None if rng.random() < 0.05 else value for value in values]

    a, b = rng.normal(size=count), rng.integers(-1000, 1000, count)
    words = [f"wörd {number}" for number in rng.integers(0, 30, count)]
    columns: dict[str, tuple[str, Sequence[Any]]] = {
        "bool": ("bool", some((b > 0).tolist())),
        "int2": ("int2", some(b.tolist())),
        "int4": ("int4", some((b * 1000).tolist())),
        "int8": ("int8", some((b * 10**12).tolist())),
        "float4": ("float4", some(a.astype(np.float32).tolist())),
        "float8": ("float8", some([*a.tolist()[:-2], float("nan"), float("inf")])),
        "date": ("timestamp", some([int(day) * 86_400_000_000 for day in rng.integers(0, 9000, count)])),
        "time": ("timestamp", some(rng.integers(0, 8 * 10**14, count).tolist())),
        "text": ("text", some(words)),
        "doubles": ("float8[]", [[x, None if x > 2 else x * x, 1.0] for x in a.tolist()]),
        "bytes": ("uint8[]", some([[int(value) for value in rng.integers(0, 256, 4)] for _ in range(count)])),
        "y": ("text", ["yes" if x + y / 1000 > 0 else "no" for x, y in zip(a, b, strict=True)]),
    }
    return Rows(columns)


def printed(kind: str, value: Any) -> str:
    """Return the value as PostgreSQL prints it."""
    if value is None:
        return ""
    if kind == "bool":
        return "t" if value else "f"
    if kind == "timestamp":
        return str(datetime(2000, 1, 1, tzinfo=UTC) + timedelta(microseconds=value)).replace("+00:00", "+00")
    if kind == "uint8[]":
        return "\\x" + bytes(value).hex()
    if kind.endswith("[]"):
        return "{" + ",".join("NULL" if item is None else repr(item) for item in value) + "}"
    if kind == "float4":
        return str(np.float32(value))
    return {"nan": "NaN", "inf": "Infinity"}.get(str(value), str(value))
