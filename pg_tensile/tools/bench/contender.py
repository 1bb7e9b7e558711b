"""A participant of a benchmark's rounds, and what it adds to its row."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pg_tensile.execution.runtime.record import IterationRecord
from pg_tensile.planning.device.profile import Direction
from pg_tensile.tools.bench.contenders import Stepper, Turn
from pg_tensile.tools.bench.peers import Peaks
from pg_tensile.tools.bench.report import rates
from pg_tensile.tools.bench.row import Row
from pg_tensile.tools.bench.scatter import scatter, scatter_causes
from pg_tensile.tools.bench.transfers import overlap, rate_gbps, transfer_ms

NO_ROUND = "stopped before the first round ended"  # error of a row until then


@dataclass(eq=False)
class Contender:
    """A participant of the rounds, and its results. `error`: why it takes no further part."""

    name: str
    start: Callable[[], Stepper]
    is_peer: bool = False
    turns: list[Turn] = field(default_factory=list)
    latency_us: list[np.ndarray] = field(default_factory=list)  # of the operators, one for each round
    record: IterationRecord | None = None  # of one step, of a policy
    stall_us: float | None = None  # of that step, where the totals do not have it
    peaks: Peaks | None = None  # of one step, of a peer
    context_bytes: int | None = None  # at the end of the last turn
    allocator_peak_bytes: int | None = None
    difference: str | None = None  # from eager PyTorch
    gradient_difference: float | None = None  # of a peer
    error: str | None = None

    def step_ms(self) -> float | None:
        """Return the median over the rounds of the medians of their steps; None without turns."""
        return statistics.median(self.round_ms()) if self.turns else None

    def round_ms(self) -> list[float]:
        return [statistics.median(turn.step_ms) for turn in self.turns]

    def first_step_ms(self) -> float | None:
        return statistics.median(turn.first_ms for turn in self.turns) if self.turns else None

    def mean(self, name: str, rounded: Callable[[float], int] = round) -> int | None:
        """Return the mean of a counter per step; None if nothing was counted."""
        steps = sum(turn.totals.iterations for turn in self.turns if turn.totals)
        return rounded(sum(getattr(turn.totals, name) for turn in self.turns) / steps) if steps else None

    def stall_ms(self) -> float | None:
        if self.stall_us is not None:
            return self.stall_us / 1e3
        stalls_ms = [turn.totals.stall_us / turn.totals.iterations / 1e3 for turn in self.turns if turn.totals]
        return statistics.median(stalls_ms) if stalls_ms else None

    def peak_bytes(self) -> int:
        if self.peaks is not None:
            return self.peaks.peak_bytes
        return max(turn.totals.peak_bytes for turn in self.turns if turn.totals)

    def device_peak_bytes(self) -> int | None:
        of_step = self.peaks or self.record
        return None if of_step is None else of_step.device_peak_bytes

    def round_values(self) -> dict[str, object]:
        """Return the values of a row that its turns have recorded about memory and conditions."""
        used = [turn.allocator for turn in self.turns if turn.allocator is not None]
        return {
            "conditions": [turn.conditions for turn in self.turns],
            "reserved_peak_bytes": max((use.reserved_peak_bytes for use in used), default=None),
            "allocated_peak_bytes": max((use.allocated_peak_bytes for use in used), default=None),
            "allocator_retries": sum(use.retries for use in used) if used else None,
            "context_bytes": self.context_bytes,
        }

    def transfer_values(self) -> dict[str, object]:
        """Return the values of a row about the transfers of the recorded step."""
        if self.record is None:
            return {}
        copies = self.record.transfers
        return {
            "transfer_ms": transfer_ms(copies),
            "out_gbps": rate_gbps(copies, Direction.OUT),
            "in_gbps": rate_gbps(copies, Direction.IN),
            "overlap": overlap(copies, self.record.stall_us),
        }


def measured_row(row: Row, contender: Contender, vanilla_ms: float | None, is_identical: bool | None) -> Row:
    """Return the row of a contender that has taken turns, with what was measured in them."""
    step_ms = [list(turn.step_ms) for turn in contender.turns]
    times = [ms for steps in step_ms for ms in steps]
    median = contender.step_ms() or 0.0
    msr, eor, cbr = rates(row.vanilla_peak_bytes or 0, contender.peak_bytes(), vanilla_ms or 0.0, median)
    row = row.with_values(
        peak_bytes=contender.peak_bytes(),
        device_peak_bytes=contender.device_peak_bytes(),
        allocator_peak_bytes=contender.allocator_peak_bytes,
        msr=msr,
        eor=eor,
        cbr=cbr,
        step_ms_median=median,
        step_ms_min=min(times),
        step_ms_max=max(times),
        step_ms=step_ms,
        round_ms=contender.round_ms(),
        rounds_taken=len(contender.turns),
        first_step_ms=contender.first_step_ms(),
        stall_ms=contender.stall_ms(),
        bytes_out=contender.mean("bytes_out"),
        bytes_in=contender.mean("bytes_in"),
        raw_bytes_out=contender.mean("raw_bytes_out"),
        raw_bytes_in=contender.mean("raw_bytes_in"),
        passive_swap_ins=contender.mean("passive_swap_ins", math.ceil),  # one in many steps explains their scatter
        recomputes=contender.mean("recomputes"),
        bit_identical=is_identical,
        gradient_difference=contender.gradient_difference,
        scatter=scatter(step_ms),
        **contender.round_values(),
        **contender.transfer_values(),
    )
    return row.with_values(scatter_causes=scatter_causes(row))
