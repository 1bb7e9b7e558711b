"""Conditions of a GPU: every value that the driver offers, whatever it lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pg_tensile.execution.backends.conditions import Conditions, reason_names
from pg_tensile.execution.backends.cuda import CudaBackend
from tests.nvml import StandInNvml

OFFERED: dict[tuple[Any, ...], Any] = {
    ("nvmlDeviceGetClockInfo", StandInNvml.NVML_CLOCK_SM): 1410,
    ("nvmlDeviceGetClockInfo", StandInNvml.NVML_CLOCK_MEM): 1593,
    ("nvmlDeviceGetTemperature", StandInNvml.NVML_TEMPERATURE_GPU): 61,
    ("nvmlDeviceGetPowerUsage",): 251_250,
    ("nvmlDeviceGetCurrentClocksThrottleReasons",): 0x4 | 0x20,
}
FIELDS = dict(
    zip(OFFERED, ("sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w", "clocks_event_reasons"), strict=True)
)
ALL = Conditions(1410, 1593, 61, 251.25, ("sw_power_cap", "sw_thermal_slowdown"))
GPU = torch.device("cuda", 0)


def test_each_value_is_read_in_its_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = StandInNvml(values=OFFERED)
    nvml.install(monkeypatch)
    assert CudaBackend().conditions(GPU) == ALL
    assert nvml.opened == 0


@pytest.mark.parametrize("lacking", OFFERED, ids=FIELDS.get)
def test_a_value_that_the_driver_does_not_offer_loses_no_other(
    monkeypatch: pytest.MonkeyPatch, lacking: tuple[Any, ...]
) -> None:
    StandInNvml(values={call: value for call, value in OFFERED.items() if call != lacking}).install(monkeypatch)
    assert CudaBackend().conditions(GPU) == Conditions(**{**ALL.__dict__, FIELDS[lacking]: None})


def test_without_a_driver_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(nvml: StandInNvml) -> None:
        raise nvml.NVMLError("the driver is not loaded")

    StandInNvml(values=OFFERED).install(monkeypatch)
    monkeypatch.setattr(StandInNvml, "nvmlInit", refuse)
    assert CudaBackend().conditions(GPU) is None


def test_the_library_has_what_is_read() -> None:
    import pynvml

    assert all(hasattr(pynvml, function) for function, *_ in OFFERED)
    constants = ("NVML_CLOCK_SM", "NVML_CLOCK_MEM", "NVML_TEMPERATURE_GPU")
    assert all(getattr(pynvml, name) == getattr(StandInNvml, name) for name in constants)


def test_reasons_have_the_names_of_nvidia_smi() -> None:
    import pynvml

    assert reason_names(0) == ()
    for constant, name in {
        pynvml.nvmlClocksEventReasonGpuIdle: "gpu_idle",
        pynvml.nvmlClocksEventReasonApplicationsClocksSetting: "applications_clocks_setting",
        pynvml.nvmlClocksEventReasonSwPowerCap: "sw_power_cap",
        pynvml.nvmlClocksThrottleReasonHwSlowdown: "hw_slowdown",
        pynvml.nvmlClocksEventReasonSyncBoost: "sync_boost",
        pynvml.nvmlClocksEventReasonSwThermalSlowdown: "sw_thermal_slowdown",
        pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: "hw_thermal_slowdown",
        pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "hw_power_brake_slowdown",
        pynvml.nvmlClocksEventReasonDisplayClockSetting: "display_clocks_setting",
    }.items():
        assert reason_names(constant) == (name,)
    assert reason_names(0x200) == ("reason_0x200",)
