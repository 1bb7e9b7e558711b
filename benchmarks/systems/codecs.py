"""The codecs of compressed swaps (CSWAP, sections IV-C and V-C): ratios, speeds, and errors of predicted times.

A row is a plain dictionary; its `section` is one of:

- codec: one codec on a float32 tensor, a share of whose words is zero, alone or in runs: raw over coded bytes, as
  estimated from a sample and as measured, and gigabytes of raw data per second each way (medians; 0: it does not
  shrink);
- model: relative absolute errors of the times that the model predicts for tensors it was not fitted to, by codec and
  direction, as the paper defines them (its own: 3 % on average).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
import torch

from benchmarks.checks import Check
from benchmarks.command import Row
from pg_tensile.execution.codecs.device import Coder, coder_of
from pg_tensile.execution.measuring.codecs import (
    SIZES,
    WORD_BYTES,
    TensorKind,
    computing_beside,
    hold_out,
    measure_samples,
    random_tensor,
    time_coding,
)
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.compression.codec import CHUNK_BYTES, Codec, chunks
from pg_tensile.planning.compression.codec_times import fit, relative_absolute_error, relative_absolute_errors
from pg_tensile.planning.compression.sparsity import coded_bytes, measure
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.tools.bench.run import default_threads

ZERO_SHARES = (0.2, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
RUN_WORDS = (1, 64)
SAMPLE_WORDS = 1 << 18
ERROR = 0.05  # of the model
SECTION = "CSWAP: codecs"


def run(quick: bool = False) -> list[Row]:
    """Measure all sections on the host device, and on the GPU if there is one."""
    devices = [torch.device("cpu")] + [torch.device("cuda", 0)] * torch.cuda.is_available()
    torch.set_num_threads(default_threads("host"))  # as jobs have
    HostDevice(RTX_A6000).close()  # makes this process keep freed memory, as every process with a host device does
    rows: list[Row] = []
    for device in devices:
        coder = coder_of(device)
        rows += [{"device": device.type, **row} for row in codec_rows(coder, device, quick)]
        rows += [{"device": device.type, **row} for row in model_rows(coder, device, quick)]
    return rows


def codec_rows(coder: Coder, device: torch.device, quick: bool) -> Iterator[Row]:
    nbytes, rounds = (2 << 20, 1) if quick else (32 << 20, 7)
    bits = np.random.default_rng(0).integers(1, 256, 2 * nbytes, np.uint8)
    codecs = [codec for codec in Codec if codec != Codec.NONE and coder.available(codec)]
    for zero_share, run_words in product((0.5, 0.9) if quick else ZERO_SHARES, RUN_WORDS):
        words = random_tensor(TensorKind(nbytes, 4, zero_share, run_words), bits)
        sampled = measure(words, SAMPLE_WORDS)
        raw = torch.from_numpy(words.view(np.uint8)).to(device)
        for codec in codecs:
            times = [time_coding(coder, codec, [raw], [4], CHUNK_BYTES)[0] for _ in range(rounds)]
            timed = [pair for pair in times if pair is not None]
            speeds = [nbytes / statistics.median(us) / 1e3 for us in zip(*timed, strict=True)] or [0.0, 0.0]
            yield {
                "section": "codec",
                "codec": codec.name.lower(),
                "zero_share": zero_share,
                "run_words": run_words,
                "ratio": nbytes / coded_size(coder, codec, raw),
                "estimated_ratio": nbytes / coded_bytes(codec, nbytes, 4, sampled),
                "encode_gb_per_s": speeds[0],
                "decode_gb_per_s": speeds[1],
            }


def coded_size(coder: Coder, codec: Codec, raw: torch.Tensor) -> int:
    """Return the bytes that move; a chunk that does not shrink moves as it is."""
    return sum(coder.encode(codec, raw[part], 4, torch.empty_like(raw[part])).coded_bytes for part in chunks(len(raw)))


def model_rows(coder: Coder, device: torch.device, quick: bool) -> Iterator[Row]:
    seconds, sizes, word_bytes = (0.0, SIZES[:2], (4,)) if quick else (90.0, SIZES, WORD_BYTES)
    with computing_beside(device):  # as tensile.calibrate() does
        samples = measure_samples(coder, device, seconds, CHUNK_BYTES, sizes, word_bytes, seed=0)
    fitted, held_out = hold_out(samples)
    times = fit(fitted)
    for (codec, way), error in relative_absolute_errors(times, held_out).items():
        yield {"section": "model", "codec": codec.name.lower(), "direction": way, "error": error}
    mean = relative_absolute_error(times, held_out)
    yield {"section": "model", "codec": "all", "direction": "both", "error": mean, "samples": len(samples)}


def checks(rows: Sequence[Row]) -> list[Check]:
    checked = []
    for row in rows:
        if row["section"] == "model" and row["codec"] == "all":
            what, asked = f"{row['device']}: relative absolute error of predicted times", f"at most {ERROR:.0%}"
            checked.append(Check(SECTION, what, f"{row['error']:.1%}", asked, row["error"] <= ERROR))
    return checked
