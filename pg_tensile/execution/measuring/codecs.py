"""Measurement of coding times on a device: random tensors of many sizes and sparsities (CSWAP, section IV-C)."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np
import torch

from pg_tensile.execution.backends import backend_of
from pg_tensile.execution.codecs.device import Coder, HostCoder
from pg_tensile.execution.measuring.busy_processes import BusyProcesses
from pg_tensile.execution.runtime.compressed_copies import Chunks
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.compression.codec import CHUNK_BYTES, Codec, CodedChunk, chunks
from pg_tensile.planning.compression.codec_times import CodecTimes, Sample, fit, relative_absolute_error
from pg_tensile.planning.compression.sparsity import Statistics, measure
from pg_tensile.planning.device.profile import RTX_A6000

SIZES = (1 << 19, 1 << 21, 3 << 21)  # bytes; the largest takes two chunks
WORD_BYTES = (1, 2, 4, 8)
ZERO_SHARES = (0.05, 0.12, 0.2, 0.28, 0.37, 0.45, 0.53, 0.62, 0.7, 0.78, 0.86, 0.92, 0.95, 0.98)
RUN_WORDS = (1, 6, 64)  # zeros at random positions, and in runs
HELD_OUT = 4  # every fourth sample
_VISITS = 3  # least number of visits to each tensor
_BATCH_BYTES = 48 << 20
_WAKING_PARTS = (32, 4, 1)  # of a chunk
_WAKING_WIDTH = 4
_WAKING_COPIES = 40
_WAKING_RATE = 5e8  # bytes/s: a link on which half a chunk takes 0.5 ms
_WAKING_DELAY_US = 3000  # between transfers, so that each has the lane to itself


class TensorKind(NamedTuple):
    """Tensor of random bits with a share of zero words, in runs of `run_words` at random positions."""

    nbytes: int
    word_bytes: int
    zero_share: float
    run_words: int


def calibrate(
    device: torch.device,
    seconds: float = 20.0,
    chunk_bytes: int = CHUNK_BYTES,
    sizes: Sequence[int] = SIZES,
    word_bytes: Sequence[int] = WORD_BYTES,
    seed: int = 0,
    busy: bool = False,
) -> tuple[CodecTimes, float]:
    """Return the time model of all codecs available on the device, and its relative absolute error on held-out samples.

    Measures for about `seconds`, but each tensor at least three times. `busy` means to measure while another process
    computes on the host, because coding shares caches and memory with the training step. Raises CodecError if there are
    too few samples to fit, and MeasurementError if that process does not start.
    """
    coder = HostCoder() if device.type == "cpu" else backend_of(device.type).coder(device)
    with computing_beside(device) if busy else nullcontext():
        samples = measure_samples(coder, device, seconds, chunk_bytes, sizes, word_bytes, seed)
    fitted, held_out = hold_out(samples, seed)
    times, error = fit(samples), relative_absolute_error(fit(fitted), held_out)
    return times if device.type != "cpu" else replace(times, waking_us=measure_waking_us(times, chunk_bytes)), error


def computing_beside(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which another process computes, if the device is the host.

    Raises MeasurementError if the process does not start.
    """
    return BusyProcesses(1, "cpu", torch.get_num_threads()) if device.type == "cpu" else nullcontext()


def hold_out(samples: Sequence[Sample], seed: int = 0) -> tuple[list[Sample], list[Sample]]:
    """Split the samples at random into three quarters to fit and one quarter to validate the fit."""
    order = random.Random(seed).sample(samples, len(samples))
    return [sample for number, sample in enumerate(order) if number % HELD_OUT], order[::HELD_OUT]


def measure_samples(
    coder: Coder,
    device: torch.device,
    seconds: float,
    chunk_bytes: int,
    sizes: Sequence[int],
    word_bytes: Sequence[int],
    seed: int,
) -> list[Sample]:
    """Return one sample for each tensor and codec that shrinks all its chunks; equal seeds give equal tensors.

    The shortest of its times counts, because disturbances only ever lengthen it.
    """
    coder.warm_up()
    codecs = [codec for codec in Codec if codec != Codec.NONE and coder.available(codec)]
    kinds = [TensorKind(*kind) for kind in product(sizes, word_bytes, ZERO_SHARES, RUN_WORDS)]
    order = random.Random(seed)
    bits = np.random.default_rng(seed).integers(1, 256, 2 * max(sizes), np.uint8)
    visits: dict[tuple[Codec, TensorKind], list[tuple[float, float]]] = {}
    statistics: dict[TensorKind, Statistics] = {}
    deadline = time.monotonic() + seconds
    rounds = 0
    while rounds < _VISITS or time.monotonic() < deadline:
        for batch in _batches(order.sample(kinds, len(kinds))):
            if rounds >= _VISITS and time.monotonic() >= deadline:
                break
            tensors = []
            for kind in batch:
                words = random_tensor(kind, bits)
                if kind not in statistics:
                    statistics[kind] = measure(words)
                tensors.append(torch.from_numpy(words.view(np.uint8)).to(device))
            for codec in codecs:
                widths = [kind.word_bytes for kind in batch]
                for kind, times in zip(batch, time_coding(coder, codec, tensors, widths, chunk_bytes), strict=True):
                    if times is not None:
                        visits.setdefault((codec, kind), []).append(times)
        rounds += 1
    return [
        Sample(codec, *kind[:2], *statistics[kind][:2], *map(float, np.min(times, axis=0)))
        for (codec, kind), times in visits.items()
    ]


def _batches(kinds: Sequence[TensorKind]) -> list[list[TensorKind]]:
    """Group tensors into batches that fill the caches, so that each is cold when its turn comes, as in training."""
    batches: list[list[TensorKind]] = [[]]
    for kind in kinds:
        if sum(member.nbytes for member in batches[-1]) >= _BATCH_BYTES:
            batches.append([])
        batches[-1].append(kind)
    return batches


def random_tensor(kind: TensorKind, bits: np.ndarray) -> np.ndarray:
    """Return a tensor of that kind, made of `bits`.

    `bits` has at least twice as many bytes, none of them zero.
    """
    count = kind.nbytes // kind.word_bytes
    runs = -(-count // kind.run_words)
    random_numbers = np.random.default_rng([*kind[:2], int(1000 * kind.zero_share), kind.run_words]).integers(
        0, 1 << 16, runs, np.uint16
    )
    used = np.repeat(random_numbers >= kind.zero_share * (1 << 16), kind.run_words)[:count]
    start = int(random_numbers[0]) % max(kind.nbytes, 1) // kind.word_bytes * kind.word_bytes
    return bits[start : start + count * kind.word_bytes].view(f"u{kind.word_bytes}") * used


def measure_waking_us(times: CodecTimes, chunk_bytes: int) -> float:
    """Return the µs that a coded transfer on a lane of the host device takes beyond its link and `times`.

    This thread computes meanwhile. The result is the median, which is the value to expect, over tensors of at most one
    chunk that are copied out and back in.
    """
    bits = np.random.default_rng(0).integers(1, 256, 2 * chunk_bytes, np.uint8)
    kinds = [TensorKind(chunk_bytes // part, _WAKING_WIDTH, 0.5, 1) for part in _WAKING_PARTS] * _WAKING_COPIES
    tensors = [torch.from_numpy(random_tensor(kind, bits).view(np.uint8)) for kind in kinds]
    codings = [Chunks(Codec.ZVC, kind.word_bytes, chunk_bytes) for kind in kinds]
    images, weights = torch.ones(1, 64, 112, 112), torch.ones(64, 64, 3, 3)  # draws none of a job's random numbers
    device = HostDevice(RTX_A6000.with_link(_WAKING_RATE, _WAKING_RATE, 1.0))
    try:
        copies = [device.host_memory(kind.nbytes) for kind in kinds]
        more_us = []
        for copy, coding_us, pairs in (
            (device.copy_out, times.encode_us, zip(tensors, copies, strict=True)),
            (device.copy_in, times.decode_us, zip(copies, tensors, strict=True)),
        ):
            transfers = [
                copy(source, target, number * _WAKING_DELAY_US, chunks)
                for number, ((source, target), chunks) in enumerate(zip(pairs, codings, strict=True))
            ]
            while not transfers[-1].ended:
                torch.nn.functional.conv2d(images, weights, padding=1)
            for kind, transfer in zip(kinds, transfers, strict=True):
                link_us = device.profile.transfer_us(transfer.bytes, transfer.direction)
                known_us = link_us + coding_us(Codec.ZVC, kind.nbytes, kind.zero_share, word_bytes=kind.word_bytes)
                more_us.append(transfer.end_us - transfer.start_us - known_us)
    finally:
        device.close()
    return max(0.0, float(np.median(more_us)))


def time_coding(
    coder: Coder, codec: Codec, tensors: Sequence[torch.Tensor], word_bytes: Sequence[int], chunk_bytes: int
) -> list[tuple[float, float] | None]:
    """Return the µs to code each tensor chunk by chunk and to decode it, or None if one of its chunks does not shrink.

    All tensors are coded before the first is decoded.
    """
    targets = [torch.empty_like(raw) for raw in tensors]
    results: list[tuple[float, list[CodedChunk]]] = []
    for raw, encoded, width in zip(tensors, targets, word_bytes, strict=True):
        start = coder.clock()
        coded = [coder.encode(codec, raw[part], width, encoded[part]) for part in chunks(len(raw), chunk_bytes)]
        results.append(((coder.clock() - start) * 1e6, coded))
    times: list[tuple[float, float] | None] = []
    for raw, encoded, width, (encode_us, coded) in zip(tensors, targets, word_bytes, results, strict=True):
        if any(chunk.codec == Codec.NONE for chunk in coded):
            times.append(None)
            continue
        start = coder.clock()
        for part, chunk in zip(chunks(len(raw), chunk_bytes), coded, strict=True):
            coder.decode(chunk, encoded[part][: chunk.coded_bytes], width, raw[part])
        times.append((encode_us, (coder.clock() - start) * 1e6))
    return times
