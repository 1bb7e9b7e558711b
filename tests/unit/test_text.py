"""Numbers as text: units, digits, and how much room they take."""

from __future__ import annotations

import pytest

from pg_tensile import text
from tests.unit.snapshots import MB


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(None, "–"), (0, "0 B"), (999, "999 B"), (1000, "0.98 kB"), (98 * MB, "98.0 MB"), (4239 * MB, "4.14 GB")],
)
def test_sizes_have_three_digits(nbytes, shown):
    assert text.short_size(nbytes) == shown


def test_sizes_and_numbers_keep_to_their_cells():
    for power in range(63):
        for number in (2**power - 1, 2**power, 3 * 2**power // 2):
            assert len(text.short_size(number)) <= 7
            assert len(text.short(float(number))) <= (5 if number < 1e15 else 16)
            assert len(text.short_duration(float(number))) <= 6


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *[(None, "–"), (0.0, "0.0s"), (0.083, "0.08s"), (9.94, "9.9s"), (9.96, "10s"), (59.4, "59s"), (59.6, "1:00")],
        *[(3599.0, "59:59"), (3600.0, "1h00m"), (86_399.0, "23h59m"), (86_400.0, "1d00h"), (1e9, ">99d")],
    ],
)
def test_durations(seconds, shown):
    assert text.short_duration(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0.0, "0.0000"), (0.1134, "0.1134"), (12.3456, "12.346"), (1e-5, "1.0e-05"), (123456.0, "1.2e+05")],
)
def test_losses(value, shown):
    assert text.loss(value) == shown


def test_short_numbers_and_shares():
    assert [text.short(value) for value in (0.534, 42.51, 999.4, 999.6, 1204.0, 12.3e6)] == [
        *("0.53", "42.5", "999", "1.00k", "1.20k", "12.3M")
    ]
    assert [text.count(value) for value in (None, 0, 9999, 10_000, 1_000_000)] == ["–", "0", "9999", "10.0k", "1.00M"]
    assert [text.percent(value) for value in (None, 0.0, 0.002, 0.5, 1.0)] == ["–", "0%", "0.2%", "50%", "100%"]


def test_sizes_of_benchmarks_name_the_units_that_their_options_take():
    shown = [text.binary_size(value) for value in (None, 0, 1023, 1536, 5 << 30)]
    assert shown == ["–", "0 B", "1023 B", "1.5 KiB", "5 GiB"]
