"""The data of figures, taken from rows: results and curves, by case, method and budget."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from pg_tensile.tools.bench.options import PEER, parse_budget

Row = Mapping[str, Any]
WRONG = 1e-3  # of the largest element: a peer whose gradients differ by more computes something else
T = TypeVar("T")
K = TypeVar("K")


class Result(NamedTuple):
    """A method's result in a case: memory saved in percent of vanilla's peak, and the time of a step as a multiple of
    vanilla's. `right`: the value of the function of that name."""

    case: str
    method: str
    budget: str
    saved: float
    eor: float
    right: bool


class Curve(NamedTuple):
    """Device memory over an iteration (timeline.py). `limit`: the budget in bytes, None without one."""

    case: str
    method: str
    budget: str
    limit: int | None
    ms: Sequence[float]
    bytes: Sequence[int]


def results(rows: Iterable[Row]) -> list[Result]:
    """Return the results of the rows that have the numbers and no error."""
    listed = []
    for row in rows:
        msr, eor = number(row, "msr"), number(row, "eor")
        if not row.get("error") and msr is not None and eor is not None and eor > 0:
            listed.append(Result(case(row), method(row), str(row.get("budget") or ""), 100 * msr, eor, right(row)))
    return listed


def curves(rows: Iterable[Row]) -> list[Curve]:
    """Return the curves of the rows that have a timeline and no error."""
    listed = []
    for row in rows:
        line = row.get("timeline") or {}
        if not row.get("error") and line.get("ms") and line.get("bytes"):
            budget = str(row.get("budget") or "")
            listed.append(Curve(case(row), method(row), budget, budget_bytes(row), line["ms"], line["bytes"]))
    return listed


def case(row: Row) -> str:
    return str(row.get("case") or row.get("model") or "")


def stem(row: Row) -> str:
    """Return the experiment as a part of a file's name."""
    return re.sub(r"[^\w.-]+", "-", str(row.get("experiment") or "bench"))


def method(row: Row) -> str:
    """Return the method of a row without its budget and its limit of planning time.

    A share of activations to keep counts as a budget.
    """
    label = str(row.get("label") or row.get("policy"))
    return label.partition("=")[0] if label.startswith(PEER) else re.sub(r":limit_s=[^:]*", "", label)


def number(row: Row, key: str) -> float | None:
    """Return the number, or None if it is missing or not finite."""
    value = row.get(key)
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else None


def right(row: Row) -> bool:
    """Return whether the results are eager PyTorch's.

    A policy's have to be equal to the bit, if they were compared; a peer's gradients within WRONG. An infinite
    difference is None in JSON.
    """
    if row.get("bit_identical") is not False:
        return True
    difference = number(row, "gradient_difference")
    return method(row).startswith(PEER) and difference is not None and difference <= WRONG


def budget_bytes(row: Row) -> int | None:
    """Return the bytes of a budget like "60%" or "1048576" for this row."""
    vanilla = number(row, "vanilla_peak_bytes")
    if not row.get("budget") or vanilla is None:
        return None
    return parse_budget(str(row["budget"])).nbytes(int(vanilla))


def front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points (saved, eor) that no other point dominates, in saving or in time; ascending by saving."""
    best: list[tuple[float, float]] = []
    for saved, eor in sorted(points, key=lambda point: (-point[0], point[1])):
        if not best or eor < best[-1][1]:
            best.append((saved, eor))
    return best[::-1]


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group values by key, in the order in which keys appear."""
    groups: dict[K, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups
