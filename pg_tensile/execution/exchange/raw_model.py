"""A model with its preprocessing and its answers as one PyTorch module, so that both can be exported as a graph.

It repeats `Preprocessing.apply` and `answers` with PyTorch's operators, in float64 as there. Whether it does is checked
on every export (onnx_check.py). What depends on strings stays outside: codes come in, the number of a label goes out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from pg_tensile.execution.data.cycles import DAY_US, EPOCH_DAYS, UNIX_US
from pg_tensile.execution.data.preprocessing import (
    LIMIT,
    PADDING,
    UNKNOWN_TOKEN,
    Feature,
    Features,
    Kind,
    Preprocessing,
    Scaling,
    Task,
)
from pg_tensile.execution.data.ranks import SMOOTH_LIMIT, RankScale
from pg_tensile.execution.data.targets import LARGEST_LOG, Target

YEAR_0 = 719_468  # days from 0000-03-01 to 1970-01-01


class RawModel(nn.Module):
    """Maps a tensor for each feature, in the order of the features, to answers.

    A number is float64 [rows], NaN for null; a timestamp likewise, in microseconds since 1970. A category is the code
    int64 [rows]. An array is float64 [rows, length], all NaN for null; behind one of tokens come their codes, int64 of
    the same shape. Returns the prediction [rows] of a regression, else the number of the label [rows], its probability
    [rows], and the probabilities [rows, labels]."""

    def __init__(self, preprocessing: Preprocessing, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._preprocessing = preprocessing

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        outputs: Tensor = self.module(self._features(values)).to(torch.float64)
        return self._answers(outputs)

    # ---- preprocessing ----

    def _features(self, values: Sequence[Tensor]) -> Features:
        given = iter(values)
        numbers: list[tuple[Feature, Tensor]] = []
        codes: list[Tensor] = []
        arrays: list[tuple[Feature, Tensor]] = []
        converted: list[Tensor] = []
        for feature in self._preprocessing.features:
            value = next(given)
            if feature.kind == Kind.CATEGORY:
                codes.append(value)
            elif feature.kind == Kind.ARRAY:
                arrays.append((feature, value))
                converted.append(_array(feature, value) if feature.tokens is None else _tokens(value, next(given)))
            else:
                numbers.append((feature, value - _float64(UNIX_US) if feature.kind == Kind.TIMESTAMP else value))
        columns = _number_columns(numbers)
        # nulls of arrays stand before the ranks, which are last
        ranks = [_ranks(feature.ranks, x) for feature, x in numbers if feature.ranks is not None]
        columns += [x.isnan().all(1).to(torch.float64) for feature, x in arrays if feature.nulls]
        rows = values[0].shape[0]
        numeric = torch.stack(columns + ranks, 1) if columns + ranks else torch.zeros(rows, 0)
        categories = torch.stack(codes, 1) if codes else torch.zeros(rows, 0, dtype=torch.int64)
        return Features(numeric.to(torch.float32), categories, tuple(converted))

    # ---- answers ----

    def _answers(self, outputs: Tensor) -> tuple[Tensor, ...]:
        preprocessing = self._preprocessing
        if preprocessing.task == Task.REGRESSION:
            target = preprocessing.target
            values = _original(target, outputs[:, 0] * _float64(target.std) + _float64(target.mean))
            return (torch.maximum(values, _float64(0.0)) if target.nonnegative else values,)
        if preprocessing.calibration is not None:
            scale, shift = preprocessing.calibration
            outputs = outputs * _float64(scale) + _float64(shift)
        if preprocessing.task == Task.BINARY:
            one = _float64(1.0)
            positive = one / (one + torch.exp(_clamped(-outputs[:, 0], -700.0, 700.0)))
            probabilities = torch.stack((one - positive, positive), 1)
            label = (positive > _float64(0.5)).to(torch.int64)
        else:
            odds = torch.exp(outputs - outputs.amax(1, keepdim=True))
            probabilities = odds / odds.sum(1, keepdim=True)
            label = outputs.argmax(1)
        return label, probabilities.amax(1), probabilities


def _float64(value: float) -> Tensor:
    """Return a constant of the graph: PyTorch's exporter rounds Python's numbers to float32."""
    return torch.tensor(value, dtype=torch.float64)


def _clamped(x: Tensor, low: float, high: float) -> Tensor:
    return torch.maximum(torch.minimum(x, _float64(high)), _float64(low))


def _number_columns(numbers: Sequence[tuple[Feature, Tensor]]) -> list[Tensor]:
    """Return the columns of numbers besides their ranks: scaled numbers, indicators of nulls, and cycles."""
    scaled, indicators, waves = [], [], []
    for feature, x in numbers:
        valid = x.isfinite()
        if feature.ranks is None:
            limited = _clamped(torch.where(valid, x, _float64(feature.mean)), *feature.limits)
            scaled.append(_standardise(limited, feature.scaling))
        else:
            scaled.append(_robust(feature.ranks, _known(x, valid)) * valid)
        if feature.nulls:
            indicators.append((~valid).to(torch.float64))
        if feature.kind == Kind.TIMESTAMP:
            waves += _cycles(_known(x, valid), valid, feature.hour)
    return scaled + indicators + waves


def _known(x: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, x, _float64(0.0))


def _standardise(x: Tensor, scaling: Scaling) -> Tensor:
    if math.isinf(scaling.scale):
        return torch.zeros_like(x)
    x = (x * _float64(scaling.unit or 1.0) - _float64(scaling.center)) / _float64(scaling.scale)
    return _clamped(x, -LIMIT, LIMIT)


def _robust(scale: RankScale, x: Tensor) -> Tensor:
    z = _clamped((x - _float64(scale.center)) / _float64(scale.spread), -1e100, 1e100)
    part = z / _float64(SMOOTH_LIMIT)
    return z / torch.sqrt(_float64(1.0) + part * part)


def _ranks(scale: RankScale, x: Tensor) -> Tensor:
    valid = x.isfinite()
    return _interpolated(np.array(scale.values), np.array(scale.deviates), _known(x, valid)) * valid


def _interpolated(knots: NDArray[np.float64], heights: NDArray[np.float64], x: Tensor) -> Tensor:
    """Return the piecewise linear function through the points, constant outside, at `x` [rows]."""
    first = torch.from_numpy(knots[:-1].copy())
    widths, rises = (torch.from_numpy(np.diff(values)) for values in (knots, heights))
    # the sum over all segments of the share that lies below x: no search, which ONNX lacks
    shares = _clamped((x.unsqueeze(1) - first) / widths, 0.0, 1.0)
    return _float64(float(heights[0])) + (shares * rises).sum(1)


def _cycles(x: Tensor, valid: Tensor, hour: bool) -> list[Tensor]:
    """Return the sines, then the cosines, as cycles.py has them."""
    exact = _clamped(x, -9.2e18, 9.2e18) / _float64(DAY_US)
    days = torch.floor(exact)
    week = days - _float64(7.0) * _floor(days, 7.0)
    parts = [(week, 7.0), (_day_of_year(days + _float64(EPOCH_DAYS)), 365.25), (exact - days, 1.0)]
    angles = [part * _float64(2.0 * math.pi / length) for part, length in parts[: 3 if hour else 2]]
    return [wave(angle) * valid for wave in (torch.sin, torch.cos) for angle in angles]


def _day_of_year(days: Tensor) -> Tensor:
    """Return the days since the first of January, for days since 1970-01-01; inside, years begin in March."""
    days = days + _float64(YEAR_0)
    day = days - _floor(days, 146_097.0) * _float64(146_097.0)
    leaps = _floor(day, 1460.0) - _floor(day, 36_524.0) + _floor(day, 146_096.0)
    year = _floor(day - leaps, 365.0)
    since_march = day - (_float64(365.0) * year + _floor(year, 4.0) - _floor(year, 100.0))
    is_leap = (_divides(year, 4.0) & ~_divides(year, 100.0)) | _divides(year, 400.0)
    before = since_march + _float64(59.0) + is_leap.to(torch.float64)
    return torch.where(since_march >= _float64(306.0), since_march - _float64(306.0), before)


def _floor(x: Tensor, divisor: float) -> Tensor:
    return torch.floor(x / _float64(divisor))


def _divides(year: Tensor, divisor: float) -> Tensor:
    return _floor(year, divisor) * _float64(divisor) == year


def _array(feature: Feature, x: Tensor) -> Tensor:
    if feature.means is None:
        x = torch.where(x.isfinite(), x, _float64(feature.mean))
        return _standardise(x, feature.scaling).to(torch.float32)
    x = _numbers(feature, x)
    scaling = feature.scaling._replace(unit=1.0 if feature.scaling.unit is None else feature.scaling.unit)
    unit, center, scale, fill = (torch.from_numpy(np.asarray(field)) for field in (*scaling, feature.fill))
    x = (torch.where(x.isfinite(), x, fill) * unit - center) / scale
    return _clamped(x, -LIMIT, LIMIT).to(torch.float32)


def _numbers(feature: Feature, x: Tensor) -> Tensor:
    """Return the numbers of arrays, as series.py has them."""
    segment = feature.segment or 1
    if segment > 1:
        x = torch.nn.functional.pad(x, (0, -x.shape[1] % segment), value=math.nan)
        x = _mean(x.reshape(-1, x.shape[1] // segment, segment)).squeeze(2)
    if not feature.series:
        return x
    x = torch.where(x.isfinite(), x, _float64(math.nan))
    mean = _mean(x)
    deviation = torch.sqrt(_mean((x - mean) * (x - mean)))
    return torch.cat((x, x[:, 1:] - x[:, :-1], x[:, -1:], mean, deviation), 1)


def _mean(x: Tensor) -> Tensor:
    """Return the mean over the last dimension of the finite numbers, NaN if there are none."""
    is_finite = x.isfinite()
    counts = is_finite.to(torch.float64).sum(-1, keepdim=True)
    return torch.where(is_finite, x, _float64(0.0)).sum(-1, keepdim=True) / counts


def _tokens(x: Tensor, codes: Tensor) -> Tensor:
    """Return the codes of tokens; NaN is what stands behind the last one."""
    codes = torch.where(x == torch.floor(x), codes, UNKNOWN_TOKEN)
    codes = torch.where(x.isnan(), PADDING, codes)
    empty = (codes == PADDING).all(1, keepdim=True)
    first = torch.arange(codes.shape[1]) == 0
    return torch.where(empty & first, UNKNOWN_TOKEN, codes)


def _original(target: Target, x: Tensor) -> Tensor:
    if target.transform == "log":
        size = torch.minimum(x.abs(), _float64(LARGEST_LOG))
        return torch.sign(x) * (torch.exp(size) - _float64(1.0))
    if target.transform == "quantile":
        values, scores = target.knots
        if len(values) == 1:
            return torch.zeros_like(x) + _float64(float(values[0]))
        return _interpolated(scores, values, x)
    return x
