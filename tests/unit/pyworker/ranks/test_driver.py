"""Jobs with ranks on a real Ray cluster: what the supervisor is told, and what becomes of the job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyworker.wire import FrameType
from scripts.ray_cluster import RayCluster
from tests.unit.pyworker.children.test_trainer import Child, grant, grant_claim
from tests.unit.pyworker.ranks.conftest import Begin, RankedChild, beginning
from tests.unit.ray_cluster import ray_cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]  # a job's ranks take seconds to start


def unplanned(child: RankedChild, claims: int = 1) -> RankedChild:
    """Train a job of the policy none to its end; one with a single rank claims what its first step has taken, too."""
    for generation in range(1, claims + 1):
        grant_claim(child, generation)
    return finished(child)


def planned(child: RankedChild, part: float) -> RankedChild:
    """Train a job to its end under a plan for this part of the memory."""
    child.send(FrameType.PLAN, *grant(child.until(FrameType.TRACE), 4, part))
    return finished(child)


def finished(child: RankedChild) -> RankedChild:
    assert not child.until(FrameType.DONE).header["stopped"]
    return child


def reports(child: Child) -> list[list[dict[str, Any]]]:
    return [header["ranks"] for header in child.headers(FrameType.PROGRESS) if "ranks" in header]


def checkpoint(child: Child) -> tuple[bytes, dict[str, Any]]:
    """The newest complete checkpoint, and its meta."""
    data = b""
    for frame in child.seen:
        if frame.type == FrameType.STATE and frame.header["kind"] == "checkpoint":
            data = (b"" if frame.header["seq"] == 0 else data) + bytes(frame.buffers[0])
            last, meta = frame.header["last"], frame.header["meta"]
    assert last
    return data, meta


def trains(child: Child) -> None:
    child.until(FrameType.PROGRESS, where=lambda header: header.get("epoch", 0) > 1)


@pytest.fixture
def no_ranks_are_left(wait_until: Callable[..., Any]) -> Callable[[RayCluster], None]:
    """A function that waits until all ranks of a cluster have ended."""
    return lambda cluster: wait_until(lambda: not cluster.ranks(), 60)


def test_two_ranks_train_with_the_same_bits_under_any_plan(
    begin: Begin, cluster: RayCluster, no_ranks_are_left: Callable[[RayCluster], None]
) -> None:
    """Batches of 33 rows are divided into 17 and 16, so that the ranks' graphs differ."""
    eager = unplanned(begin(policy="none", batch_size=33))
    no_ranks_are_left(cluster)
    child = planned(begin(batch_size=33), 0.3)
    assert child.weights() == eager.weights()
    assert child.headers(FrameType.VERSION) == eager.headers(FrameType.VERSION)
    trace = next(frame for frame in child.seen if frame.type == FrameType.TRACE).header
    assert trace["device"] == "ray:1" and "train_last" in {graph["name"] for graph in trace["graphs"]}
    last = reports(child)[-1]
    assert [(report["rank"], report["device"]) for report in last] == [(0, "cpu"), (1, "cpu")]
    assert all(report["samples_per_s"] > 0 and report["device_bytes"] > 0 for report in last)
    assert {report["node"] for report in last} <= {cluster.node_address(0), cluster.node_address(1)}
    assert child.headers(FrameType.PROGRESS)[-1]["bytes_swapped"] > 0


@pytest.mark.parametrize(
    ("changes", "sqlstate", "message"),
    [
        ({"token_file": ""}, "28000", "ray_token_file is not set"),
        ({"token_file": "/nowhere"}, "28000", "cannot be read"),
        ({"token_file": __file__}, "28000", "has no token"),
        ({"token_file": "/proc/sys/kernel/random/uuid"}, "28000", "does not accept the token"),
        ({"address": "ray://10.77.1.1:1", "timeout_s": 1}, "08006", "cannot be reached"),
    ],
    ids=["no token", "no file", "another file", "wrong token", "no cluster"],
)
def test_a_cluster_that_cannot_be_used_ends_the_job(
    begin: Begin, changes: dict[str, Any], sqlstate: str, message: str
) -> None:
    """As test_cluster.py checks it without a cluster. Long: it needs a cluster, and processes that import PyTorch."""
    error = begin(ray=changes).until_error()
    assert error["sqlstate"] == sqlstate and message in error["message"] and error["hint"]


def test_a_job_that_was_stopped_goes_on_with_the_same_bits(
    begin: Begin, cluster: RayCluster, no_ranks_are_left: Callable[[RayCluster], None]
) -> None:
    undisturbed = begin(policy="none", epochs=3)
    grant_claim(undisturbed, 1)
    undisturbed.until(FrameType.STATE, where=lambda header: header["kind"] == "checkpoint")
    data, meta = checkpoint(undisturbed)
    finished(undisturbed)
    child = begin(policy="none", epochs=100_000)
    grant_claim(child, 1)
    trains(child)
    child.send(FrameType.STOP, {"checkpoint": True})
    assert child.until(FrameType.DONE).header == {"stopped": True}
    no_ranks_are_left(cluster)
    assert len(checkpoint(child)[1]["ranks"]) == 1
    resumed = unplanned(begin(policy="none", epochs=3, checkpoint=data, resume=meta))
    assert resumed.weights() == undisturbed.weights()
    other = unplanned(begin((1, 1), policy="none", epochs=3, checkpoint=data, resume=meta), claims=2)
    assert other.weights() != undisturbed.weights() and len(other.weights()) == len(undisturbed.weights())


def test_a_rank_that_dies_ends_the_attempt_and_all_ranks(
    begin: Begin, cluster: RayCluster, no_ranks_are_left: Callable[[RayCluster], None]
) -> None:
    child = begin(policy="none", epochs=100_000)
    grant_claim(child, 1)
    trains(child)
    victim = max(cluster.ranks())
    os.kill(victim, signal.SIGKILL)
    error = child.until_error()
    assert error["sqlstate"] == "08006" and "has died" in error["message"]
    no_ranks_are_left(cluster)


def test_a_rank_that_hangs_ends_the_attempt_after_the_time_out(
    begin: Begin, cluster: RayCluster, no_ranks_are_left: Callable[[RayCluster], None]
) -> None:
    """The others wait for it in a collective, as they do when the network is cut."""
    child = begin(policy="none", epochs=100_000, ray={"timeout_s": 20})
    grant_claim(child, 1)
    trains(child)
    os.kill(max(cluster.ranks()), signal.SIGSTOP)
    error = child.until_error()
    assert error["sqlstate"] == "08006" and "has lost the others" in error["message"]
    no_ranks_are_left(cluster)


def test_an_error_of_all_ranks_is_reported_once(
    begin: Begin, cluster: RayCluster, no_ranks_are_left: Callable[[RayCluster], None]
) -> None:
    child = begin(policy="none", optimizer="sgd", learning_rate=1e30, epochs=50)
    grant_claim(child, 1)
    error = child.until_error()
    assert error["sqlstate"] == "22003" and "the loss became" in error["message"]
    assert "lost" not in error
    no_ranks_are_left(cluster)


def test_a_job_waits_for_processors_and_can_be_stopped(begin: Begin) -> None:
    child = begin((9, 9))
    expected = "9 CPUs of the Ray cluster, 4 are free"  # when those of the job before are
    waits = child.until(FrameType.PROGRESS, where=lambda header: header.get("waits_for") == expected).header
    assert waits["phase"] == "waiting"
    child.send(FrameType.STOP, {"checkpoint": False})
    assert child.until(FrameType.DONE).header == {"stopped": True}


def test_a_job_with_a_least_number_of_ranks_begins_with_those_that_there_are(begin: Begin) -> None:
    child = unplanned(begin((2, 9), policy="none", batch_size=48, ray={"timeout_s": 20}))
    assert any(header.get("waits_for") for header in child.headers(FrameType.PROGRESS))
    assert [report["rank"] for report in reports(child)[-1]] == [0, 1, 2, 3]


def test_ranks_know_nothing_of_the_database_and_end_with_the_process_that_drives_them(
    begin: Begin,
    cluster: RayCluster,
    no_ranks_are_left: Callable[[RayCluster], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    secrets = {"PGPASSWORD": "correct horse", "PGHOST": "/somewhere", "PGT_TEST": "battery staple"}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    child = begin(policy="none", epochs=100_000)
    grant_claim(child, 1)
    trains(child)
    ranks = cluster.ranks()
    assert len(ranks) == 2
    for number in ranks:
        seen = (Path("/proc") / str(number) / "environ").read_bytes() + Path(f"/proc/{number}/cmdline").read_bytes()
        assert not any(word.encode() in seen for pair in secrets.items() for word in pair)
    child.process.kill()
    no_ranks_are_left(cluster)


@pytest.mark.parametrize("words", ["raylet", "ray.util.client.server"], ids=["nodes", "client server"])
def test_a_part_of_the_cluster_that_dies_ends_the_attempt(words: str) -> None:
    """All nodes' raylets, or the head's server of clients."""
    with ray_cluster() as cluster, beginning(cluster) as begin:
        child = begin(policy="none", epochs=100_000, ray={"timeout_s": 20})
        grant_claim(child, 1)
        trains(child)
        cluster.kill(words)
        error = child.until_error()
        assert error["sqlstate"] == "08006"
