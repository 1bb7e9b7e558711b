"""Cases that codecs are tested with, whatever they run on, and the host's codecs as what they are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch

from pg_tensile.execution.codecs import host
from pg_tensile.execution.codecs.device import Coder
from pg_tensile.planning.compression.codec import ROW_WORDS, Codec, CodedChunk, Launch

LAUNCHES = (Launch(), Launch(grid=1, block=64), Launch(grid=7))
GUARD = 64  # bytes behind a place, which nothing may touch
_FILL = 0xA5


class Case(NamedTuple):
    """A chunk of random words with a share of zeros in runs of `run_words`, and `tail` bytes after its last word."""

    words: int
    zero_share: float
    run_words: int
    tail: int  # at most one less than the bytes of a word count
    seed: int


_SHAPES = (
    *((words, 0.7, run) for words in (1, 1023, 1025, 2 * ROW_WORDS + 77) for run in (1, 9, ROW_WORDS)),
    *((5000, share, 1) for share in (0.0, 0.1, 0.99, 1.0)),
)
CASES = tuple(Case(*shape, tail=seed, seed=seed) for seed, shape in enumerate(_SHAPES))
SHORT_CASES = tuple(case for case in CASES if case.words <= ROW_WORDS)


def pairwise(first: Sequence[Any], second: Sequence[Any], third: Sequence[Any]) -> list[tuple[Any, Any, Any]]:
    """Return combinations of a value of each in which any two values occur together (pairwise testing)."""
    least = min(len(first), len(second), len(third))
    numbered = product(enumerate(first), enumerate(second), enumerate(third))
    return [(a, b, c) for (i, a), (j, b), (k, c) in numbered if (i + j + k) % least == 0]


def sparse_words(words: int, width: int, zero_share: float, run_words: int, seed: int) -> np.ndarray:
    """Return random bits, of which about that share is zero, in runs of that length."""
    random = np.random.default_rng(seed)
    values = random.integers(0, 256, words * width, np.uint8).view(f"u{width}").copy()
    zero = np.repeat(random.random(-(-words // run_words)) < zero_share, run_words)[:words]
    values[zero] = 0
    return values


def guarded_memory(size: int, device: torch.device | str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory with a guard behind it, and the part of it that may be written."""
    memory = torch.full((size + GUARD,), _FILL, dtype=torch.uint8, device=device)
    return memory, memory[:size]


def check_guard(memory: torch.Tensor) -> None:
    assert (memory[-GUARD:] == _FILL).all()


def on_host(codec: Codec, source: torch.Tensor, width: int) -> tuple[CodedChunk, torch.Tensor]:
    """Return the host's coding of bytes, and the coded bytes."""
    coded = torch.empty_like(source)
    chunk = host.encode(codec, source, width, coded)
    return chunk, coded[: chunk.coded_bytes]


def check_against_host(coder: Coder, device: torch.device, codec: Codec, width: int, source: torch.Tensor) -> None:
    """Check that a coder writes the host's bytes, decodes them, and writes nothing else.

    `source` is uint8[n] on the CPU, the coder's tensors are on `device`.
    """
    expected, coded = on_host(codec, source, width)
    memory, target = guarded_memory(len(source), device)
    assert coder.encode(codec, source.to(device), width, target) == expected
    check_guard(memory)
    if expected.codec == Codec.NONE:
        return
    assert torch.equal(target[: expected.coded_bytes].cpu(), coded)
    memory, back = guarded_memory(len(source), device)
    coder.decode(expected, coded.to(device), width, back)
    assert torch.equal(back.cpu(), source)
    check_guard(memory)


def check_cases(coder: Coder, device: torch.device, codec: Codec, width: int, cases: Sequence[Case] = CASES) -> None:
    for case in cases:
        values = sparse_words(case.words, width, case.zero_share, case.run_words, case.seed).view(np.uint8)
        source = torch.from_numpy(np.concatenate([values, np.full(case.tail % width, 7, np.uint8)]))
        check_against_host(coder, device, codec, width, source)
