"""The search for launches: it ends in time, never returns worse than the default, and what is stored is checked."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from pg_tensile.compression.codec import CHUNK_BYTES, DEFAULT_LAUNCH, Codec, Launch, chunks
from pg_tensile.compression.tune import Tuned, launch_from_json, launch_to_json, search, tune
from pg_tensile.errors import CodecError

HOST = torch.device("cpu")
SIZE = 2 * CHUNK_BYTES


def test_a_chunk_is_found_for_the_host():
    tuned = tune(HOST, seconds=20, first=2, further=3, nbytes=SIZE)
    assert 0 < tuned.coding_us <= tuned.default_us
    assert 2 <= tuned.evaluations <= 6
    assert list(chunks(SIZE, tuned.launch.chunk_bytes))
    assert tuned.launch._replace(chunk_bytes=CHUNK_BYTES) == DEFAULT_LAUNCH
    assert launch_from_json(launch_to_json(tuned.launch)) == tuned.launch


def test_the_search_finds_the_lowest_point():
    """A valley in the space of a GPU that ten points at random miss."""

    def coding_us(launch: Launch) -> float:
        return 50.0 + abs(launch.grid - 200) + launch.block / 64 + launch.chunk_bytes / CHUNK_BYTES

    def found(further: int) -> Tuned:
        return search(coding_us, on_gpu=True, seconds=60, first=10, further=further, seed=1)

    tuned = found(25)
    assert tuned == found(25)
    assert abs(tuned.launch.grid - 200) < 20 < abs(found(0).launch.grid - 200)
    assert tuned.coding_us < tuned.default_us
    assert tuned.evaluations <= 36


def test_without_time_the_default_is_kept():
    start = time.monotonic()
    tuned = tune(HOST, seconds=0.0, nbytes=SIZE)
    assert tuned.launch == DEFAULT_LAUNCH
    assert tuned.evaluations == 1
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("launch", [Launch(), Launch(1 << 19, 1, 64), Launch(3 << 19, 4096, 128)])
def test_launches_are_stored(launch):
    assert launch_from_json(launch_to_json(launch)) == launch


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "3", '{"chunk": 4}', '{"chunk_bytes": "4"}', '{"chunk_bytes": 1000}', '{"grid": 0}'),
        *('{"grid": 5000}', '{"block": 96}', '{"block": 128.0}', '{"grid": true}', '{"chunk_bytes": 8388608}'),
    ],
)
def test_what_is_no_launch_is_refused(text):
    with pytest.raises(CodecError, match="cannot be read"):
        launch_from_json(text)


def test_the_library_may_be_missing():
    program = """
import sys
sys.modules["bayes_opt"] = None
import torch
from pg_tensile.compression.tune import tune
from pg_tensile.errors import CodecError
try:
    tune(torch.device("cpu"))
except CodecError as error:
    print(error.message, "|", error.hint)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    hint = 'Install the package "bayesian-optimization", or go on with the default launch.'
    assert (done.stdout, done.stderr) == (f"how codecs are launched cannot be tuned | {hint}\n", "")


def test_other_codecs_can_be_tuned():
    tuned = tune(HOST, seconds=20, first=1, further=0, codec=Codec.CSR, nbytes=SIZE)
    assert tuned.default_us > 0
