"""Time of coding: linear regression on size and sparsity, one model for each range of sparsity (CSWAP, section IV-C).

The time of a codec in one direction, for words of one size, is a constant plus terms in the bytes, the zero bytes and
the runs of zeros. Runs capture what sparsity alone does not, the distribution of the zeros: a codec that stores runs
takes longer for many short ones. The time is not proportional to them, since a processor predicts the branches of long
runs, and LZ4 skips stretches in which it finds no match. Zeros at random positions, as in activations, form s·(1 − s)
runs for each word.

That is the time of uninterrupted coding. The thread of a lane of the host device waits for its next transfer, then for
a processor and the interpreter, and finds its caches cold. `waking_us` adds this cost, which matters most for small
tensors.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pg_tensile.errors import CodecError
from pg_tensile.planning.compression.codec import WIDTHS, Codec, named_codec, word_of

RANGES = (0.3, 0.6, 0.9)  # boundaries between the ranges of sparsity, each of which has its own model
_TERMS = 6
_VERSION = 1


class Sample(NamedTuple):
    """Measured times of coding and decoding one tensor, chunk by chunk."""

    codec: Codec
    nbytes: int
    word_bytes: int
    zero_share: float
    run_share: float
    encode_us: float
    decode_us: float


class _Model(NamedTuple):
    """Coefficients of coding and of decoding, float[len(RANGES) + 1][_TERMS] each."""

    encode: tuple[tuple[float, ...], ...]
    decode: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class CodecTimes:
    """Time model of the codecs on one device.

    Words of a size that was not measured take as long as the same number of words of the nearest measured size.
    """

    models: Mapping[tuple[Codec, int], _Model]  # by codec and bytes of a word
    waking_us: float = 0.0  # for each transfer

    @property
    def codecs(self) -> tuple[Codec, ...]:
        """Codecs that were measured."""
        return tuple(sorted({codec for codec, _ in self.models}))

    def encode_us(
        self, codec: Codec, nbytes: int, zero_share: float, run_share: float | None = None, word_bytes: int = 4
    ) -> float:
        """Return the µs to code a tensor of `nbytes`, 0 for NONE.

        `run_share` is the number of runs of zeros for each word; None means zeros at random positions. Raises
        CodecError if this codec was not measured.
        """
        return self._predict("encode", codec, nbytes, zero_share, run_share, word_bytes)

    def decode_us(
        self, codec: Codec, nbytes: int, zero_share: float, run_share: float | None = None, word_bytes: int = 4
    ) -> float:
        """Return the µs to decode the tensor, with arguments and errors as in `encode_us`."""
        return self._predict("decode", codec, nbytes, zero_share, run_share, word_bytes)

    def _predict(
        self, way: str, codec: Codec, nbytes: int, zero_share: float, run_share: float | None, word_bytes: int
    ) -> float:
        if codec == Codec.NONE:
            return 0.0
        width = word_of(word_bytes)
        widths = [measured for measured_codec, measured in self.models if measured_codec == codec]
        if not widths:
            hint = "Calibrate the codecs of this device again."
            raise CodecError(f"how long {codec.name} takes was not measured on this device", hint=hint)
        nearest = min(widths, key=lambda measured: (abs(math.log2(measured / width)), -measured))
        coefficients = getattr(self.models[codec, nearest], way)[_range_of(zero_share)]
        runs = zero_share * (1 - zero_share) if run_share is None else run_share
        terms = _terms(nbytes * nearest / width, nearest, zero_share, runs)
        return max(sum(coefficient * term for coefficient, term in zip(coefficients, terms, strict=True)), 0.0)

    def to_json(self) -> str:
        """Serialise the model for the database; `from_json` is the inverse."""
        models = [
            {"codec": codec.name.lower(), "word_bytes": width, **model._asdict()}
            for (codec, width), model in sorted(self.models.items())
        ]
        return json.dumps({"version": _VERSION, "models": models, "waking_us": self.waking_us})

    @classmethod
    def from_json(cls, text: str) -> CodecTimes:
        """Read a model. Raises CodecError if the text is not a result of `to_json`."""
        try:
            stored = json.loads(text)
            if stored["version"] != _VERSION:
                raise ValueError(f"version {stored['version']}")
            models = {
                (named_codec(str(model["codec"])), _stored_width(model["word_bytes"])): _Model(
                    _coefficients(model["encode"]), _coefficients(model["decode"])
                )
                for model in stored["models"]
            }
            return cls(models, _waking_us(stored.get("waking_us", 0.0)))
        except (ValueError, KeyError, TypeError, CodecError) as error:
            hint = "Calibrate the codecs of this device again."
            raise CodecError("the stored times of codecs cannot be read", hint, str(error)) from error


def fit(samples: Iterable[Sample]) -> CodecTimes:
    """Fit by least squares for each codec, word size, direction and range of sparsity.

    A range with too few samples uses the samples of all ranges. Raises CodecError if a codec has fewer samples than
    coefficients.
    """
    groups: dict[tuple[Codec, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.codec, sample.word_bytes), []).append(sample)
    models = {}
    for (codec, width), group in groups.items():
        if len(group) < _TERMS:
            raise CodecError(f"{len(group)} measurements of {codec.name} are too few", f"{_TERMS} are the least.")
        encode = _fit_ranges(group, [sample.encode_us for sample in group])
        models[codec, width] = _Model(encode, _fit_ranges(group, [sample.decode_us for sample in group]))
    return CodecTimes(models)


def relative_absolute_errors(times: CodecTimes, samples: Sequence[Sample]) -> dict[tuple[Codec, str], float]:
    """Return Σ |predicted − measured| / Σ |mean − measured| by codec and direction (CSWAP, section V-C)."""
    errors = {}
    for codec in sorted({sample.codec for sample in samples}):
        group = [sample for sample in samples if sample.codec == codec]
        for way, predict in (("encode", times.encode_us), ("decode", times.decode_us)):
            measured = np.array([getattr(sample, f"{way}_us") for sample in group])
            predicted = np.array([predict(*sample[:2], *sample[3:5], sample.word_bytes) for sample in group])
            spread = np.abs(measured - measured.mean()).sum()
            error = np.abs(measured - predicted).sum()
            errors[codec, way] = float(error / spread) if spread > 0 else 0.0 if error == 0 else math.inf
    return errors


def relative_absolute_error(times: CodecTimes, samples: Sequence[Sample]) -> float:
    """Return the mean error over codecs and directions, preferably for samples that were held out of `fit`.

    Raises CodecError if there are no samples.
    """
    if not samples:
        raise CodecError("without measurements there is no error")
    return float(np.mean(list(relative_absolute_errors(times, samples).values())))


def _range_of(zero_share: float) -> int:
    return bisect_right(RANGES, zero_share)


def _terms(nbytes: float, word_bytes: int, zero_share: float, run_share: float) -> tuple[float, ...]:
    runs = nbytes / word_bytes * run_share
    return 1.0, nbytes, nbytes * zero_share, runs, runs * run_share, runs * zero_share


def _fit_ranges(group: Sequence[Sample], measured_us: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    terms = np.array([_terms(*sample[1:5]) for sample in group])
    us = np.array(measured_us)
    ranges = np.array([_range_of(sample.zero_share) for sample in group])
    fitted = []
    for number in range(len(RANGES) + 1):
        chosen = ranges == number
        if np.count_nonzero(chosen) < 2 * _TERMS:
            chosen = np.ones_like(chosen)
        fitted.append(tuple(map(float, _least_squares(terms[chosen], us[chosen]))))
    return tuple(fitted)


def _least_squares(terms: np.ndarray, us: np.ndarray) -> np.ndarray:
    weights = 1 / np.sqrt(np.maximum(us, 1e-3))  # between absolute and relative errors: small tensors count too
    scale = np.maximum(np.abs(terms).max(axis=0), 1e-12)  # gives bytes and constants comparable magnitudes
    solution, *_ = np.linalg.lstsq(terms / scale * weights[:, None], us * weights, rcond=None)
    return solution / scale


def _coefficients(stored: object) -> tuple[tuple[float, ...], ...]:
    if not isinstance(stored, list) or len(stored) != len(RANGES) + 1:
        raise ValueError(f"{len(RANGES) + 1} ranges of sparsity are expected")
    for row in stored:
        if not isinstance(row, list) or len(row) != _TERMS or not all(_is_number(value) for value in row):
            raise ValueError(f"{_TERMS} finite numbers are expected")
    return tuple(tuple(map(float, row)) for row in stored)


def _waking_us(stored: object) -> float:
    if not isinstance(stored, int | float) or not _is_number(stored) or stored < 0:
        raise ValueError(f"{stored} µs of waking")
    return float(stored)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _stored_width(width: object) -> int:
    if not isinstance(width, int) or width not in WIDTHS:
        raise ValueError(f"words of {width} bytes")
    return width
