"""Conditions of a device: the clocks, heat and power that its speed depends on, as its driver tells them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The bits of NVML's nvmlClocksEventReason…, by the names of nvidia-smi's fields clocks_event_reasons.…
_REASONS = (
    "gpu_idle",
    "applications_clocks_setting",
    "sw_power_cap",
    "hw_slowdown",
    "sync_boost",
    "sw_thermal_slowdown",
    "hw_thermal_slowdown",
    "hw_power_brake_slowdown",
    "display_clocks_setting",
)
IDLE = _REASONS[0]


@dataclass(frozen=True)
class Conditions:
    """State of a device at one time; a value that the driver does not tell is None.

    `clocks_event_reasons`: why the clocks are lower than they could be, by nvidia-smi's names; `IDLE` if nothing runs.
    """

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    clocks_event_reasons: tuple[str, ...] | None = None


def read_conditions(nvml: Any, handle: Any) -> Conditions:
    """Return the conditions of a GPU, given the module of NVML and its handle of the GPU."""

    def told(function: str, *arguments: int) -> int | None:
        try:
            return int(getattr(nvml, function)(handle, *arguments))
        except nvml.NVMLError:  # of this value: a driver, or a virtual GPU, lacks some and has others
            return None

    power_mw = told("nvmlDeviceGetPowerUsage")
    bits = told("nvmlDeviceGetCurrentClocksThrottleReasons")  # their former name, which all drivers know
    return Conditions(
        sm_clock_mhz=told("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
        memory_clock_mhz=told("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
        temperature_c=told("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
        power_w=None if power_mw is None else power_mw / 1e3,
        clocks_event_reasons=None if bits is None else reason_names(bits),
    )


def reason_names(bits: int) -> tuple[str, ...]:
    """Return the names of NVML's reasons; a bit without one is "reason_0x200", for example."""
    names = dict(enumerate(_REASONS))
    numbers = (number for number in range(bits.bit_length()) if bits >> number & 1)
    return tuple(names.get(number, f"reason_{1 << number:#x}") for number in numbers)
