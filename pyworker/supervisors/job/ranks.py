"""The ranks of a job that is trained on a Ray cluster: their number, and what they report. Standard library only."""

from __future__ import annotations

import math
import time
from typing import Any

from pyworker.supervisors.job.waiting import Waiting
from pyworker.supervisors.server import Server
from pyworker.wire import ProtocolError

INTERVAL = 1.0  # seconds between two reports that are stored, unless a state or the number of ranks has changed
MOST_RANKS = 1024  # as in rules.json
MOST_CHARACTERS = 300  # of each text
TEXTS = ("node", "device", "state")
COUNTS = ("step", "device_bytes")


def asked_ranks(options: dict[str, Any]) -> list[int] | None:
    """Return the least and the largest number of ranks that a job's options ask for; None: it trains here."""
    ranks = options.get("ranks")
    if ranks is None:
        return None
    return [int(number) for number in (ranks if isinstance(ranks, list) else (ranks, ranks))]


class JobRanks:
    """Stores what the PROGRESS frames of one attempt at a job say of its ranks."""

    def __init__(self, server: Server, waiting: Waiting, options: dict[str, Any]) -> None:
        self._server = server
        self._waiting = waiting
        self._expected = asked_ranks(options) is not None
        self._states: list[tuple[int, str]] = []  # those stored last, with the numbers of the ranks
        self._stored_at = -math.inf

    def record(self, progress: dict[str, Any]) -> None:
        """Store the ranks, and what the job waits for on the cluster. Raises ProtocolError."""
        reports, waits_for = progress.get("ranks"), progress.get("waits_for")
        if not self._expected:
            if reports is not None or waits_for is not None:
                raise ProtocolError("a job without ranks reports ranks")
            return
        if waits_for is not None:
            _check("waits_for", _is_text(waits_for) and waits_for != "")
        if reports is not None:
            self._keep(checked_reports(reports))
        self._waiting.follow_cluster(progress)

    def _keep(self, reports: list[dict[str, Any]]) -> None:
        states = [(report["rank"], report["state"]) for report in reports]
        now = time.monotonic()
        if states == self._states and now - self._stored_at < INTERVAL:
            return
        self._states, self._stored_at = states, now
        text = self._server.text
        stored = [report | {key: text(report[key]) or None for key in TEXTS} for report in reports]
        self._server.call("tensile_worker._job_ranks(jsonb)", stored)


def checked_reports(reports: Any) -> list[dict[str, Any]]:
    """Return the reports in the order of the ranks, with the known keys only. Raises ProtocolError."""
    _check("ranks", isinstance(reports, list) and len(reports) <= MOST_RANKS)
    checked = sorted(map(_checked_report, reports), key=lambda report: report["rank"])
    _check("ranks", len({report["rank"] for report in checked}) == len(checked))
    return checked


def _checked_report(report: Any) -> dict[str, Any]:
    _check("ranks", isinstance(report, dict))
    _check("rank", _is_count(report.get("rank")) and report["rank"] < MOST_RANKS)
    for key in TEXTS:
        _check(key, _is_text(report.get(key)))
    for key in COUNTS:
        _check(key, report.get(key) is None or _is_count(report[key]))
    rate = report.get("samples_per_s")
    _check("samples_per_s", rate is None or _is_rate(rate))
    return {key: report.get(key) for key in ("rank", *TEXTS, *COUNTS, "samples_per_s")}


def _check(key: str, holds: bool) -> None:
    if not holds:
        raise ProtocolError(f'"{key}" of a PROGRESS frame is not what ranks report')


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MOST_CHARACTERS


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e300
