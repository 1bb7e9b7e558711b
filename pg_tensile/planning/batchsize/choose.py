"""Search for the batch size with the highest predicted throughput (AccUDNN, section 4.1, eq. (7)).

The paper descends from the largest trainable batch until nothing stalls. A batch that stalls may still train faster,
and our predictions come from plans that also recompute. So the criterion here is the predicted throughput itself, and
the paper's batch (no_stall.py) is only one of the sizes tried.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

from pg_tensile.errors import BatchSizeError
from pg_tensile.planning.batchsize.learning_rate import BASE_BATCH, RateLaw, scaled_learning_rate

TIE = 0.01  # relative difference of throughput that is ignored: the smaller batch wins, as it takes more steps an epoch
GRAIN = 0.02  # nothing is tried between neighbours whose relative distance is at most this
EVEN = 8  # intermediate sizes are multiples of this where possible
RUNNERS_UP = 12
TRIES = 48  # most sizes predicted
LEAST_STEPS = 16  # of an epoch: with fewer, a larger learning rate does not compensate for the missing updates


class Candidate(NamedTuple):
    """Prediction for one batch size.

    Times are in µs, `samples_per_s` is rows per second. `device_bytes` is the device peak of the plan, workspaces
    included; for an infeasible size it is the least that the size would need, or 0 if the reason is not memory.
    `reason` says why the size is infeasible, or what its plan does.
    """

    batch_size: int
    feasible: bool
    iteration_us: float
    stall_us: float
    samples_per_s: float
    device_bytes: int
    reason: str = ""


class Choice(NamedTuple):
    """Chosen batch size with the learning rate for it.

    `candidates` begins with the chosen one, followed by the others by descending predicted throughput, infeasible ones
    last. `law` is the law by which the learning rate was scaled.
    """

    batch_size: int
    learning_rate: float
    candidates: tuple[Candidate, ...]
    law: RateLaw


def most_rows(rows: int, base_batch: int = BASE_BATCH) -> int:
    """Return the largest batch tried by default for `rows` training rows.

    It leaves at least LEAST_STEPS steps an epoch, but may always be as large as the base batch.
    """
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
    """Choose the smallest of the batch sizes whose predicted throughput is within TIE of the highest.

    Sizes range from `least` to `most` (None means `most_rows`) and never exceed `rows`, the number of training rows. Of
    nearly equal sizes the smallest is preferred because it takes the most steps an epoch. `learning_rate` is the rate
    for `base_batch` rows.

    The search predicts a geometric ladder upwards as long as it fits (memory grows with the batch), the largest size
    that fits and the sizes in `first`. It then refines around the best size, and fills the widest intervals until it
    has `runners_up` alternatives, with at most `tries` predictions in all. A size that needs more than `budget_bytes`
    is never chosen, whatever `predict` returns.

    Raises BatchSizeError if not even `least` rows fit, and OptionError as `scaled_learning_rate` does.
    """
    search = _Search(predict, budget_bytes, max(1, tries))
    most = max(1, min(rows, most_rows(rows, base_batch) if most is None else most))
    least = max(1, min(least, most))
    search.climb(least, most)
    for size in first:
        if least <= size <= search.largest:
            search.try_size(size)
    search.refine()
    search.fill(runners_up + 1)
    chosen = search.chosen()
    ordered = sorted(search.candidates.values(), key=_rank)
    candidates = (chosen, *(candidate for candidate in ordered if candidate is not chosen))
    rate = scaled_learning_rate(learning_rate, base_batch, chosen.batch_size, law)
    return Choice(chosen.batch_size, rate, candidates, law)


def _rank(candidate: Candidate) -> tuple[bool, float, int]:
    return not candidate.feasible, -candidate.samples_per_s, candidate.batch_size


class _Search:
    def __init__(self, predict: Callable[[int], Candidate], budget_bytes: int | None, tries: int) -> None:
        self.predict = predict
        self.budget_bytes = budget_bytes
        self.tries = tries
        self.candidates: dict[int, Candidate] = {}
        self.largest = 0  # largest size known to fit

    def try_size(self, size: int) -> bool:
        """Return whether the size fits; False for a size not yet predicted once the tries are used up."""
        if size not in self.candidates:
            if len(self.candidates) >= self.tries:
                return False
            candidate = self.predict(size)
            if candidate.feasible and self.budget_bytes is not None and candidate.device_bytes > self.budget_bytes:
                candidate = candidate._replace(feasible=False, samples_per_s=0.0, reason="its plan exceeds the budget")
            self.candidates[size] = candidate
            if candidate.feasible:
                self.largest = max(self.largest, size)
        return self.candidates[size].feasible

    def climb(self, least: int, most: int) -> None:
        """Double the size from `least` up to `most` or until it does not fit, then bisect for the largest that fits.

        Raises BatchSizeError if no size fits.
        """
        size = least
        while (self.try_size(size) or not self.candidates[size].device_bytes) and size < most:
            size = min(2 * size, most)
        if not self.largest:
            smallest = next((tried for tried in self.candidates.values() if tried.device_bytes), self.candidates[least])
            raise BatchSizeError(smallest.batch_size, smallest.device_bytes, self.budget_bytes, smallest.reason)
        low, high = self.largest, size
        while low < high and (between := _between(low, high)) is not None and len(self.candidates) < self.tries:
            if self.try_size(between):
                low = between
            else:
                high = between

    def refine(self) -> None:
        """Try sizes between the best or the chosen size and its neighbours until no size worth trying is left."""
        while len(self.candidates) < self.tries:
            sizes = self._sizes()
            centres = {sizes.index(candidate.batch_size) for candidate in (self.best(), self.chosen())}
            pairs = {pair for index in centres for pair in _pairs(sizes[max(index - 1, 0) : index + 2])}
            between = {size for pair in pairs if (size := _between(*pair)) is not None}
            if not between:
                return
            for size in sorted(between):
                self.try_size(size)

    def fill(self, count: int) -> None:
        """Try sizes in the widest intervals until `count` feasible sizes are known."""
        while len(sizes := self._sizes()) < count and len(self.candidates) < self.tries:
            intervals = [pair for pair in _pairs(sizes) if pair[1] - pair[0] > 1]
            if not intervals:
                return
            low, high = max(intervals, key=lambda pair: pair[1] / pair[0])
            self.try_size(_between(low, high) or (low + high) // 2)

    def best(self) -> Candidate:
        return max(self._feasible(), key=lambda candidate: candidate.samples_per_s)

    def chosen(self) -> Candidate:
        enough = (1 - TIE) * self.best().samples_per_s
        fast = (candidate for candidate in self._feasible() if candidate.samples_per_s >= enough)
        return min(fast, key=lambda candidate: candidate.batch_size)

    def _feasible(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates.values() if candidate.feasible]

    def _sizes(self) -> list[int]:
        return sorted(candidate.batch_size for candidate in self._feasible())


def _pairs(sizes: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(sizes))


def _between(low: int, high: int) -> int | None:
    """Return a size near the geometric mean, a multiple of EVEN if possible.

    None means that the interval is too narrow for another size to be worth trying.
    """
    if high - low < 2 or high - low <= GRAIN * low:
        return None
    middle = math.sqrt(low * high)
    even = EVEN * round(middle / EVEN)
    return even if low < even < high else min(max(round(middle), low + 1), high - 1)
