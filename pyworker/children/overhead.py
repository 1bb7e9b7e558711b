"""Device memory of a process besides its tensors: the context, the code of libraries, and a margin of the allocator.

Before a process has measured its own, it is the most that earlier jobs like it have measured; without those, what the
process that measured the device took, and room for code; without that either, a constant. Libraries load the code of a
kernel at its first call, so it is measured again after the first step and after the first epoch.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from pyworker.wire import FrameType

if TYPE_CHECKING:
    import torch

    from pg_tensile.execution.runtime.device import Device
    from pg_tensile.planning.device.profile import DeviceProfile
    from pyworker.children.channel import Channel

# The last resort, where no process on the device could measure its memory; it was 714 MiB on an H100.
UNMEASURED_BYTES = 768 << 20


def overhead_bytes(device: str, profile: DeviceProfile, earlier: int | None = None) -> int:
    """Return the device memory besides its tensors that a process on the device is expected to take.

    `earlier` is what processes like it have measured (`earlier_overhead`)."""
    if device == "cpu":
        return 0
    if earlier is not None:
        return earlier
    from pg_tensile.execution.backends import backend_of

    code = backend_of(device.partition(":")[0]).code_bytes
    return (profile.process_bytes or UNMEASURED_BYTES) + code + profile.allocator.margin_bytes


def earlier_overhead(measured: list[dict[str, Any]], device: str, network: str | None = None) -> int | None:
    """Return the most that jobs on the device have measured with this version of PyTorch; None without such jobs.

    `measured` is a list of {device, torch, network, bytes}; `network` is the type of the network that is trained, by
    default any."""
    torch = version("torch")
    alike = [
        entry["bytes"]
        for entry in measured
        if (entry["device"], entry["torch"]) == (device, torch) and network in (None, entry["network"])
    ]
    return max(alike, default=None)


def expected_overhead(spec: dict[str, Any], device: str, profile: DeviceProfile) -> int:
    """Return the overhead that a job with this spec is expected to have on the device."""
    network = (spec["network"] or {}).get("type")
    return overhead_bytes(device, profile, earlier_overhead(spec["overheads"], device, network))


def allocator_cautions(device: str, profile: DeviceProfile) -> list[str]:
    """Return a warning if the allocator on the device does not do what plans count with."""
    if device == "cpu":
        return []
    from pg_tensile.execution.runtime.allocator_limit import allocator_caution

    return list(filter(None, [allocator_caution(profile.allocator)]))


class Overhead:
    """The overhead of a job's process, in bytes: expected at first, then measured where the driver tells it."""

    def __init__(self, channel: Channel, device: torch.device, profile: DeviceProfile) -> None:
        self.bytes = expected_overhead(channel.spec, str(device), profile)
        self.is_measured = device.type == "cpu"
        self._limited_by: str | None = None
        self._channel = channel
        self._device = device
        self._margin_bytes = profile.allocator.margin_bytes
        self._told = self.header()
        self._has_stepped = self._has_ended_epoch = False

    def header(self) -> dict[str, Any]:
        """Return the fields of a TRACE frame."""
        measured = {"overhead_bytes": self.bytes, "overhead_measured": self.is_measured}
        self._told = measured | {"limited_by": self._limited_by}
        return self._told

    def begin(self) -> None:
        """Create the context of a process in which PyTorch executes the model by itself."""
        if self._device.type != "cpu":
            from pg_tensile.execution.backends import backend_of

            backend_of(self._device.type).create_context(self._device)

    def measure(self, device: Device | None) -> bool:
        """Measure it, and return whether it has grown. `device` is None if PyTorch executes the model by itself."""
        before, measured = self.bytes, self._read() if device is None else device.overhead_bytes()
        if measured is not None:
            self.bytes, self.is_measured = measured, True
        if self._device.type != "cpu":
            from pg_tensile.execution.runtime.allocator_limit import limit_enforced_by

            self._limited_by = limit_enforced_by(self._device)
        return self.bytes > before

    def _read(self) -> int | None:
        if self._device.type == "cpu":
            return 0
        from pg_tensile.execution.backends import outside_bytes

        outside = outside_bytes(self._device)
        return None if outside is None else outside + self._margin_bytes

    def tick(self, device: Device | None) -> None:
        """Measure it when the first step has ended; called after each."""
        if not self._has_stepped:
            self._has_stepped = True
            self.measure(device)
            self.report()

    def epoch_ended(self, device: Device | None) -> None:
        """Measure it when the first epoch has ended, since the validation has called other kernels."""
        if not self._has_ended_epoch:
            self._has_ended_epoch = True
            self.measure(device)
            self.report()

    def report(self) -> None:
        """Tell the scheduler if it is not what the last frame said."""
        told = self._told
        if self.header() != told:
            self._channel.send(FrameType.PROGRESS, {"overhead": self._told})
