"""Hashes of 64 bits that are the same in every process and on every machine. Needs numpy only."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the splitmix64 hash of each number."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def salt(seed: int) -> NDArray[np.uint64]:
    """Return the hash of a seed [1], to be combined with other hashes by exclusive or."""
    return mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], np.uint64))


def string_hash(text: str) -> int:
    """Return the hash of a string's UTF-8 bytes."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def string_hashes(strings: Iterable[str]) -> NDArray[np.uint64]:
    return np.fromiter((string_hash(text) for text in strings), np.uint64)


def number_hashes(numbers: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the hash of each number; equal numbers have equal hashes, whatever the sign of a zero or kind of a NaN."""
    if numbers.dtype.kind == "f":
        x = numbers.astype(np.float64) + 0.0
        x[np.isnan(x)] = np.nan
        return mix(x.view(np.uint64))
    return mix(numbers.astype(np.int64).view(np.uint64))
