"""Checks of the six parts: bits, memory and times that a GPU has to show."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.checks import Check, name_of
from benchmarks.server.sharing import ratio_checks, sharing_checks
from pg_tensile.planning.allocator_rules import DEFAULT_PAGES
from scripts.first_gpu_run.steps import Outcome, Row

# The allocator takes memory in pages: the last of each segment may be partly used, for which the ledger has a margin.
LAST_PAGES = sum(DEFAULT_PAGES)

Checks = Callable[[Sequence[Outcome], bool], list[Check]]

EAGER = 1.01  # times eager PyTorch's step, of the policy none
USED = 0.97  # of its budget, that a plan reserves at least
SAVED = {"50%": 1.08, "35%": 1.20}  # times vanilla's step within that part of the memory, of transformers


def bench_rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, Row]]:
    """Yield the step's name and each row of the benchmark's command that has a result."""
    for outcome in outcomes:
        for row in outcome.rows:
            if "policy" in row and row["error"] is None:
                yield outcome.name, row


def tests(outcomes: Sequence[Outcome], _timed: bool) -> list[Check]:
    """Check that all tests have run and passed."""
    rows = [row for outcome in outcomes for row in outcome.rows if "test" in row]
    if not rows:
        return []
    failed = sum(row["outcome"] == "failed" for row in rows)
    ended = all(outcome.status is not None for outcome in outcomes if any("test" in row for row in outcome.rows))
    found = f"{failed} of {len(rows)}" + ("" if ended else ", and some were not reached")
    return [Check("tests", "failures", found, "0, and all reached", failed == 0 and ended)]


def plans(outcomes: Sequence[Outcome], timed: bool) -> list[Check]:
    """Check bits and memory of each plan and, where the device's times say something, that `none` costs nothing."""
    checks = []
    for title, row in bench_rows(outcomes):
        what, budget, reserved = name_of(title, row), row["budget_bytes"], row["reserved_peak_bytes"]
        if row["policy"].startswith("peer"):
            continue
        same = row["bit_identical"]
        checks.append(Check("plans", f"{what}: results", "identical" if same else "different", "identical", bool(same)))
        if budget is not None and reserved is not None:
            share, most = reserved / budget, budget + LAST_PAGES
            asked = f"≤ {most:,}: the budget and two pages"
            checks.append(Check("plans", f"{what}: reserved", f"{reserved:,}", asked, reserved <= most))
            if row["policy"] == "joint" and timed:
                checks.append(Check("plans", f"{what}: used", f"{share:.1%}", f"≥ {USED:.0%}", share >= USED))
        if row["policy"] == "none" and timed and row["eager_step_ms_median"]:
            ratio = row["step_ms_median"] / row["eager_step_ms_median"]
            checks.append(Check("plans", f"{what} over eager", f"{ratio:.3f}", f"≤ {EAGER}", ratio <= EAGER))
    return checks


def transformers(outcomes: Sequence[Outcome], timed: bool) -> list[Check]:
    checks = plans(outcomes, timed)
    for title, row in bench_rows(outcomes) if timed else ():
        most = SAVED.get(row["budget"] or "") if row["policy"] == "joint" else None
        if most is not None:
            ratio = row["step_ms_median"] / row["vanilla_step_ms_median"]
            checks.append(
                Check("plans", f"{name_of(title, row)}: step", f"{ratio:.3f}", f"≤ {most} × none", ratio <= most)
            )
    return checks


def sharing(outcomes: Sequence[Outcome], timed: bool) -> list[Check]:
    rows = [row for outcome in outcomes for row in outcome.rows if "way" in row]
    return [*sharing_checks(rows), *(ratio_checks(rows) if timed else ()), *tests(outcomes, timed)]


def racefree(outcomes: Sequence[Outcome], timed: bool) -> list[Check]:
    """Check that no sanitizer has ended its step with an error, and what `plans` checks."""
    ended = [outcome for outcome in outcomes if any("test" in row for row in outcome.rows)]
    races = [
        Check("races", outcome.name, outcome.verdict, "passed, or stopped", outcome.status in (0, None))
        for outcome in ended
    ]
    return [*tests(outcomes, timed), *races, *plans(outcomes, timed)]
