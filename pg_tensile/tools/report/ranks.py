"""The ranks of a job: processes of a Ray cluster that train it together (docs/operations.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pg_tensile.planning.latency.collectives import collectives, rank_count

if TYPE_CHECKING:
    from pg_tensile.client.record import JobRecord, Row


@dataclass(frozen=True)
class Ranks:
    """The ranks that a job asks for, and those that it has.

    `number` counts those that report, or without reports those of its newest trace; None if neither is known."""

    least: int
    most: int
    number: int | None
    reports: list[Row]  # of tensile.ranks, while the job is open


def ranks_of(record: JobRecord) -> Ranks | None:
    """Return the ranks of a job; None if it trains in one process here."""
    asked = record.job["options"].get("ranks")
    if asked is None:
        return None
    least, most = asked if isinstance(asked, list) else (asked, asked)
    return Ranks(least, most, len(record.ranks) or _captured(record), record.ranks)


def _captured(record: JobRecord) -> int | None:
    """Return the number of ranks that the trace was captured for, which its collectives have."""
    trace = None if record.planned is None else record.planned.trace
    found = [] if trace is None else collectives(trace)
    return None if trace is None or not found else rank_count(trace, found[0])


def ranks_note(ranks: Ranks) -> str:
    """Return where the ranks are, if they report, and how many the job asks for."""
    asked = f"{ranks.least} to {ranks.most} asked for" if ranks.least < ranks.most else ""
    devices = ", ".join(dict.fromkeys(report["device"] for report in ranks.reports if report["device"]))
    nodes = list(dict.fromkeys(report["node"] for report in ranks.reports))
    where = f"on {nodes[0] if len(nodes) == 1 else f'{len(nodes):,} machines'}" if nodes else "of a Ray cluster"
    return "; ".join(part for part in (f"{devices} {where}".strip(), asked) if part)


def about_ranks(ranks: Ranks) -> list[tuple[str, str]]:
    """Return the name of each rank that reports, and where it is and what it does."""
    return [(f"rank {report['rank']}", _about(report)) for report in ranks.reports]


def _about(report: Row) -> str:
    step = None if report["step"] is None else f"step {report['step']:,}"
    where = " of ".join(part for part in (report["device"], report["node"]) if part)
    return ", ".join(part for part in (where, report["state"], step) if part)
