"""The batch size with the highest predicted throughput (AccUDNN, section 4.1, eq. (7)).

The paper goes down from the largest batch that is trainable until nothing stalls. A batch may train faster although
something stalls, and ours are predicted with plans that recompute as well; so what counts here is the predicted
throughput itself, and the paper's batch (no_stall.py) is where the search looks first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from pg_tensile.errors import BatchSizeError
from pg_tensile.planning.batchsize.learning_rate import BASE_BATCH, RateLaw, scaled_learning_rate

TIE = 0.01  # relative difference of throughput that is none: then the smaller batch, which takes more steps an epoch
GRAIN = 0.02  # relative distance between neighbours from which on nothing between them is tried
EVEN = 8  # sizes in between are multiples of this where one lies there
RUNNERS_UP = 12
TRIES = 48  # sizes predicted at most
LEAST_STEPS = 16  # of an epoch: with fewer a larger learning rate does not make up for the updates that are missing


class Candidate(NamedTuple):
    """A batch size and what is predicted for it. Times in µs, `samples_per_s` rows a second; `device_bytes`: the device
    peak of its plan, workspaces included; of one that is not feasible the least that it would need, 0 if it is not for
    memory that the model cannot be trained so. `reason`: why it is not feasible, or what its plan does."""

    batch_size: int
    feasible: bool
    iteration_us: float
    stall_us: float
    samples_per_s: float
    device_bytes: int
    reason: str = ""


class Choice(NamedTuple):
    """`candidates`: the chosen one first, then the others by predicted throughput, what is not feasible last. `law`:
    how the learning rate was scaled."""

    batch_size: int
    learning_rate: float
    candidates: tuple[Candidate, ...]
    law: RateLaw


def most_rows(rows: int, base_batch: int = BASE_BATCH) -> int:
    """The largest batch tried by default for that many training rows: LEAST_STEPS steps an epoch are left, but a batch
    may always be as large as the base batch."""
    return max(1, min(rows, max(base_batch, rows // LEAST_STEPS)))


def choose(
    predict: Callable[[int], Candidate],
    rows: int,
    least: int = 1,
    most: int | None = None,
    *,
    budget_bytes: int | None = None,
    learning_rate: float = 1e-3,
    base_batch: int = BASE_BATCH,
    law: RateLaw = "accudnn",
    first: Iterable[int] = (),
    runners_up: int = RUNNERS_UP,
    tries: int = TRIES,
) -> Choice:
    """The batch size from `least` to `most` (None: `most_rows`), never above `rows`, the training rows, that has the
    highest predicted throughput; of those within TIE of it the smallest, which takes the most steps an epoch.

    Predicts a geometric ladder upwards as long as it fits (memory grows with the batch), the largest that fits, the
    sizes in `first`, then what lies between the best and its neighbours, and fills up to so many runners-up. What needs
    more than `budget_bytes` is never chosen, whatever `predict` says. `learning_rate` is meant for `base_batch` rows.
    Raises BatchSizeError if not even `least` rows fit, and OptionError as `scaled_learning_rate` does."""
    search = _Search(predict, budget_bytes, max(1, tries))
    most = max(1, min(rows, most_rows(rows, base_batch) if most is None else most))
    least = max(1, min(least, most))
    search.climb(least, most)
    for size in first:
        if least <= size <= search.largest:
            search.look(size)
    search.refine()
    search.fill(runners_up + 1)
    chosen = search.chosen()
    others = sorted(search.known.values(), key=lambda one: (not one.feasible, -one.samples_per_s, one.batch_size))
    candidates = (chosen, *(one for one in others if one is not chosen))
    rate = scaled_learning_rate(learning_rate, base_batch, chosen.batch_size, law)
    return Choice(chosen.batch_size, rate, candidates, law)


class _Search:
    def __init__(self, predict: Callable[[int], Candidate], budget_bytes: int | None, tries: int) -> None:
        self.predict = predict
        self.budget_bytes = budget_bytes
        self.tries = tries
        self.known: dict[int, Candidate] = {}
        self.largest = 0  # that is known to fit

    def look(self, size: int) -> bool:
        """Whether it fits; nothing more is predicted when the tries are used up."""
        if size not in self.known:
            if len(self.known) >= self.tries:
                return False
            found = self.predict(size)
            if found.feasible and self.budget_bytes is not None and found.device_bytes > self.budget_bytes:
                found = found._replace(feasible=False, samples_per_s=0.0, reason="its plan exceeds the budget")
            self.known[size] = found
            if found.feasible:
                self.largest = max(self.largest, size)
        return self.known[size].feasible

    def climb(self, least: int, most: int) -> None:
        """From the smallest size in doublings up to what fits, and the largest that does. Raises BatchSizeError."""
        size = least
        while (self.look(size) or not self.known[size].device_bytes) and size < most:
            size = min(2 * size, most)
        if not self.largest:
            smallest = next((one for one in self.known.values() if one.device_bytes), self.known[least])
            raise BatchSizeError(smallest.batch_size, smallest.device_bytes, self.budget_bytes, smallest.reason)
        low, high = self.largest, size
        while low < high and (between := _between(low, high)) is not None and len(self.known) < self.tries:
            if self.look(between):
                low = between
            else:
                high = between

    def refine(self) -> None:
        """Between the neighbours of the best and of the chosen size, as long as there is anything to try."""
        while len(self.known) < self.tries:
            sizes = self._sizes()
            around = {sizes.index(one.batch_size) for one in (self.best(), self.chosen())}
            pairs = {pair for at in around for pair in _pairs(sizes[max(at - 1, 0) : at + 2])}
            between = {size for pair in pairs if (size := _between(*pair)) is not None}
            if not between:
                return
            for size in sorted(between):
                self.look(size)

    def fill(self, count: int) -> None:
        """The widest gaps, until so many sizes are known that fit."""
        while len(sizes := self._sizes()) < count and len(self.known) < self.tries:
            gaps = [pair for pair in _pairs(sizes) if pair[1] - pair[0] > 1]
            if not gaps:
                return
            low, high = max(gaps, key=lambda pair: pair[1] / pair[0])
            self.look(_between(low, high) or (low + high) // 2)

    def best(self) -> Candidate:
        return max(self._feasible(), key=lambda one: one.samples_per_s)

    def chosen(self) -> Candidate:
        enough = (1 - TIE) * self.best().samples_per_s
        return min((one for one in self._feasible() if one.samples_per_s >= enough), key=lambda one: one.batch_size)

    def _feasible(self) -> list[Candidate]:
        return [one for one in self.known.values() if one.feasible]

    def _sizes(self) -> list[int]:
        return sorted(one.batch_size for one in self._feasible())


def _pairs(sizes: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(sizes))


def _between(low: int, high: int) -> int | None:
    """A size near the geometric mean, a multiple of EVEN if there is one; None: nothing is worth trying there."""
    if high - low < 2 or high - low <= GRAIN * low:
        return None
    middle = math.sqrt(low * high)
    even = EVEN * round(middle / EVEN)
    return even if low < even < high else min(max(round(middle), low + 1), high - 1)
