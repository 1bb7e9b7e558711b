"""Operators as the latency models see them: a kind and a feature vector (TENSILE, section IV-A).

Each *kind* has its own model. It consists of the target, the type of the numbers, and whatever makes PyTorch choose
another algorithm. The *vector* has the sizes of the operands, the scalar arguments, flops and bytes, the likely state
of the caches (`Caches`), and the device's load. It has the same layout for all kinds; training omits the features that
do not vary. Sizes are logarithms to base 2, so a distance of 1 is a factor of 2 everywhere.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency.roofline import SMALLEST_US
from pg_tensile.planning.trace.trace import Trace

TENSORS = 4  # operands that have their own features
DIMENSIONS = 4  # of each
SCALARS = 16
_PER_TENSOR = DIMENSIONS + 4  # elements, rank, layout, alignment
_OPERANDS = TENSORS * _PER_TENSOR + 2 + SCALARS
# Features before REUSE describe the call, the others the moment of its execution.
FLOPS, BYTES, ROOFLINE, REUSE, BEFORE, LOAD = range(_OPERANDS, _OPERANDS + 6)
FEATURES = _OPERANDS + 6

_TOKEN = re.compile(
    r"(?P<dtype>[a-z][a-z0-9_]*)\[(?P<shape>\d+(?:,\d+)*)?\](?:@(?P<strides>-?\d+(?:,-?\d+)*))?"
    r"|(?P<name>[A-Za-z_]\w*)="
    r"|(?P<number>-?(?:\d+(?:\.\d*)?(?:e[-+]?\d+)?|inf\b|nan\b))"
    r"|(?P<word>[A-Za-z_][\w.]*)"
)
_MOST_ALIGNED = 4  # 16 elements: the channels in a block of oneDNN on AVX-512
_MOST_WORDS = 4


class Operand(NamedTuple):
    """Tensor of a signature. `strides` is empty if it is contiguous."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def layout(self) -> str:
        """Memory layout: "contiguous", "channels_last" or "strided"."""
        if not self.strides:
            return "contiguous"
        order = sorted(range(len(self.shape)), key=lambda place: self.strides[place], reverse=True)
        channels_last = [0, *range(2, len(self.shape)), 1]
        return "channels_last" if len(self.shape) in (4, 5) and order == channels_last else "strided"


class Arguments(NamedTuple):
    """Arguments in a signature. An operand is None where an optional tensor was not given."""

    operands: tuple[Operand | None, ...]
    numbers: tuple[float, ...]
    words: tuple[str, ...]  # "torch.float32", "tanh"


def parse(signature: str) -> Arguments:
    """Return the arguments in a `Trace.signature`, with lists flattened. Ignores unknown syntax; never raises."""
    operands: list[Operand | None] = []
    numbers: list[float] = []
    words: list[str] = []
    for token in _TOKEN.finditer(signature):
        if token["dtype"]:
            shape = _integers(token["shape"])
            operands.append(Operand(token["dtype"], shape, _strides(token["strides"], len(shape))))
        elif token["number"]:
            numbers.append(float(token["number"]))
        elif token["word"] == "None":
            operands.append(None)
        elif token["word"] in ("True", "False"):
            numbers.append(float(token["word"] == "True"))
        elif token["word"]:
            words.append(token["word"])
    return Arguments(tuple(operands), tuple(numbers), tuple(words))


def _integers(text: str | None) -> tuple[int, ...]:
    return tuple(int(number[:18]) for number in text.split(",")) if text else ()


def _strides(text: str | None, rank: int) -> tuple[int, ...]:
    strides = _integers(text)
    return strides if len(strides) == rank else ()


class Sample(NamedTuple):
    """Operator that was executed, and its latency."""

    target: str
    signature: str
    flops: int
    bytes: int
    load: float  # share of the device that other processes use, 0 … 1
    latency_us: float
    reuse: float = 0.0  # as in `Caches`
    before: float = 0.0


class Described(NamedTuple):
    """Kinds and feature vectors of n operators, the input of the models."""

    kinds: tuple[str, ...]  # names of kinds, sorted
    codes: NDArray[np.intp]  # [n]: index into `kinds`
    features: NDArray[np.float64]  # [n, FEATURES]


def describe(trace: Trace, profile: DeviceProfile, load: float) -> Described:
    """Describe the operators of a trace on a device of which other processes use the share `load` (0 … 1)."""
    calls = list(zip(trace.target.codes.tolist(), trace.signature.codes.tolist(), strict=True))
    rows = {call: row for row, call in enumerate(dict.fromkeys(calls))}
    kinds, operands = describe_calls((trace.target.values[t], trace.signature.values[s]) for t, s in rows)
    inverse = np.fromiter((rows[call] for call in calls), np.intp, len(calls))
    kinds = [kinds[row] for row in inverse]
    return assemble(kinds, operands[inverse], trace.flops, trace.operator_bytes, profile, load, caches_of(trace))


def describe_calls(calls: Iterable[tuple[str, str]]) -> tuple[list[str], NDArray[np.float64]]:
    """Return the kind of each (target, signature), and float64[calls, FEATURES - 6]: all features but the last six."""
    described = [_describe(target, signature) for target, signature in calls]
    return [kind for kind, _ in described], np.array([row for _, row in described]).reshape(-1, _OPERANDS)


def assemble(
    kinds: list[str],
    operands: NDArray[np.float64],
    flops: ArrayLike,
    traffic: ArrayLike,
    profile: DeviceProfile,
    load: ArrayLike,
    caches: Caches,
) -> Described:
    """Build the rows from operand features, flops, bytes, roofline, load (0 … 1) and caches.

    Each argument has one value for each row, or one value for all rows.
    """
    features = np.empty((len(kinds), FEATURES))
    features[:, :_OPERANDS] = operands
    features[:, FLOPS], features[:, BYTES] = _log(flops), _log(traffic)
    features[:, ROOFLINE] = np.log2(roofline_us(flops, traffic, profile))
    features[:, REUSE], features[:, BEFORE] = caches
    features[:, LOAD] = np.clip(np.nan_to_num(load), 0.0, 1.0)
    names, codes = np.unique(kinds, return_inverse=True) if kinds else (np.array([], str), np.array([], np.intp))
    return Described(tuple(names.tolist()), codes, features)


def describe_samples(samples: Sequence[Sample], profile: DeviceProfile) -> Described:
    """Describe measured operators."""
    kinds, operands = describe_calls((sample.target, sample.signature) for sample in samples)
    rows = [sample[2:5] + sample[6:] for sample in samples]
    flops, traffic, load, reuse, before = np.array(rows, np.float64).reshape(-1, 5).T
    return assemble(kinds, operands, flops, traffic, profile, load, Caches(reuse, before))


class Caches(NamedTuple):
    """Indicators of whether operands, and the code that executes an operator, may still be in a cache.

    Both are logarithms to base 2.
    """

    reuse: ArrayLike  # bytes accessed since the previous access of an operand, averaged over the operands' bytes
    before: ArrayLike  # bytes that the previous operator accesses


def caches_of(trace: Trace) -> Caches:
    """Compute the indicators for a trace, float64[operators] each.

    A tensor that outlives the iteration was last accessed in the previous one. Accesses that create a tensor are
    ignored; `reuse` is 0 for an operator without others.
    """
    operator, tensor = trace.access_operator, trace.access_tensor
    size = trace.tensor_bytes[tensor].astype(np.float64)
    accessed = np.concatenate(([0.0], np.cumsum(np.bincount(operator, size, trace.operator_count))))
    order, start = trace.access_by_tensor, trace.tensor_start
    begin = accessed[operator[order]]
    before = np.empty_like(begin)
    before[1:] = begin[:-1]
    used = start[:-1] < start[1:]
    first, last = start[:-1][used], start[1:][used] - 1
    before[first] = np.where(trace.persistent[used], begin[last] - accessed[-1], np.nan)
    distance = np.empty_like(begin)
    distance[order] = np.log2(1.0 + begin - before)
    repeated = np.isfinite(distance)
    weight = np.maximum(size[repeated], 1.0)
    total = np.bincount(operator[repeated], weight * distance[repeated], trace.operator_count)
    reuse = total / np.maximum(1.0, np.bincount(operator[repeated], weight, trace.operator_count))
    return Caches(reuse, np.append(0.0, _log(np.diff(accessed)[:-1])))


def roofline_us(flops: ArrayLike, traffic: ArrayLike, profile: DeviceProfile) -> NDArray[np.float64]:
    """Return the µs of operators by themselves: as `roofline.estimate`, except for placeholder and output."""
    work = np.maximum(np.divide(flops, profile.flops_per_s), np.divide(traffic, profile.bytes_per_s)) * 1e6
    return np.maximum(work + profile.launch_us, SMALLEST_US)


def _log(values: ArrayLike) -> NDArray[np.float64]:
    return np.log2(1.0 + np.asarray(values, np.float64))


@lru_cache(maxsize=1 << 14)
def _describe(target: str, signature: str) -> tuple[str, tuple[float, ...]]:
    arguments = parse(signature)
    row: list[float] = []
    for index in range(TENSORS):
        row += _numbers_of(arguments.operands[index] if index < len(arguments.operands) else None)
    present = [operand for operand in arguments.operands if operand is not None]
    row += [math.log2(1 + len(present)), math.log2(1 + sum(operand.elements for operand in present))]
    scalars = [_signed_log(number) for number in arguments.numbers[:SCALARS]]
    return _kind(target, arguments, present), (*row, *scalars, *[0.0] * (SCALARS - len(scalars)))


def _numbers_of(operand: Operand | None) -> list[float]:
    if operand is None:
        return [0.0] * _PER_TENSOR
    sizes = [math.log2(1 + size) for size in operand.shape[:DIMENSIONS]]
    channels = operand.shape[1] if len(operand.shape) > 1 else operand.elements
    aligned = math.log2(math.gcd(channels, 1 << _MOST_ALIGNED)) if channels else 0.0
    return [
        math.log2(1 + operand.elements),
        float(len(operand.shape)),
        float(("contiguous", "channels_last", "strided").index(operand.layout)),
        aligned,
        *sizes,
        *[0.0] * (DIMENSIONS - len(sizes)),
    ]


def _signed_log(number: float) -> float:
    if math.isnan(number):
        return 0.0
    return math.copysign(math.log2(1 + min(abs(number), 1e18)), number)


def _kind(target: str, arguments: Arguments, present: list[Operand]) -> str:
    parts = [target]
    if present:
        parts += [present[0].dtype, *([] if present[0].layout == "contiguous" else [present[0].layout])]
    if target.startswith("aten.convolution"):
        parts += _convolution(target, present)
    return " ".join([*parts, *arguments.words[:_MOST_WORDS]])


def _convolution(target: str, present: list[Operand]) -> list[str]:
    """Return what selects the library's algorithm: the kernel size, and whether it is grouped or depthwise."""
    index = 1 if "backward" in target else 0  # of the input; its weight follows
    if len(present) < index + 2 or len(present[index].shape) < 3:
        return []
    image, weight = present[index].shape, present[index + 1].shape
    if len(weight) < 3 or weight[1] * 2 <= image[1]:
        return ["depthwise" if len(weight) > 1 and weight[1] == 1 else "grouped"]
    return ["1x1" if max(weight[2:]) == 1 else "kxk"]
