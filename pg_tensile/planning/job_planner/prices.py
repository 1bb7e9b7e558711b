"""Prices of taking tensors off the device, in µs of the job's time, and the parameters in which passes differ.

A recomputation costs the time of its operators. A swap costs the stall that remains where the link is full, and
`link_price` for each µs of link, because that time is missing for other transfers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from pg_tensile.planning.building_blocks.idle import IdleInterval
from pg_tensile.planning.job_planner.off_device import OffDeviceTensors
from pg_tensile.planning.job_planner.swap_slots import SwapSlots
from pg_tensile.planning.trace.lists import Columns

LONGEST_CHAIN = 24  # dropped tensors, each recomputed from the one before: the largest limit among PRICES and THRIFTY


class Prices(NamedTuple):
    """Parameters in which passes differ."""

    link_price: float  # µs of the job's time for each µs of link
    duration_weight: float  # 0: all idle intervals count alike; 1: in proportion to their length
    longest_chain: int = LONGEST_CHAIN
    early_swap_outs: bool = False  # parameters are swapped out while the link is idle, before they have to be
    stretch: float = 1.0  # factor on the latencies where the link's free time is counted: a slow iteration has more


# The passes for one job, in this order: small traces get more of them than large ones. Found by greedy selection from a
# grid, on networks other than those of the benchmarks' section `planner`, by its section `prices`.
PRICES = tuple(
    Prices(*prices)
    for prices in (
        (0.08, 0.3, 8), (0.04, 0.3, 1), (0.02, 0.3, 24), (0.16, 1.0, 4), (0.3, 0.3, 8), (0.6, 0.3, 24),
        (0.08, 0.6, 4), (0.005, 1.0, 2), (0.16, 0.6, 8), (0.04, 1.0, 24), (0.16, 1.0, 2), (0.04, 0.3, 4),
        (0.16, 0.6, 4), (0.02, 0.6, 24), (0.08, 0.3, 4), (0.08, 0.6, 1), (0.04, 0.6, 24), (0.04, 1.0, 4),
        (0.04, 0.0, 8), (0.005, 0.0, 2),
    )
)  # fmt: skip
# For iterations that wait for the link, stretched; found by the same command.
CONGESTED = (Prices(0.3, 0.3, 8), Prices(1.0, 0.8, 4))
# For jobs that have too little of the link or of the host's memory: swaps as dear as all that they keep the link busy,
# and so much dearer that whatever can be recomputed is.
THRIFTY = tuple(Prices(link_price, 0.3, 24) for link_price in (1.0, 30.0, 1000.0))

Way = tuple[int, bool]  # of taking a tensor off the device: (tensor, by a swap)
ExtraCosts = Mapping[Way, float]  # µs


class Price(NamedTuple):
    us: float
    by_swap: bool
    inputs: tuple[int, ...] = ()  # of a recomputation: tensors that have to be resident


@dataclass
class Pricing:
    """Prices in the present state of a pass. `now` is the operator that it has reached."""

    columns: Columns
    launch_us: float
    prices: Prices
    extra_costs: ExtraCosts
    off: OffDeviceTensors
    slots: SwapSlots

    def __post_init__(self) -> None:
        self.start_us = [0.0, *accumulate(self.columns.us)]
        self._whole_us = self.start_us[-1]
        self._scale_us = max(self._whole_us, 1e-9)
        self._bytes, self._operators = self.columns.bytes, self.columns.operators

    def least_us(self, interval: IdleInterval) -> float:
        """Return a lower bound of the price in µs: on a free link, from inputs that are all resident.

        The price itself is computed when the tensor's turn comes.
        """
        least_us = self._link_us(interval.tensor)
        if self.off.idle.crosses_end(interval):
            return least_us
        recompute_us = self.columns.recomputations.us(interval.tensor, interval.version(self.columns))
        return min(least_us, recompute_us + self.launch_us)

    def key(self, interval: IdleInterval, us: float) -> float:
        """Return the sort key of a candidate: the price per byte, the lower the longer the tensor is off the device."""
        tensor, since, until = interval
        start, operators = self.start_us, self._operators
        away_us = start[(until + 1) // 2 % operators] - start[(since // 2 + 1) % operators]
        if until >= 2 * operators or since < 0:
            away_us += self._whole_us
        return (us + 1e-3) / self._bytes[tensor] / max(away_us / self._scale_us, 1e-6) ** self.prices.duration_weight

    def price(self, interval: IdleInterval, now: int) -> Price | None:
        """Return the cheaper way to take the tensor off the device now; None if there is no way.

        A tensor used right before the current operator, by a recomputation, cannot be swapped out before it.
        """
        swap_us = None if interval.since == 2 * now - 1 else self._swap_us(interval, now)
        if not self.off.idle.crosses_end(interval):
            tensor, version = interval.tensor, interval.version(self.columns)
            most_us = math.inf if swap_us is None else swap_us - self.launch_us
            if self.columns.recomputations.us(tensor, version) <= most_us:
                recipe = self.off.recipe(tensor, version, interval.next_user, now)
                if recipe and self.off.chain_length(tensor, recipe.inputs) <= self.prices.longest_chain:
                    us = recipe.us + self.extra_costs.get((tensor, False), 0.0)
                    if us <= most_us:
                        return Price(us + self.launch_us, False, recipe.inputs)
        return None if swap_us is None else Price(swap_us, True)

    def _swap_us(self, interval: IdleInterval, now: int) -> float | None:
        """Return the price of a swap in µs; None if the tensor would not be off the device at any operator."""
        stall_us = self.slots.stall_us(interval, now)
        if stall_us is None:
            return None
        return stall_us + self._link_us(interval.tensor) + self.extra_costs.get((interval.tensor, True), 0.0)

    def _link_us(self, tensor: int) -> float:
        return self.prices.link_price * (self.slots.out_us(tensor) + self.slots.in_us[tensor])
