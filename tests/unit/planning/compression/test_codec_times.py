"""The time model of codecs: what is linear is found exactly, what is stored is checked, what is measured is fitted."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from pg_tensile.errors import CodecError
from pg_tensile.execution.codecs.device import HostCoder
from pg_tensile.execution.measuring import codecs as calibrate
from pg_tensile.planning.compression.codec import Codec, available
from pg_tensile.planning.compression.codec_times import (
    CodecTimes,
    Sample,
    fit,
    relative_absolute_error,
    relative_absolute_errors,
)

SHARES = [0.05, 0.1, 0.2, 0.29, 0.35, 0.4, 0.5, 0.55, 0.65, 0.7, 0.8, 0.85, 0.92, 0.95, 0.97, 0.99]


def law(nbytes: int, width: int, zero: float, run: float, slow: float) -> float:
    """Another line below and above a sparsity of 0.6."""
    factor = slow * (1.0 if zero < 0.6 else 0.5)
    return factor * (40 + nbytes * (3e-4 - 1e-4 * zero) + nbytes / width * run * 2e-3)


def samples(codecs=(Codec.ZVC, Codec.RLE), widths=(4,), noise: float = 0.0, seed: int = 0) -> list[Sample]:
    random = np.random.default_rng(seed)
    made = []
    for codec, width, nbytes, zero, run in product(codecs, widths, (1 << 19, 1 << 21, 5 << 20), SHARES, (1.0, 0.1)):
        runs = zero * (1 - zero) * run
        us = [law(nbytes, width, zero, runs, slow * codec) * random.normal(1, noise) for slow in (1, 2)]
        made.append(Sample(codec, nbytes, width, zero, runs, *us))
    return made


def test_lines_are_found_exactly():
    times = fit(samples())
    assert times.codecs == (Codec.ZVC, Codec.RLE)
    assert relative_absolute_error(times, samples()) < 1e-9
    for codec, zero, nbytes in product(times.codecs, (0.25, 0.58, 0.62, 0.96), (3 << 18, 100 << 20)):
        runs = zero * (1 - zero)
        assert times.encode_us(codec, nbytes, zero) == pytest.approx(law(nbytes, 4, zero, runs, codec))
        assert times.encode_us(codec, nbytes, zero, 0.01) == pytest.approx(law(nbytes, 4, zero, 0.01, codec))
        assert times.decode_us(codec, nbytes, zero) == pytest.approx(law(nbytes, 4, zero, runs, 2 * codec))


def test_words_that_were_not_measured_take_as_long_as_as_many_others():
    times = fit(samples(widths=(4, 8)))
    for width, same_bytes, measured in ((2, 2 << 20, 4), (1, 4 << 20, 4), (16, 1 << 20, 8)):
        expected = times.encode_us(Codec.ZVC, same_bytes, 0.5, word_bytes=measured)
        assert times.encode_us(Codec.ZVC, 1 << 20, 0.5, word_bytes=width) == pytest.approx(expected)


def test_no_codec_takes_no_time_and_no_time_is_negative():
    times = fit(samples())
    assert times.encode_us(Codec.NONE, 1 << 30, 0.5) == times.decode_us(Codec.NONE, 1 << 30, 0.5) == 0.0
    assert times.encode_us(Codec.ZVC, 0, 1.0, 5.0) >= 0.0
    with pytest.raises(CodecError, match="how long LZ4 takes was not measured"):
        times.decode_us(Codec.LZ4, 1000, 0.5)


def test_errors_are_the_papers():
    """Σ |predicted − measured| / Σ |mean − measured|, by hand: measured 1 and 3 against what is 2 for both."""
    flat = fit([Sample(Codec.ZVC, nbytes, 4, 0.5, 0.1, 2.0, 2.0) for nbytes in range(1, 7)])
    measured = [Sample(Codec.ZVC, 10, 4, 0.5, 0.1, us, us) for us in (1.0, 3.0)]
    assert relative_absolute_error(flat, measured) == pytest.approx(1.0)
    errors = relative_absolute_errors(flat, [sample._replace(decode_us=sample.encode_us + 8) for sample in measured])
    assert errors == {(Codec.ZVC, "encode"): pytest.approx(1.0), (Codec.ZVC, "decode"): pytest.approx(8.0)}
    with pytest.raises(CodecError, match="without measurements"):
        relative_absolute_error(flat, [])


def test_noise_is_averaged_out():
    times = fit(samples(noise=0.05))
    assert relative_absolute_error(times, samples()) < 0.04 < relative_absolute_error(times, samples(noise=0.2, seed=1))


def test_too_few_measurements_are_refused():
    with pytest.raises(CodecError, match="5 measurements of ZVC are too few"):
        fit(samples()[:5])


def test_a_range_without_measurements_takes_all():
    dense = [sample for sample in samples() if sample.zero_share < 0.6]
    assert relative_absolute_error(fit(dense), dense) < 1e-9
    assert fit(dense).encode_us(Codec.ZVC, 1 << 20, 0.95) == pytest.approx(law(1 << 20, 4, 0.95, 0.0475, Codec.ZVC) * 2)


def test_what_is_stored_comes_back():
    times = fit(samples(widths=(2, 4)))
    assert CodecTimes.from_json(times.to_json()) == times


def damaged(**changes) -> str:
    return json.dumps(json.loads(fit(samples()).to_json()) | changes)


def damaged_model(**changes) -> str:
    stored = json.loads(fit(samples()).to_json())
    stored["models"][0] |= changes
    return json.dumps(stored)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "{}", "null", damaged(version=0), damaged(models=None), damaged(models=[1])),
        *(damaged_model(codec="zip"), damaged_model(codec=1), damaged_model(word_bytes=3), damaged_model(encode=[])),
        *(damaged_model(decode=[[1.0] * 6] * 3 + [["1"] * 6]), damaged_model(decode=[[1.0] * 6] * 3 + [[1.0] * 5])),
        damaged_model(encode=[[float("nan")] * 6] * 4),
        *(damaged(waking_us=-1.0), damaged(waking_us="1"), damaged(waking_us=float("inf")), damaged(waking_us=True)),
    ],
)
def test_what_was_not_stored_is_refused(text):
    with pytest.raises(CodecError, match="cannot be read") as error:
        CodecTimes.from_json(text)
    assert error.value.hint is not None


# ---- measured --------------------------------------------------------------------------------------------------------


def test_random_tensors_are_what_they_are_said_to_be():
    bits = np.random.default_rng(0).integers(1, 256, 1 << 20, np.uint8)
    for zero_share, run_words in product((0.05, 0.5, 0.97), (1, 6)):
        kind = calibrate.TensorKind(1 << 19, 4, zero_share, run_words)
        words = calibrate.random_tensor(kind, bits)
        assert words.nbytes == 1 << 19
        assert np.mean(words == 0) == pytest.approx(zero_share, abs=0.01)
        assert np.array_equal(words, calibrate.random_tensor(kind, bits))


def test_times_of_this_device():
    """Sizes far apart: so much holds on a machine that has other things to do."""
    sizes, device = (1 << 16, 1 << 20), torch.device("cpu")
    measured = calibrate.measure_samples(HostCoder(), device, 0.0, 1 << 22, sizes, (4,), seed=1)
    times = fit(measured)
    assert times.codecs == tuple(codec for codec in Codec if codec != Codec.NONE and available(codec))
    assert relative_absolute_error(times, measured) < 0.5
    small, large = (times.encode_us(Codec.ZVC, nbytes, 0.5) for nbytes in (1 << 18, 1 << 22))
    assert small < large
    assert times.encode_us(Codec.ZVC, 1 << 22, 0.5) < 1e6


def test_calibration_holds_samples_out():
    times, error = calibrate.calibrate(torch.device("cpu"), 0.0, sizes=(1 << 16, 1 << 18), word_bytes=(4,))
    assert CodecTimes.from_json(times.to_json()) == times
    assert 0 < error < 5


def test_calibration_takes_no_random_number_from_the_job_that_trains_next():
    before = torch.get_rng_state()
    calibrate.calibrate(torch.device("cpu"), 0.0, sizes=(1 << 16,), word_bytes=(4,))
    assert torch.equal(torch.get_rng_state(), before)


def test_times_that_were_stored_before_lanes_were_measured_are_read():
    stored = json.loads(replace(fit(samples()), waking_us=200.0).to_json())
    assert CodecTimes.from_json(json.dumps(stored)).waking_us == 200.0
    del stored["waking_us"]
    assert CodecTimes.from_json(json.dumps(stored)).waking_us == 0.0


def test_what_a_lane_needs_besides_what_is_known_is_measured():
    """Codecs that are said to take 10 ms leave nothing; those that take no time, all that coding takes."""
    slow, quick = (fit(sample._replace(encode_us=us, decode_us=us) for sample in samples()) for us in (1e4, 0.0))
    assert calibrate.measure_waking_us(slow, 1 << 19) == 0.0
    assert 20 < calibrate.measure_waking_us(quick, 1 << 19) < 1e5


@pytest.mark.parametrize(("busy", "computing"), [(True, 1), (False, 0)])
def test_codecs_may_be_measured_beside_a_process_that_computes(monkeypatch, busy, computing):
    seen = []
    measure_samples = calibrate.measure_samples

    def counting(*arguments):
        commands = [Path(f"/proc/{number}/cmdline").read_text() for number in children()]
        seen.append(sum("keep_busy" in command for command in commands))
        return measure_samples(*arguments)

    def children():
        return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()

    monkeypatch.setattr(calibrate, "measure_samples", counting)
    calibrate.calibrate(torch.device("cpu"), 0.0, sizes=(1 << 16,), word_bytes=(4,), busy=busy)
    assert seen == [computing]
