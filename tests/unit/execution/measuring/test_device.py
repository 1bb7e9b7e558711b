"""Device profiles, named and measured."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from pg_tensile.errors import DeviceError
from pg_tensile.execution.device_choice import choose_device
from pg_tensile.execution.measuring.device import measure
from pg_tensile.planning.device.profile import PROFILES, RTX_A6000, DeviceProfile, Direction, named_profile


@pytest.fixture(scope="module")
def here() -> DeviceProfile:
    return measure("cpu")


def test_a_transfer_takes_its_latency_and_its_bytes_over_the_rate():
    profile = replace(RTX_A6000, transfer_latency_us=10.0, out_bytes_per_s=25e9, in_bytes_per_s=12.5e9)
    assert profile.transfer_us(25_000_000, Direction.OUT) == pytest.approx(1010.0)
    assert profile.transfer_us(25_000_000, Direction.IN) == pytest.approx(2010.0)
    assert profile.transfer_us(0, Direction.IN) == 10.0


@pytest.mark.parametrize("profile", PROFILES.values(), ids=PROFILES)
def test_named_profiles_are_of_plausible_devices(profile):
    assert profile.kind == "sim"
    assert 24 << 30 <= profile.memory_bytes <= 192 << 30
    assert 10e9 <= profile.in_bytes_per_s <= 450e9
    assert 10e9 <= profile.out_bytes_per_s <= 450e9
    assert 10e12 <= profile.flops_per_s <= 1e15
    assert profile.bytes_per_s > 2 * profile.in_bytes_per_s


def test_the_reference_is_an_rtx_a6000():
    assert (RTX_A6000.out_bytes_per_s, RTX_A6000.in_bytes_per_s, RTX_A6000.duplex_factor) == (25e9, 25e9, 1.0)
    assert (RTX_A6000.flops_per_s, RTX_A6000.bytes_per_s) == (20e12, 600e9)


def test_profiles_are_found_by_name_in_upper_and_lower_case():
    assert named_profile("rtx_a6000") is RTX_A6000
    with pytest.raises(DeviceError, match='no device profile "TPU"') as error:
        named_profile("TPU")
    assert "RTX_A6000" in (error.value.hint or "")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory_bytes", 0),
        ("out_bytes_per_s", -1.0),
        ("in_bytes_per_s", math.nan),
        ("flops_per_s", math.inf),
        ("bytes_per_s", 0.0),
        ("transfer_latency_us", -0.1),
        ("launch_us", math.nan),
        ("handover_us", -1.0),
        ("duplex_factor", 0.4),
        ("duplex_factor", 1.1),
        ("kind", "tpu"),
    ],
)
def test_numbers_that_no_device_has_are_refused(field, value):
    with pytest.raises(DeviceError, match=f"{value}"):
        replace(RTX_A6000, **{field: value})


def test_a_scaled_link_keeps_the_balance_of_the_reference(here):
    """The step takes 50 times as long here: the link has a 50th of the reference's rate."""
    scaled = here.scaled_link(roofline_us=40_000.0, step_us=2_000_000.0)
    assert scaled.out_bytes_per_s == pytest.approx(25e9 / 50)
    assert scaled.in_bytes_per_s == pytest.approx(25e9 / 50)
    assert scaled.duplex_factor == 1.0
    assert (scaled.kind, scaled.flops_per_s) == (here.kind, here.flops_per_s)
    slow = replace(RTX_A6000, in_bytes_per_s=1e9, duplex_factor=0.8)
    other = here.scaled_link(1.0, 2.0, reference=slow)
    assert (other.out_bytes_per_s, other.in_bytes_per_s, other.duplex_factor) == (12.5e9, 0.5e9, 0.8)


@pytest.mark.parametrize(("roofline_us", "step_us"), [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, math.inf)])
def test_a_link_is_not_scaled_to_a_step_that_takes_no_time(roofline_us, step_us):
    with pytest.raises(DeviceError, match="takes no time"):
        RTX_A6000.scaled_link(roofline_us, step_us)


def test_a_given_link_is_the_same_both_ways_unless_said_otherwise():
    assert RTX_A6000.with_link(2e9).in_bytes_per_s == 2e9
    assert RTX_A6000.with_link(2e9, 3e9, 0.7).out_bytes_per_s == 2e9
    assert RTX_A6000.with_link(2e9, 3e9, 0.7).duplex_factor == 0.7
    assert RTX_A6000.with_link(2e9, 3e9, 0.7).with_share(0.5) == RTX_A6000.with_link(1e9, 1.5e9, 0.7)


def test_the_cpu_is_measured_quickly_and_plausibly(here):
    start = time.perf_counter()
    again = measure(torch.device("cpu"))
    assert time.perf_counter() - start < 10  # under 2 s; the machine may be busy
    assert again.kind == "host"
    for profile in (here, again):
        assert 1 << 28 < profile.memory_bytes < 1 << 46
        assert 1e8 < profile.out_bytes_per_s < 1e12
        assert 1e8 < profile.bytes_per_s < 1e13
        assert 1e8 < profile.flops_per_s < 1e15
        assert 0 < profile.launch_us < 1000
        assert 0 < profile.transfer_latency_us < 10_000
        assert 0 <= profile.handover_us < 10_000


def test_measuring_changes_no_random_numbers():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    measure("cpu")
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("name", ["tpu", "mps", "cuda:9", "cpu:x"])
def test_devices_that_are_not_there_cannot_be_measured(name):
    with pytest.raises(DeviceError):
        measure(name)


def test_a_device_without_memory_cannot_be_measured(monkeypatch):
    """The allocator's failure is a clear error, not a RuntimeError."""
    monkeypatch.setattr("pg_tensile.execution.measuring.device._BUFFER", 1 << 50)
    with pytest.raises(DeviceError, match="cannot be measured") as error:
        measure("cpu")
    assert error.value.hint


def test_auto_is_a_device_that_works():
    device = choose_device("auto")
    assert device.type in ("cpu", "cuda")
    assert torch.ones(2, device=device).sum() == 2


def test_profiles_need_no_torch():
    """Plans are made where torch is never imported."""
    names = ", ".join(f"pg_tensile.planning.{name}" for name in ("device.profile", "simulator.simulator", "policies"))
    program = f"import sys, {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
