"""Device protocol: the interface between the executor and the devices, implemented by host.py and accelerator.py.

The executor decides *what* happens and in which order, the device *how*. "The compute" below executes the operators: on
the host device it is the executor's own thread, on an accelerator one stream. Each direction of the link is a lane of
its own: one copy at a time, first in, first out. The order that a device guarantees:

- a copy starts after everything that was given to the compute before `copy_out` / `copy_in` was called (the stream of
  an accelerator's lane waits for an event of the compute's), after all earlier copies of its lane, and not before
  `delay_us` have passed since the call; a device that `runs_ahead` ignores the delay and leaves it to the program;
- work given to the compute after `wait(transfer)` runs after the copy has ended. Until then the executor neither
  frees nor writes the source, and neither reads nor frees the target;
- device storages are allocated and freed by the executor, by `resize_` and by dropping references, inside `iteration()`
  only. So on an accelerator every block belongs to the compute's stream.

Memory: before every allocation the executor checks its registry, plus the known workspace of an operator, against its
budget, at first `budget_bytes`. A device need not count.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Protocol

import torch

from pg_tensile.errors import DeviceError, LinkError
from pg_tensile.planning.device.profile import Direction

if TYPE_CHECKING:
    from pg_tensile.execution.runtime.compressed_copies import Chunks, Look
    from pg_tensile.execution.runtime.measure import Meter
    from pg_tensile.planning.device.profile import DeviceProfile


class Transfer(Protocol):
    """One copy over the link.

    Times are µs since the beginning of the iteration in which the copy was requested; they are valid after
    `Device.finish_times()`, and only for an iteration begun with `timed`."""

    direction: Direction
    bytes: int  # moved; for a compressed copy out, valid once it has ended
    raw_bytes: int  # bytes of the tensor
    start_us: float
    end_us: float
    stall_us: float  # how long `wait` made the compute idle; 0 if the copy had ended by then


class Device(Protocol):
    """A device that programs run on.

    Used by one thread at a time, except for `close`, `share_link` and `host_memory`. All memory sizes are in bytes."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def profile(self) -> DeviceProfile: ...

    @property
    def budget_bytes(self) -> int | None:
        """Limit of registry and workspace together; None means only the hardware's."""
        ...

    def limit_memory(self, budget_bytes: int | None) -> None:
        """Keep the allocator from taking more of the device than the budget and a margin; None means no limit."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """True if work is given to the device long before it is executed (accelerators).

        Then `copy_out` and `copy_in` ignore the delay: the program requests a delayed copy in the gap of the latest
        operator that starts, by the trace's latencies, before the delay has passed, and right before its deadline at
        the latest."""
        ...

    def share_link(self, share: float) -> None:
        """Limit this process to a share of the link (0 < share ≤ 1), as far as the device can enforce it.

        May be called from any thread. Raises DeviceError if the share is out of range."""
        ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy the caller's `source`, on any device, to `target` (same shape and type) on this device, as a part of the
        compute. The caller may change `source` as soon as this returns."""
        ...

    def host_memory(self, size: int) -> torch.Tensor:
        """Return uint8[size] of uninitialised host memory, aligned to at least 64 bytes, in the form in which copies
        are fastest (registered with an accelerator).

        It is freed with the last reference to it. May be called from any thread. Raises DeviceError if there is not
        enough."""
        ...

    def iteration(self, timed: bool = False) -> AbstractContextManager[None]:
        """Return the context of one iteration, which is also entered for loading and reading state.

        It makes the compute's stream current and sets time zero; with `timed` the times of transfers are measured.
        Leaving it does not wait."""
        ...

    def copy_out(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        delay_us: int = 0,
        chunks: Chunks | None = None,
        look: Look | None = None,
    ) -> Transfer:
        """Start a copy from the device (`source`, uint8[n]) to host memory (`target`, uint8[n]), n ≥ 0.

        The device holds references to both until the copy has ended. With `chunks` the copy is compressed chunk by
        chunk on the device, each chunk while the previous one is on the link; `chunks` is filled in before `wait`
        returns. With `look` the device also takes that sample. Raises LinkError if the lane is broken or closed."""
        ...

    def copy_in(
        self, source: torch.Tensor, target: torch.Tensor, delay_us: int = 0, chunks: Chunks | None = None
    ) -> Transfer:
        """Start a copy from host memory to the device; `chunks`, filled in, is the encoding of `source`, if encoded."""
        ...

    def wait(self, transfer: Transfer) -> None:
        """Make the compute wait for the copy; called exactly once for each transfer, unless something failed.

        Raises LinkError, caused by the error in the lane."""
        ...

    def synchronize(self) -> None:
        """Wait until the compute and both lanes have nothing left to do. Raises LinkError as `wait` does."""
        ...

    def finish_times(self) -> None:
        """Fill in the times of the transfers of the last iteration begun with `timed`; called after `synchronize`."""
        ...

    def overhead_bytes(self) -> int | None:
        """Return the device memory that this process takes besides what the executor counts; None if it is unknown."""
        ...

    def clock(self) -> Meter:
        """Return a meter of latencies (measure.py) for one iteration."""
        ...

    def allocator(self) -> Meter:
        """Return a meter of the allocator's high-water marks (measure.py) for one iteration."""
        ...

    def generator_state(self) -> torch.Tensor:
        """Return the state of the random number generator that this device's operators draw from."""
        ...

    def set_generator_state(self, state: torch.Tensor) -> None: ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether `error`, of an operator or an allocation, means that the hardware's memory is used up."""
        ...

    def close(self) -> None:
        """End the lanes: copies that have not ended fail with LinkError (on an accelerator they are completed first).

        Idempotent; may be called from any thread. Also done when the device is collected and when the interpreter ends.
        """
        ...


@contextmanager
def iteration_context(device: Device, timed: bool = False, gradients: bool = True) -> Iterator[None]:
    """Run below autograd and in the device's iteration, independently of the caller's modes.

    Gradients are enabled as in the captured iteration: recurrent layers return no workspace otherwise."""
    with (
        torch.inference_mode(False),
        device.iteration(timed),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
        torch.set_grad_enabled(gradients),
    ):
        yield


def quiesce(device: Device) -> None:
    """Wait until nothing is in flight. LinkError is ignored: a broken or closed link moves nothing any more."""
    with suppress(LinkError):
        device.synchronize()


def check_budget(budget_bytes: int | None) -> None:
    """Raise DeviceError if `budget_bytes` is negative; None means no budget."""
    if budget_bytes is not None and budget_bytes < 0:
        raise DeviceError(f"a budget of {budget_bytes} bytes is not possible", hint="Use 0 or more bytes.")


def check_copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Raise ValueError unless source and target have the same size."""
    if source.numel() != target.numel():
        raise ValueError(f"{source.numel()} bytes cannot be copied to {target.numel()}")


def copy_failure(transfer: Transfer, error: BaseException) -> LinkError:
    """Return the error of a wait for a transfer that has failed with `error`."""
    direction = "out of" if transfer.direction == Direction.OUT else "into"
    return LinkError(f"copying {transfer.raw_bytes:,} bytes {direction} device memory failed: {error}")


def unusable_link(reason: object) -> LinkError:
    """Return the error of a call that needs a link which is broken or closed."""
    return LinkError(f"the link is of no use any more: {reason}")


def check_share(share: float) -> None:
    """Raise DeviceError unless 0 < `share` ≤ 1."""
    if not 0 < share <= 1:
        raise DeviceError(f"{share} is not a share of a link", hint="Use a number above 0 and at most 1.")
