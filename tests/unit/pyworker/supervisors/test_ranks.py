"""Jobs with ranks in the worker and the scheduler: what is stored of their reports, their state, their host memory."""

from __future__ import annotations

from typing import Any, cast

import pytest

from pg_tensile.rules import OPTIONS
from pyworker.cluster_device import cluster_device, on_cluster
from pyworker.supervisors.job import ranks as module
from pyworker.supervisors.job.ranks import (
    INTERVAL,
    MOST_CHARACTERS,
    MOST_RANKS,
    JobRanks,
    asked_ranks,
    checked_reports,
)
from pyworker.supervisors.job.waiting import Waiting
from pyworker.supervisors.scheduling.device_views import host_bytes_left
from pyworker.supervisors.scheduling.job_records import JobRecord, JobRecords, Plan
from pyworker.supervisors.server import Server
from pyworker.wire import ProtocolError
from tests.unit.pyworker.supervisors.plpy import Plpy

WAITS, RUNS = "tensile_worker._job_waits_for", "tensile_worker._job_admitted"


class Recorded(Server):
    """A server that records the calls."""

    def __init__(self) -> None:
        super().__init__(Plpy())
        self.calls: list[tuple[str, Any]] = []

    def call(self, signature: str, *values: Any) -> Any:
        self.calls.append((signature.partition("(")[0], *values))

    def new_calls(self) -> list[tuple[str, Any]]:
        calls, self.calls = self.calls, []
        return calls


def report(rank: Any, **fields: Any) -> dict[str, Any]:
    return {"rank": rank, "node": "10.0.0.7", "device": "cuda:0", "state": "training"} | fields


@pytest.mark.parametrize(("given", "expected"), [(4, [4, 4]), (4.0, [4, 4]), ([1, 2.0], [1, 2]), (None, None)])
def test_the_number_of_ranks(given: object, expected: object) -> None:
    asked = asked_ranks({} if given is None else {"ranks": given})
    assert OPTIONS["properties"]["ranks"]["maximum"] == MOST_RANKS
    assert asked == expected and all(type(number) is int for number in asked or [])


def test_devices_of_clusters_have_names_of_their_own() -> None:
    assert on_cluster(cluster_device(7)) and cluster_device(7) != cluster_device(8)
    assert not any(map(on_cluster, ("cpu", "cuda:0", "auto", "")))


# -- reports ----------------------------------------------------------------------------------------------------------


def test_reports_are_ordered_and_complete() -> None:
    stored = checked_reports([report(1, more="x"), report(0, step=3, samples_per_s=2, device_bytes=1 << 40)])
    assert [row["rank"] for row in stored] == [0, 1]
    keys = {"rank", "node", "device", "state", "step", "samples_per_s", "device_bytes"}
    assert all(set(row) == keys for row in stored) and stored[1]["step"] is None


@pytest.mark.parametrize(
    "reports",
    [
        *("x", {}, [3], [None], [{}], [report(0), report(0)], [report(i) for i in range(MOST_RANKS + 1)]),
        *([report(rank)] for rank in (-1, 1024, 1.0, "1", None, True)),
        *(
            [report(0) | {key: bad}]
            for key in ("node", "device", "state")
            for bad in (None, 1, "x" * (MOST_CHARACTERS + 1))
        ),
        *([report(0) | {key: bad}] for key in ("step", "device_bytes") for bad in (-1, 1.5, "1", True, 1 << 63)),
        *([report(0, samples_per_s=bad)] for bad in (-1, "1", float("inf"), float("nan"), True, 10**400)),
    ],
)
def test_other_reports_break_the_protocol(reports: object) -> None:
    server = Recorded()
    ranks = JobRanks(server, Waiting(server), {"ranks": 2})
    with pytest.raises(ProtocolError):
        ranks.record({"ranks": reports})
    assert server.calls == []


@pytest.mark.parametrize("waits_for", ["", 1, ["4 GPUs"], "x" * (MOST_CHARACTERS + 1)])
def test_other_reasons_break_the_protocol(waits_for: object) -> None:
    server = Recorded()
    with pytest.raises(ProtocolError):
        JobRanks(server, Waiting(server), {"ranks": 2}).record({"waits_for": waits_for})


@pytest.mark.parametrize("progress", [{"ranks": []}, {"waits_for": "4 GPUs"}])
def test_a_job_without_ranks_reports_none(progress: dict[str, Any]) -> None:
    server = Recorded()
    ranks = JobRanks(server, Waiting(server), {})
    ranks.record({"phase": "training", "ranks": None, "waits_for": None})
    with pytest.raises(ProtocolError):
        ranks.record(progress)
    assert server.calls == []


def test_reports_are_stored_once_a_second_or_with_another_state(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    server = Recorded()
    ranks = JobRanks(server, Waiting(server), {"ranks": 2})

    def stores(*reports: dict[str, Any]) -> bool:
        ranks.record({"ranks": list(reports)})
        return [name for name, *_ in server.new_calls()] == ["tensile_worker._job_ranks"]

    assert stores(report(0), report(1))
    assert not stores(report(0, step=1), report(1, step=1))
    assert stores(report(0), report(1, state="validating"))
    assert stores(report(0))
    assert not stores(report(0))
    now += INTERVAL
    assert stores(report(0, step=2))


def test_texts_are_stored_as_the_server_can() -> None:
    server = Recorded()
    JobRanks(server, Waiting(server), {"ranks": 1}).record({"ranks": [report(0, node="a\0\ud800", device="")]})
    ((_, stored),) = server.calls
    assert (stored[0]["node"], stored[0]["device"]) == ("a?", None)


# -- waiting ----------------------------------------------------------------------------------------------------------


def test_a_job_runs_when_it_waits_for_nothing() -> None:
    server = Recorded()
    waiting = Waiting(server)
    waiting.begin_for_memory()
    assert server.new_calls() == []  # _job_trace has changed the state
    waiting.follow_cluster({"phase": "waiting", "waits_for": "2 GPUs"})
    assert server.new_calls() == [(WAITS, "2 GPUs")]
    waiting.end_for_memory()
    assert server.new_calls() == [(WAITS, "2 GPUs")]
    waiting.follow_cluster({"phase": "waiting"})
    waiting.follow_cluster({"loss": 1})
    waiting.follow_cluster({"phase": "waiting", "waits_for": "2 GPUs"})
    assert server.new_calls() == []
    waiting.follow_cluster({"phase": "training"})
    assert server.new_calls() == [(RUNS,)]
    waiting.follow_cluster({"phase": "saving", "waits_for": None})
    waiting.end_for_memory()
    assert server.new_calls() == []


def test_a_job_that_has_processors_may_still_wait_for_memory() -> None:
    server = Recorded()
    waiting = Waiting(server)
    waiting.follow_cluster({"phase": "waiting", "waits_for": "2 GPUs"})
    waiting.begin_for_memory()
    waiting.follow_cluster({"waits_for": None})
    waiting.end_for_memory()
    assert server.calls == [(WAITS, "2 GPUs"), (WAITS,), (RUNS,)]


# -- host memory ------------------------------------------------------------------------------------------------------


def test_host_memory_of_a_cluster_is_not_that_of_this_machine() -> None:
    def planned(device: str, host_bytes: int) -> JobRecord:
        return JobRecord("", published=Plan(device, "", {"host_bytes": host_bytes}, cast(Any, []), ""))

    records = JobRecords({1: planned("cpu", 10), 2: planned("cuda:0", 20), 3: planned(cluster_device(3), 50)})
    assert host_bytes_left("cpu", 100, records, [1]) == 80
    assert host_bytes_left("cuda:0", 100, records, [2]) == 90
    assert host_bytes_left(cluster_device(3), 100, records, [3]) == 100
