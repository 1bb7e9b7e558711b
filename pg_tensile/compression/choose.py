"""Which tensors a job's swaps compress, and with which codec: the decision as it is shown (cswap.txt, section IV-B).

T' is what swapping a tensor costs an iteration as it is: of each copy the part that is not hidden; T what it costs with
a codec. A codec is used where T < T'.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from pg_tensile.compression.codec import Codec
from pg_tensile.compression.coding import Coding
from pg_tensile.compression.statistics import Statistics, coded_bytes
from pg_tensile.compression.times import CodecTimes
from pg_tensile.link import copy_us
from pg_tensile.profile import DeviceProfile, Direction
from pg_tensile.simulator import Timeline
from pg_tensile.trace import Trace

PAUSE_US = 1.0  # a copy that starts so soon after another one has waited for it


class TensorCoding(NamedTuple):
    """What was decided about one tensor: the best codec for it, bytes that it would move each way with that, µs of an
    iteration that its swaps cost with it (T) and without (T'), and whether it is used."""

    tensor: int
    codec: str
    coded_bytes: int
    coded_us: float
    plain_us: float
    compressed: bool


class _Copy(NamedTuple):
    direction: Direction
    us: float
    exposed_us: float  # of these, not hidden


class _Option(NamedTuple):
    """A codec for a tensor."""

    coded_us: float
    moved_bytes: int
    codec: Codec
    encode_us: float
    decode_us: float


def choose(
    trace: Trace,
    timeline: Timeline,
    statistics: Mapping[int, Statistics],
    times: CodecTimes,
    profile: DeviceProfile,
    compression: str = "auto",
) -> tuple[Coding, list[TensorCoding]]:
    """The coding of a trace, and the decision about each tensor that has statistics. `timeline`: of a plan without
    codecs; nothing counts as hidden of a tensor that it does not swap. `compression`: auto, or the one codec to use."""
    codecs = [codec for codec in times.codecs if compression in ("auto", codec.name.lower())]
    copies = _copies(timeline)
    coding, listed = Coding.none(trace), []
    for tensor, counted in sorted(statistics.items()):
        nbytes = int(trace.tensor_bytes[tensor])
        whole = [(direction, profile.transfer_us(nbytes, direction)) for direction in Direction]
        swaps = copies.get(tensor, [_Copy(direction, us, us) for direction, us in whole])
        options = [_option(trace, tensor, codec, counted, times, profile, swaps) for codec in codecs]
        if not options:
            continue
        best, plain_us = min(options), sum(copy.exposed_us for copy in swaps)
        pays = best.coded_us < plain_us
        if pays:
            _set(coding, tensor, best)
        listed.append(TensorCoding(tensor, best.codec.name.lower(), best.moved_bytes, best.coded_us, plain_us, pays))
    return coding, listed


def _set(coding: Coding, tensor: int, option: _Option) -> None:
    _, moved, codec, encode_us, decode_us = option
    coding.codec[tensor], coding.moved_bytes[tensor] = codec, moved
    coding.encode_us[tensor], coding.decode_us[tensor] = encode_us, decode_us


def _option(
    trace: Trace,
    tensor: int,
    codec: Codec,
    counted: Statistics,
    times: CodecTimes,
    profile: DeviceProfile,
    swaps: list[_Copy],
) -> _Option:
    nbytes, width = int(trace.tensor_bytes[tensor]), word_bytes(trace.tensor_dtype[tensor])
    arguments = (codec, nbytes, counted.zero_share, counted.run_share, width)
    moved = coded_bytes(codec, nbytes, width, counted)
    option = _Option(math.inf, moved, codec, times.encode_us(*arguments), times.decode_us(*arguments))
    coding = Coding.none(trace)
    _set(coding, tensor, option)
    coded = trace.with_coding(coding)
    coded_us = 0.0
    for direction, us, exposed_us in swaps:
        hidden_us = us - exposed_us
        coded_us += max(0.0, copy_us(coded, tensor, codec, direction, profile) - hidden_us)
    return option._replace(coded_us=coded_us)


def _copies(timeline: Timeline) -> Mapping[int, list[_Copy]]:
    """Of each tensor: a copy is exposed as far as the compute waits for it, or for one that follows it on its lane
    without a pause."""
    transfers, waited_us = timeline.transfers, _waited_us(timeline)
    found: defaultdict[int, list[_Copy]] = defaultdict(list)
    for direction in Direction:
        lane = [place for place, each in enumerate(transfers) if each.direction == direction]
        behind_us, next_start_us = 0.0, math.inf
        for place in sorted(lane, key=lambda place: -transfers[place].start_us):
            tensor, _, _, start_us, end_us, *_ = transfers[place]
            queued_us = behind_us if next_start_us - end_us < PAUSE_US else 0.0
            behind_us, next_start_us = max(waited_us[place], queued_us), start_us
            found[tensor].append(_Copy(direction, end_us - start_us, min(end_us - start_us, behind_us)))
    return found


def _waited_us(timeline: Timeline) -> list[float]:
    """Of each transfer: for how long the compute waits for it. A wait ends when its transfer does."""
    places: defaultdict[int, list[int]] = defaultdict(list)
    for place, transfer in enumerate(timeline.transfers):
        places[transfer.tensor].append(place)
    waited_us = [0.0] * len(timeline.transfers)
    for stall in timeline.stalls:
        about_us = float(timeline.step_start_us[stall.step])
        nearest = min(places[stall.tensor], key=lambda place: abs(timeline.transfers[place].end_us - about_us))
        waited_us[nearest] += stall.us
    return waited_us


def word_bytes(dtype: str) -> int:
    """Of a word of a tensor's values: 4 where the type is not known."""
    bits = re.search(r"\d+$", dtype)
    return 1 if dtype == "bool" else int(bits[0]) // 8 if bits else 4
