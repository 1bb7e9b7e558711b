"""Device profiles for planning and simulation: memory, link to the host, and rates of a device.

Named profiles hold *effective* rates, which PyTorch reaches on large operators, not those of the data sheet.
execution/measuring/device.py measures the profile of the local machine. This module does not import torch, because
plans are made in processes without it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Literal

from pg_tensile.errors import DeviceError
from pg_tensile.planning.allocator_rules import DEFAULT_RULES, AllocatorRules
from pg_tensile.planning.device_types import ACCELERATORS

DeviceKind = Literal["host", "cuda", "emulated", "sim"]
GB = 1_000_000_000
GIB = 1 << 30
TERA = 1_000_000_000_000


class Direction(IntEnum):
    """Direction of a transfer over the link, as seen from the device; each has its own lane."""

    OUT = 0
    IN = 1


@dataclass(frozen=True)
class DeviceProfile:
    """Model of a device for the planner. Rates are per second, times in microseconds.

    A transfer of b bytes that has the link to itself takes `transfer_latency_us` + b / (the lane's rate). While both
    lanes are busy, each runs at `duplex_factor` times its speed: 1.0 if the directions are independent, 0.5 if they
    share one path. `handover_us` is the delay from the end of a transfer until the compute learns of it.
    `process_bytes` is the device memory that a process takes besides its tensors; 0 where that is not known.
    `allocator` has the rules of PyTorch's allocator on an accelerator. Raises DeviceError for impossible numbers.
    """

    name: str
    kind: DeviceKind
    memory_bytes: int
    out_bytes_per_s: float
    in_bytes_per_s: float
    duplex_factor: float
    flops_per_s: float
    bytes_per_s: float
    transfer_latency_us: float
    launch_us: float
    handover_us: float = 0.0
    process_bytes: int = 0
    allocator: AllocatorRules = DEFAULT_RULES

    def __post_init__(self) -> None:
        if self.kind not in ("host", *ACCELERATORS, "sim"):
            raise DeviceError(f'a device profile cannot be of kind "{self.kind}"', hint="Use host, cuda or sim.")
        for field in fields(self)[2:-1]:
            value = getattr(self, field.name)
            may_be_zero = field.name in ("transfer_latency_us", "launch_us", "handover_us", "process_bytes")
            if not (math.isfinite(value) and (value > 0 or (may_be_zero and value == 0))):
                raise DeviceError(f"{field.name} of device profile {self.name} cannot be {value}")
        if not 0.5 <= self.duplex_factor <= 1.0:
            hint = "1.0: the two directions do not disturb each other; 0.5: they share one path."
            raise DeviceError(f"duplex_factor of device profile {self.name} is {self.duplex_factor}", hint=hint)

    @classmethod
    def from_json(cls, stored: Any) -> DeviceProfile:
        """Return the profile that tensile.device_profiles shows as JSON. Raises DeviceError if it is damaged."""
        try:
            rules = AllocatorRules(**stored.get("allocator", {}))
            return cls(**(stored | {"allocator": rules}))
        except (AttributeError, TypeError, DeviceError) as error:
            hint = (
                "As a superuser, delete its row from tensile_internal.device_profiles: the next job measures it again."
            )
            raise DeviceError("the stored profile of the device cannot be used", hint, str(error)) from error

    def with_link(
        self, out_bytes_per_s: float, in_bytes_per_s: float | None = None, duplex_factor: float = 1.0
    ) -> DeviceProfile:
        """Return the device with another link, in bytes per second; one number is used for both directions."""
        inward = out_bytes_per_s if in_bytes_per_s is None else in_bytes_per_s
        rates = float(out_bytes_per_s), float(inward)
        return replace(self, out_bytes_per_s=rates[0], in_bytes_per_s=rates[1], duplex_factor=duplex_factor)

    def with_share(self, share: float) -> DeviceProfile:
        """Return the device with `share` times the rates of its link, for a job that has only a part of it."""
        return self.with_link(self.out_bytes_per_s * share, self.in_bytes_per_s * share, self.duplex_factor)

    def scaled_link(self, roofline_us: float, step_us: float, reference: DeviceProfile | None = None) -> DeviceProfile:
        """Return the device with a link that is as fast, relative to its computing, as that of `reference`.

        The rates are those of the reference (None means an RTX A6000) × `roofline_us` / `step_us`, where `roofline_us`
        is the estimated duration of the iteration on the reference (`latency.roofline.total_us`), and `step_us` the
        measured one on this device. Raises DeviceError unless both are positive.
        """
        reference = RTX_A6000 if reference is None else reference
        if not (math.isfinite(roofline_us) and roofline_us > 0 and math.isfinite(step_us) and step_us > 0):
            detail = f"reference {roofline_us} µs, here {step_us} µs"
            raise DeviceError("a link cannot be scaled to an iteration that takes no time", detail=detail)
        ratio = roofline_us / step_us
        out, inward = reference.out_bytes_per_s * ratio, reference.in_bytes_per_s * ratio
        return self.with_link(out, inward, reference.duplex_factor)

    def transfer_us(self, nbytes: int, direction: Direction) -> float:
        """Return the duration of a transfer that has the link to itself, in µs."""
        rate = self.out_bytes_per_s if direction == Direction.OUT else self.in_bytes_per_s
        return self.transfer_latency_us + nbytes / rate * 1e6


def _simulated(
    name: str, memory_gib: int, link: tuple[float, float], duplex: float, tflops: float, gbytes: float, launch_us: float
) -> DeviceProfile:
    out, inward = link
    return DeviceProfile(
        name, "sim", memory_gib * GIB, out * GB, inward * GB, duplex, tflops * TERA, gbytes * GB, 10.0, launch_us
    )


# The reference of all comparisons, and the paper's GPU. PCIe 4.0 x16: 25 of 31.5 GB/s each way, both ways at once;
# FP32: 20 of 38.7 TFLOP/s; GDDR6: 600 of 768 GB/s.
RTX_A6000 = _simulated("RTX_A6000", 48, (25, 25), 1.0, 20, 600, 2.0)
# PCIe 4.0 x16, both ways at once some 45 GB/s in total; TF32 convolutions: 60 of 156 TFLOP/s; HBM2: 1250 of 1555 GB/s.
A100_40GB = _simulated("A100_40GB", 40, (25, 25), 0.9, 60, 1250, 2.0)
# PCIe 4.0 x16; FP32: 45 of 82.6 TFLOP/s; GDDR6X: 850 of 1008 GB/s.
RTX_4090 = _simulated("RTX_4090", 24, (25, 25), 0.9, 45, 850, 2.0)
# PCIe 5.0 x16: 50 of 63 GB/s; TF32: 140 of 378 TFLOP/s; HBM2e: 1600 of 2000 GB/s.
H100_PCIE = _simulated("H100_PCIE", 80, (50, 50), 0.9, 140, 1600, 2.0)
# NVLink-C2C: 450 GB/s each way on paper, some 300 out and 375 in measured, sharing the host's LPDDR5X (500 GB/s)
# when both ways are busy; TF32: 200 of 494 TFLOP/s; HBM3: 3200 of 4000 GB/s.
GH200 = _simulated("GH200", 96, (300, 375), 0.75, 200, 3200, 2.0)

PROFILES = {profile.name: profile for profile in (RTX_A6000, A100_40GB, RTX_4090, H100_PCIE, GH200)}


def named_profile(name: str) -> DeviceProfile:
    """Return the profile of a name, in upper or lower case. Raises DeviceError, with all names, if it is unknown."""
    profile = PROFILES.get(name.upper())
    if profile is None:
        raise DeviceError(f'there is no device profile "{name}"', hint=f"Use one of {', '.join(PROFILES)}.")
    return profile
