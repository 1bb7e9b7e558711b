"""Records of an executor: totals over all iterations, and the details of one (compare `simulator.Timeline`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pg_tensile.execution.runtime.swapper import Moved, Waited
from pg_tensile.planning.device.profile import Direction
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.codecs import staging_bytes
from pg_tensile.planning.trace.trace import Int32s, Int64s


class Transfer(NamedTuple):
    """One copy over the link.

    `tensor` is −1 if the graph does not use it. `step` is the step after which the copy was requested (before which, if
    passive), −1 if before the iteration, at a change of plan or graph. `event` is the index into the plan, −1 if the
    plan has no event for it. Times are µs since the iteration began (at a change: since the change began; 0 on CUDA).
    """

    tensor: int
    direction: Direction
    bytes: int
    step: int
    event: int
    passive: bool
    start_us: float
    end_us: float
    raw_bytes: int  # of the tensor; `bytes` are the bytes moved


class Stall(NamedTuple):
    """A wait of the compute for a tensor, `us` long: before `step` for a swap-in, after it for a swap-out."""

    step: int
    tensor: int
    us: float


@dataclass(frozen=True, eq=False)
class IterationRecord:
    """One iteration of S steps as it was executed. Resident tensors of the executor's other graphs are counted, too."""

    generation: int  # of the plan
    transition: bool  # the iteration started from another state than the plan's own
    footprint: Int64s  # [S]: bytes in the registry after each step
    steps: Int32s  # [S]: the operator executed in each step, by its captured number
    peak_bytes: int
    device_peak_bytes: int  # with the known workspaces
    transfers: tuple[Transfer, ...]
    stalls: tuple[Stall, ...]
    passive_swap_ins: int
    recomputes: int  # steps of recompute events
    bytes_out: int  # moved over the link
    bytes_in: int
    raw_bytes_out: int  # of the tensors moved
    raw_bytes_in: int
    stall_us: float
    step_us: float  # the whole iteration, until the device has completed all work


@dataclass
class Counters:
    """Totals since the executor was created.

    `peak_bytes` is the largest footprint, `device_peak_bytes` the largest with the known workspaces. On CUDA, where
    stalls are only timed on request, `stall_us` counts recorded iterations only."""

    iterations: int = 0
    recomputes: int = 0
    passive_swap_ins: int = 0
    bytes_out: int = 0  # moved over the link
    bytes_in: int = 0
    raw_bytes_out: int = 0  # of the tensors moved
    raw_bytes_in: int = 0
    stall_us: float = 0.0
    memory_wait_us: float = 0.0  # for the memory of groups (memory_flow.py)
    peak_bytes: int = 0
    device_peak_bytes: int = 0

    def add(
        self, moved: Iterable[Moved], waited: Iterable[Waited], recomputes: int, peak_bytes: int, device_peak_bytes: int
    ) -> None:
        """Add one iteration."""
        self.iterations += 1
        self.recomputes += recomputes
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        self.device_peak_bytes = max(self.device_peak_bytes, device_peak_bytes)
        for move in moved:
            self.passive_swap_ins += move.passive
            if move.transfer.direction == Direction.OUT:
                self.bytes_out += move.transfer.bytes
                self.raw_bytes_out += move.transfer.raw_bytes
            else:
                self.bytes_in += move.transfer.bytes
                self.raw_bytes_in += move.transfer.raw_bytes
        self.stall_us += sum(move.transfer.stall_us for move in waited)


def make_record(
    sequence: AccessSequence,
    transition: bool,
    samples: Sequence[int],
    workspace_bytes: Int64s,
    numbers: Mapping[int, int],
    moved: Sequence[Moved],
    waited: Sequence[Waited],
    step_us: float,
) -> IterationRecord:
    """Return the record of an iteration of `sequence`, whose transfers the device has completed with times.

    `samples` are the registry's bytes after each step, `workspace_bytes` is int64[operators], and `numbers` maps a
    tensor's key to its index in the trace."""
    footprint = np.array(samples, np.int64)
    device_peak = int(np.max(footprint + workspace_bytes[sequence.operators]))
    device_peak += staging_bytes(sequence.trace, sequence.plan)
    seen = Counters()
    seen.add(moved, waited, int(np.count_nonzero(sequence.step_event >= 0)), max(samples), device_peak)
    return IterationRecord(
        generation=sequence.plan.generation,
        transition=transition,
        footprint=footprint,
        steps=sequence.operators,
        peak_bytes=seen.peak_bytes,
        device_peak_bytes=seen.device_peak_bytes,
        transfers=tuple(_transfer(event, numbers.get(event.tensor, -1)) for event in moved),
        stalls=tuple(
            Stall(event.step, numbers.get(event.tensor, -1), event.transfer.stall_us)
            for event in waited
            if event.transfer.stall_us
        ),
        passive_swap_ins=seen.passive_swap_ins,
        recomputes=seen.recomputes,
        bytes_out=seen.bytes_out,
        bytes_in=seen.bytes_in,
        raw_bytes_out=seen.raw_bytes_out,
        raw_bytes_in=seen.raw_bytes_in,
        stall_us=seen.stall_us,
        step_us=step_us,
    )


def _transfer(moved: Moved, tensor: int) -> Transfer:
    step, _, event, transfer, passive = moved
    direction, size, raw = transfer.direction, transfer.bytes, transfer.raw_bytes
    return Transfer(tensor, direction, size, step, event, passive, transfer.start_us, transfer.end_us, raw)
