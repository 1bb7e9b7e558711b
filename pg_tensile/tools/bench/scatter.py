"""Scatter of a row's steps, and what of the recorded conditions can explain it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from pg_tensile.execution.backends.conditions import IDLE, Conditions
from pg_tensile.planning.latency.load import BUSY
from pg_tensile.tools.bench.row import Row

SCATTERED = 0.05  # scatter from which its causes are looked for
CLOCKS_DIFFER = 0.02
WARMER_C = 5
SLOW_TRANSFERS = 1.1  # times as long as simulated


def scatter(step_ms: Sequence[Sequence[float]]) -> float | None:
    """Return (90th − 10th percentile) / median of all counted steps, `step_ms` by round; None for fewer than two.

    Percentiles are interpolated between steps. Over all steps it has both the jitter within a round and the drift
    between rounds, so a single round has one, too; and the more steps there are, the less it depends on the slowest.
    """
    times = list(chain.from_iterable(step_ms))
    if len(times) < 2:
        return None
    low, median, high = np.percentile(times, (10, 50, 90)).tolist()
    return float((high - low) / median) if median > 0 else None


def scatter_causes(row: Row) -> list[str]:
    """Return what of a measured row can explain its scatter, most direct first; empty if that is at most SCATTERED.

    If nothing can, one text that says what was steady and what was not recorded.
    """
    if row.scatter is None or row.scatter <= SCATTERED:
        return []
    causes = [*clock_causes(row), *memory_causes(row), *load_causes(row), *step_causes(row)]
    return causes or [no_cause(row)]


def readings(row: Row) -> list[Conditions]:
    """Return the conditions of the accelerator at the start and the end of each turn, as far as they are known."""
    both = chain.from_iterable((turn.start, turn.end) for turn in row.conditions or ())
    return [reading for reading in both if reading is not None]


def known(row: Row, name: str) -> list[float]:
    """Return the known values of a field of the conditions, in order of time."""
    values = (getattr(reading, name) for reading in readings(row))
    return [value for value in values if value is not None]


def clock_causes(row: Row) -> Iterator[str]:
    for name, clock in (("sm_clock_mhz", "SM"), ("memory_clock_mhz", "memory")):
        mhz = known(row, name)
        if mhz and max(mhz) > (1 + CLOCKS_DIFFER) * min(mhz):
            yield f"the {clock} clock was {min(mhz):,.0f} to {max(mhz):,.0f} MHz"
    listed = [reading.clocks_event_reasons or () for reading in readings(row)]
    reasons = dict.fromkeys(reason for reasons in listed for reason in reasons if reason != IDLE)
    if reasons:
        yield f"clocks were lowered by {', '.join(reasons)}"
    celsius = known(row, "temperature_c")
    if celsius and max(celsius) - celsius[0] > WARMER_C:
        yield f"the device warmed up from {celsius[0]:.0f} to {max(celsius):.0f} °C"


def memory_causes(row: Row) -> Iterator[str]:
    if row.allocator_retries:
        yield f"the allocator gave its cached memory back {how_often(row.allocator_retries)}, for lack of memory"
    if row.passive_swap_ins:
        yield f"tensors were swapped in passively, on average up to {row.passive_swap_ins:,} a step"


def load_causes(row: Row) -> Iterator[str]:
    turns = row.conditions or ()
    for loads, what in (
        ([turn.host_load for turn in turns], "processors"),
        ([turn.device_load for turn in turns], "device"),
    ):
        most = max((load for load in loads if load is not None), default=0.0)
        if most > BUSY:
            yield f"other processes used {most:.0%} of the {what} in a round"


def step_causes(row: Row) -> Iterator[str]:
    rounds = [steps for steps in row.step_ms or () if len(steps) > 1]
    if rounds:
        ratio = statistics.median(steps[0] / statistics.median(steps[1:]) for steps in rounds)
        if ratio > 1 + SCATTERED:
            yield f"the first counted step of a round took {ratio:.2f} × as long as the others (see --warmup)"
    if row.transfer_ms and row.simulated_transfer_ms:
        ratio = row.transfer_ms / row.simulated_transfer_ms
        if ratio > SLOW_TRANSFERS:
            yield f"transfers took {ratio:.2f} × as long as at the rates of the device's profile"


def no_cause(row: Row) -> str:
    turns = row.conditions or ()
    loads = [load for turn in turns for load in (turn.host_load, turn.device_load) if load is not None]
    recorded = {
        "clocks": bool(known(row, "sm_clock_mhz")),
        "temperature": bool(known(row, "temperature_c")),
        "allocator": row.allocator_retries is not None,
        "other processes": bool(loads),
    }
    steady = [name for name, is_known in recorded.items() if is_known]
    unknown = [name for name, is_known in recorded.items() if not is_known]
    texts = [f"{in_words(steady)} were steady"] if steady else []
    texts += [f"{in_words(unknown)} were not recorded"] if unknown else []
    return f"no cause was seen: {'; '.join(texts)}"


def in_words(names: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def how_often(count: int) -> str:
    return "once" if count == 1 else f"{count:,} times"


def scatter_notes(rows: Sequence[Row]) -> list[str]:
    """Return a line for each row whose steps scatter, with the causes."""
    return [
        f"{row.title}: steps scatter by {row.scatter:.0%}: {'; '.join(row.scatter_causes)}"
        for row in rows
        if row.scatter is not None and row.scatter_causes
    ]
