"""Binary form of a device's latency models: a header (magic, format version, CRC-32) and the compressed networks.

Numbers are little-endian, weights in half precision. For any bytes, `decode` either returns models that predict finite
numbers or raises MeasurementError, and it never holds more memory than the sizes it has checked allow.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pg_tensile.errors import MeasurementError
from pg_tensile.planning.latency.features import FEATURES
from pg_tensile.planning.latency.mlp import HIDDEN, LAYERS, KindModel, LatencyModels

MAGIC = b"tensileL"
FORMAT = 2  # covers the meaning of the features too: changing it requires a new format
HEADER = struct.Struct("<8sII")  # magic, format, CRC-32 of the bytes that follow
RATES = struct.Struct("<3dHI")  # FLOP/s, bytes/s, µs of a launch; numbers of features and kinds
KIND = struct.Struct("<HH")  # bytes of its name, columns
MAX_PAYLOAD = 1 << 26
RATE_LIMITS = (1e3, 1e21)  # per second, so that no latency overflows
MAX_LAUNCH_US = 1e6


def encode(models: LatencyModels) -> bytes:
    """Return the bytes that `decode` reads."""
    parts = [RATES.pack(models.flops_per_s, models.bytes_per_s, models.launch_us, FEATURES, len(models.kinds))]
    for kind, model in sorted(models.kinds.items()):
        name = kind.encode()
        parts += [KIND.pack(len(name), len(model.columns)), name]
        parts += [model.columns.astype("<u2").tobytes()]
        parts += [array.astype("<f4").tobytes() for array in (model.low, model.high, model.mean, model.deviation)]
        parts += [array.astype("<f2").tobytes() for array in (*model.weights, *model.biases)]
    body = zlib.compress(b"".join(parts))
    return HEADER.pack(MAGIC, FORMAT, zlib.crc32(body)) + body


def decode(data: bytes) -> LatencyModels:
    """Return the models that `encode` wrote. Raises MeasurementError for any other bytes."""
    reader = _Reader(_payload(data))
    flops_per_s, bytes_per_s, launch_us, features, kinds = reader.unpack(RATES)
    rates = (flops_per_s, bytes_per_s, launch_us)
    if not (all(RATE_LIMITS[0] <= rate <= RATE_LIMITS[1] for rate in rates[:2]) and 0 <= launch_us <= MAX_LAUNCH_US):
        raise _damaged("its rates are not a device's")
    if features != FEATURES:
        raise _damaged("it has another number of features")
    models = dict(_kind(reader) for _ in range(kinds))
    if len(models) != kinds or reader.position != len(reader.payload):
        raise _damaged("it does not end where its networks do")
    return LatencyModels(*rates, models)


def _damaged(reason: str) -> MeasurementError:
    return MeasurementError(f"latency models are damaged: {reason}", hint="Calibrate the device again.")


def _payload(data: bytes) -> bytes:
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise MeasurementError("these bytes are not latency models", detail=f"{len(data)} bytes")
    _, version, checksum = HEADER.unpack_from(data)
    if version != FORMAT:
        hint = "Calibrate the device again."
        raise MeasurementError(f"latency models of format {version} cannot be read", hint=hint)
    body = memoryview(data)[HEADER.size :]
    if zlib.crc32(body) != checksum:
        raise _damaged("their checksum is wrong")
    stream = zlib.decompressobj()
    try:
        payload = stream.decompress(body, MAX_PAYLOAD)
    except zlib.error:
        raise _damaged("they cannot be decompressed") from None
    if not stream.eof or stream.unused_data:
        raise _damaged("they have another size than they say")
    return payload


class _Reader:
    """Reader of a payload that checks every size against the remaining bytes before it allocates anything."""

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.position = 0

    def take(self, size: int) -> bytes:
        if size > len(self.payload) - self.position:
            raise _damaged("they are longer than their bytes")
        self.position += size
        return self.payload[self.position - size : self.position]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def floats(self, *shape: int, element: str = "<f4") -> NDArray[np.float32]:
        count = math.prod(shape) * np.dtype(element).itemsize
        array = np.frombuffer(self.take(count), element).astype(np.float32).reshape(shape)
        if not np.isfinite(array).all():
            raise _damaged("a number in them is not finite")
        return array


def _kind(reader: _Reader) -> tuple[str, KindModel]:
    size, count = reader.unpack(KIND)
    try:
        name = reader.take(size).decode()
    except UnicodeDecodeError:
        raise _damaged("a kind has no name") from None
    columns = np.frombuffer(reader.take(2 * count), "<u2").astype(np.uint16)
    low, high = reader.floats(FEATURES), reader.floats(FEATURES)
    mean, deviation = reader.floats(count), reader.floats(count)
    sizes = [count, *[HIDDEN] * (LAYERS - 1), 1]
    weights = [reader.floats(sizes[layer], sizes[layer + 1], element="<f2") for layer in range(LAYERS)]
    biases = [reader.floats(sizes[layer + 1], element="<f2") for layer in range(LAYERS)]
    rising = (np.diff(columns.astype(np.int64)) > 0).all() and (count == 0 or columns[-1] < FEATURES)
    if not (rising and (low <= high).all() and (deviation > 0).all()):
        raise _damaged(f'the network of "{name}" contradicts itself')
    return name, KindModel(low, high, columns, mean, deviation, tuple(weights), tuple(biases))
