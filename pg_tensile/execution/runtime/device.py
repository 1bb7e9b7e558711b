"""What the executor asks of a device: the protocol that host.py and cuda.py implement.

The executor decides *what* happens and in which order, the device *how*. "The compute" below is what executes the
operators: on the host device the executor's own thread, on CUDA one stream. Each direction of the link is a lane of its
own: one copy at a time, first in, first out. The order that a device guarantees:

- a copy starts after everything that was given to the compute before `copy_out` / `copy_in` was called (on CUDA: the
  lane's stream waits for an event of the compute's stream), after all earlier copies of its lane, and not before
  `delay_us` have passed since then; a device that `runs_ahead` cannot tell, and leaves the delay to the program;
- after `wait(transfer)`, what is given to the compute runs after the copy has ended. Until then the executor neither
  frees nor writes the source, and neither reads nor frees the target;
- device storages are allocated and freed by the executor, by `resize_` and by dropping references, inside `iteration()`
  only. So on CUDA every block belongs to the compute's stream.

Memory: the executor holds its registry, plus the workspace known for an operator, against `budget_bytes` before every
allocation. A device need not count.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch

from pg_tensile.errors import DeviceError
from pg_tensile.planning.device.profile import Direction

if TYPE_CHECKING:
    from pg_tensile.execution.runtime.compressed_copies import Chunks, Look
    from pg_tensile.execution.runtime.measure import Meter
    from pg_tensile.planning.device.profile import DeviceProfile


class Transfer(Protocol):
    """One copy over the link. The times are µs since the beginning of the iteration in which it was asked for; they are
    valid after `Device.finish_times()` and only in an iteration begun with `timed`."""

    direction: Direction
    bytes: int  # moved; of a coded copy that goes out known when it has ended
    raw_bytes: int  # of the tensor
    start_us: float
    end_us: float
    stall_us: float  # for how long `wait` made the compute idle; 0 if the copy had ended by then


class Device(Protocol):
    """A device that programs run on. Used by one thread at a time, except for `close`,
    `share_link` and `host_memory`. All memory sizes are bytes."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def profile(self) -> DeviceProfile: ...

    @property
    def budget_bytes(self) -> int | None:
        """The most that registry and workspace together may take; None: no limit but the hardware's."""
        ...

    @property
    def runs_ahead(self) -> bool:
        """Whether work is given to the device long before it is executed (CUDA). Then `copy_out` and `copy_in` heed no
        delay: the program asks for a delayed copy in the gap of the latest operator that starts, by the trace's
        latencies, before the delay has passed, at the latest right before its deadline."""
        ...

    def share_link(self, share: float) -> None:
        """From now on this process has that share of the link (0 < share ≤ 1), as far as the device can see to it. From
        any thread. Raises DeviceError on another share."""
        ...

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copies what the caller handed in, wherever it lies, to `target` (same shape and type) on the device, as a
        part of the compute. The caller may change `source` as soon as this returns."""
        ...

    def host_memory(self, size: int) -> torch.Tensor:
        """uint8[size] in host memory, aligned to at least 64 bytes, in the form that copies like best (pinned on CUDA),
        not initialised. It is given back when the last reference goes. Raises DeviceError if there is not enough."""
        ...

    def iteration(self, timed: bool = False) -> AbstractContextManager[None]:
        """Around everything that the executor does in one iteration, and around loading and reading state: makes the
        compute's stream current, sets time zero; with `timed` the transfers' times are taken. Leaving it waits for
        nothing."""
        ...

    def copy_out(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        delay_us: int = 0,
        chunks: Chunks | None = None,
        look: Look | None = None,
    ) -> Transfer:
        """Starts a copy from the device (`source`, uint8[n]) to host memory (`target`, uint8[n]). n ≥ 0. The device
        holds references to both until the copy has ended. With `chunks` it is coded chunk by chunk on the device, one
        while the one before is on the link; the device fills them in before `wait` returns. With `look` it takes that
        sample as well. Raises LinkError when the lane is broken or closed."""
        ...

    def copy_in(
        self, source: torch.Tensor, target: torch.Tensor, delay_us: int = 0, chunks: Chunks | None = None
    ) -> Transfer:
        """The other way; `chunks`: what `source` is coded in, filled in."""
        ...

    def wait(self, transfer: Transfer) -> None:
        """Makes the compute wait for the copy; called exactly once for each transfer, unless something failed. Raises
        LinkError, caused by what went wrong in the lane."""
        ...

    def synchronize(self) -> None:
        """Returns when the compute and both lanes have nothing left to do. Raises LinkError as `wait` does."""
        ...

    def finish_times(self) -> None:
        """After `synchronize`: fills in the times of the transfers of the last iteration begun with `timed`."""
        ...

    def clock(self) -> Meter:
        """A meter of latencies (measure.py), for one iteration."""
        ...

    def allocator(self) -> Meter:
        """A meter of the allocator's high water (measure.py), for one iteration."""
        ...

    def generator_state(self) -> torch.Tensor:
        """The state of the random number generator that this device's operators draw from."""
        ...

    def set_generator_state(self, state: torch.Tensor) -> None: ...

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an operator or an allocation failed with `error` because the hardware's memory is used up."""
        ...

    def close(self) -> None:
        """Ends the lanes: copies that have not ended fail with LinkError (on CUDA they end first). Idempotent, from any
        thread; also done when the device is collected and when the interpreter ends."""
        ...


def check_budget(budget_bytes: int) -> None:
    """Raises DeviceError unless a device or an executor can be held to so many bytes."""
    if budget_bytes < 0:
        raise DeviceError(f"a budget of {budget_bytes} bytes is not possible", hint="Use 0 or more bytes.")


def check_share(share: float) -> None:
    """Raises DeviceError unless `share` is one of a link."""
    if not 0 < share <= 1:
        raise DeviceError(f"{share} is no share of a link", hint="Use a number above 0 and at most 1.")
