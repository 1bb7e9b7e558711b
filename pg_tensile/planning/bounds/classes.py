"""Classes of like gaps: what the linear program distinguishes (program.py), so that it stays small.

Of the operators around a gap only their positions among the cuts matter. Gaps that lie alike, and whose bytes cost
about the same, are one class: the share of all their bytes takes the place of each one's own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pg_tensile.planning.bounds.absences import Absences
from pg_tensile.planning.trace.trace import Bools, Floats, Int64s

LIKE = 1.03  # factor between costs of a byte that count as the same; the least of a class holds for all
NEGLECTED = 2e-3  # of the bytes in excess at a cut: the smallest tensors, which count as off the device at no cost


class Classes(NamedTuple):
    """The c classes.

    Positions count cuts from the begin of the iteration; past its end, they continue with K. The cuts `first` …
    `last` - 1 lie in a gap.
    """

    first: Int64s  # [c]: the first cut after the access before
    last: Int64s  # [c]: the first cut at or after the access after
    written: Int64s  # [c]: the last cut at or before the operator that writes the version
    until: Int64s  # [c]: the first cut from which on it cannot be recomputed
    bytes: Int64s  # [c]
    out_us: Floats  # [c]
    in_us: Floats  # [c]
    recompute_us: Floats  # [c]: infinite if that is impossible


def inside(gaps: Absences, cuts: Int64s, count: int) -> Bools:
    """Return bool[g, K]: whether the operator at each of K cuts lies in each gap. `count`: operators."""
    after = (cuts - gaps.first[:, None] - 1) % count  # operators from the access before to the cut
    return after < (gaps.last - gaps.first - 1)[:, None]


def classified(gaps: Absences, cuts: Int64s, excess: Int64s, count: int) -> tuple[Classes, Int64s]:
    """Return the classes, and int64[K]: the bytes at each cut that are neglected.

    `excess` is int64[K]: the bytes that exceed the budget at each cut. Gaps without a cut where it is positive are of
    no use.
    """
    short = inside(gaps, cuts, count) & (excess > 0)
    kept, neglected = _kept(gaps.bytes, short, excess)
    gaps = gaps.take(kept)
    positions = np.concatenate([cuts, cuts + count])
    places = np.stack([
        np.searchsorted(positions, gaps.first, "right"),
        np.searchsorted(positions, gaps.last, "left"),
        np.searchsorted(positions, gaps.written, "right") - 1,
        np.searchsorted(cuts, gaps.until, "left"),
    ])  # fmt: skip
    costs = np.stack([gaps.out_us, gaps.in_us, gaps.recompute_us]) / gaps.bytes
    with np.errstate(divide="ignore"):
        levels = np.clip(np.log(costs) / np.log(LIKE), -1e6, 1e6).round().astype(np.int64)
    alike, member = np.unique(np.concatenate((places, levels)), axis=1, return_inverse=True)
    total, least = np.zeros(alike.shape[1], np.int64), np.full((3, alike.shape[1]), np.inf)
    np.add.at(total, member, gaps.bytes)
    for least_cost, cost in zip(least, costs, strict=True):
        np.minimum.at(least_cost, member, cost)
    first, last, written, until = alike[:4]
    out_us, in_us, recompute_us = least * total
    return Classes(first, last, written, until, total, out_us, in_us, recompute_us), neglected


def _kept(nbytes: Int64s, short: Bools, excess: Int64s) -> tuple[Bools, Int64s]:
    """Return bool[g], the gaps that are kept, and int64[K], the bytes of the others at each cut."""
    order = np.argsort(nbytes, kind="stable")
    total = np.cumsum(short[order] * nbytes[order, None], axis=0)
    small = np.logical_and.accumulate(((total <= NEGLECTED * excess) | ~short[order]).all(axis=1))
    kept = np.ones(len(nbytes), np.bool_)
    kept[order[small]] = False
    return kept & short.any(axis=1), (~kept[:, None] * short * nbytes[:, None]).sum(axis=0)
