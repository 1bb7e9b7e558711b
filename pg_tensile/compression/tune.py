"""Finds out how a device codes fastest, by Bayesian optimisation (cswap.txt, section IV-D and algorithm 1).

On a GPU the parameters are grid, block and chunk; on the host the chunk. What is made small is the time to code and
decode a tensor half of which is zero, chunk by chunk, and once more that of a chunk: so much of it the link cannot
hide (link.copy_us). The default takes part, so that the result is never worse than it, as measured here.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from pg_tensile.compression.calibrate import TensorKind, random_tensor, time_coding
from pg_tensile.compression.codec import CHUNK_BYTES, CHUNK_MULTIPLE, DEFAULT_LAUNCH, Codec, Launch, chunks
from pg_tensile.compression.coder import coder_of
from pg_tensile.errors import CodecError

GRID = 4096  # programs, at most
BLOCKS = (64, 128)  # threads
FIRST, FURTHER = 10, 25  # points: at random, and where the search expects most
_HOST_BYTES, _CUDA_BYTES = 16 << 20, 256 << 20
_REPEATS = 3  # of each point; the fastest counts


class Tuned(NamedTuple):
    """The best launch, µs that it takes, µs of the default, and how many were measured."""

    launch: Launch
    coding_us: float
    default_us: float
    evaluations: int


def tune(
    device: torch.device,
    seconds: float = 60.0,
    first: int = FIRST,
    further: int = FURTHER,
    codec: Codec = Codec.ZVC,
    nbytes: int | None = None,
    seed: int = 0,
) -> Tuned:
    """Searches for `seconds` at most (but for the evaluation begun), `first` + `further` points at most, on a tensor
    of `nbytes`. CodecError: the library for it is not installed; `codec.DEFAULT_LAUNCH` is what to go on with."""
    on_gpu = device.type == "cuda"
    kind = TensorKind(nbytes or (_CUDA_BYTES if on_gpu else _HOST_BYTES), 4, 0.5, 1)
    bits = np.random.default_rng(seed).integers(1, 256, 2 * kind.nbytes, np.uint8)
    raw = torch.from_numpy(random_tensor(kind, bits).view(np.uint8)).to(device)
    return search(lambda launch: _coding_us(device, codec, raw, launch), on_gpu, seconds, first, further, seed)


def search(
    coding_us: Callable[[Launch], float], on_gpu: bool, seconds: float, first: int, further: int, seed: int
) -> Tuned:
    """The launch with the least `coding_us`. On the host grid and block stay what they are."""
    bounds = {"chunk": (0.0, math.log2(CHUNK_BYTES // CHUNK_MULTIPLE))}
    if on_gpu:
        bounds |= {"grid": (0.0, math.log2(GRID)), "block": (0.0, 1.0)}
    engine = _bayesian_search()(None, bounds, random_state=seed, verbose=0, allow_duplicate_points=True)
    random = np.random.default_rng(seed)
    deadline = time.monotonic() + seconds
    measured = {DEFAULT_LAUNCH: coding_us(DEFAULT_LAUNCH)}
    for number in range(first + further):
        if time.monotonic() >= deadline:
            break
        if number < first:
            point = {name: random.uniform(*bound) for name, bound in bounds.items()}
        else:
            point = _suggested(engine)
        launch = _launch_at(point)
        if launch not in measured:
            measured[launch] = coding_us(launch)
        engine.register(point, -math.log(measured[launch]))
    best = min(measured, key=measured.__getitem__)
    return Tuned(best, measured[best], measured[DEFAULT_LAUNCH], len(measured))


def launch_to_json(launch: Launch) -> str:
    """For the database; `launch_from_json` is its inverse."""
    return json.dumps(launch._asdict())


def launch_from_json(text: str) -> Launch:
    """CodecError: the text is no launch that a device can be given."""
    try:
        launch = Launch(**json.loads(text))
        if not all(type(value) is int for value in launch):
            raise ValueError("numbers are expected")
        chunks(0, launch.chunk_bytes)
        if not 1 <= launch.grid <= GRID or launch.block not in BLOCKS:
            raise ValueError(f"grids have 1 to {GRID:,} programs, blocks {' or '.join(map(str, BLOCKS))} threads")
        return launch
    except (ValueError, TypeError, CodecError) as error:
        hint = "Tune the codecs of this device again."
        raise CodecError("the stored launch of codecs cannot be read", hint, str(error)) from error


def _launch_at(point: dict[str, float]) -> Launch:
    """Sizes are powers of two: `point` has their exponents, as the search knows real numbers only."""
    launch = DEFAULT_LAUNCH._replace(chunk_bytes=CHUNK_MULTIPLE << round(point["chunk"]))
    if "grid" in point:
        launch = launch._replace(grid=round(2 ** point["grid"]), block=BLOCKS[round(point["block"])])
    return launch


def _coding_us(device: torch.device, codec: Codec, raw: torch.Tensor, launch: Launch) -> float:
    """The fastest of some; the first on a GPU compiles kernels, and does not count."""
    coder = coder_of(device, launch)
    all_us = []
    for _ in range(_REPEATS + 1):
        (taken,) = time_coding(coder, codec, [raw], [4], launch.chunk_bytes)
        assert taken is not None, "a tensor half of which is zero shrinks"
        all_us.append(sum(taken))
    return min(all_us[1:]) * (1 + launch.chunk_bytes / len(raw))


def _suggested(engine: Any) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a fit that did not converge, as with few points
        return engine.suggest()


def _bayesian_search() -> Callable[..., Any]:
    try:
        from bayes_opt import BayesianOptimization
    except ImportError as error:
        hint = 'Install the package "bayesian-optimization", or go on with the default launch.'
        raise CodecError("how codecs are launched cannot be tuned", hint) from error
    return BayesianOptimization
