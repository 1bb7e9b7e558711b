"""The benchmark of many ranks: rates of worlds, accumulated gradients, sharded states, and its part of the document."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import bench_ranks
from benchmarks.bench_ranks import Point, Rank, World, accumulated, least_share, most_parameters, sharded_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.latency.collectives import ETHERNET_10, NVLINK_4

ALONE = Point(64, 1000.0, 600.0)
PLANNED = Point(128, 2200.0, 1300.0, 1.1)
TIMES = st.floats(0, 1e7)


def test_collectives_follow_the_step_or_hide_behind_its_backward_pass() -> None:
    world = World(8, 700.0)
    assert world.rate(ALONE) == pytest.approx(8 * 64 / 1700 * 1e6)
    assert world.rate(ALONE, hidden=True) == pytest.approx(8 * 64 / 1100 * 1e6)


def test_a_batch_beyond_the_limit_of_all_ranks_is_not_taken() -> None:
    world = World(8, 1e6, most_rows=8 * 100)
    assert world.rate(PLANNED) == 0.0
    assert world.best([ALONE, PLANNED]) == ALONE
    assert World(8, 1e6).best([ALONE, PLANNED]) == PLANNED
    assert World(8, 1e6, most_rows=1).best([ALONE, PLANNED]) is None
    assert world.best([]) is None


@given(collectives_us=TIMES, slowdown=st.floats(1.0, 1.5), more=st.floats(1.1, 8.0))
def test_a_plan_pays_from_the_share_of_collectives_that_is_said(
    collectives_us: float, slowdown: float, more: float
) -> None:
    rows = int(more * 64)
    planned = Point(rows, 1000.0 * slowdown * rows / 64, 0.0, slowdown)
    gain = World(8, collectives_us).rate(planned) / World(8, collectives_us).rate(ALONE)
    share = least_share(ALONE, planned)
    assert math.isclose(gain, 1.0, rel_tol=1e-9) or (gain > 1.0) == (collectives_us / ALONE.us > share)


@given(parts=st.integers(1, 100), collectives_us=TIMES)
def test_accumulated_gradients_never_lower_the_rate(parts: int, collectives_us: float) -> None:
    """As long as adding them takes no longer than the optimizer, which runs once."""
    step = accumulated(ALONE, parts, optimizer_us=50.0, adding_us=40.0)
    assert step.rows == parts * ALONE.rows
    assert World(8, collectives_us).rate(step) >= World(8, collectives_us).rate(ALONE) * (1 - 1e-12)


def test_sharding_saves_the_states_of_the_other_ranks() -> None:
    assert sharded_bytes(1000, 1) == 0
    assert sharded_bytes(1000, 8) == 7000
    assert most_parameters(48e9, 16) == 1.5e9


def test_layouts_of_one_machine_use_its_own_link() -> None:
    times = {name: us(4 << 20) for name, us in bench_ranks.layouts(8, ETHERNET_10, NVLINK_4).items()}
    assert times["hierarchy"] == bench_ranks.ring_us(4 << 20, 8, NVLINK_4)
    assert times["hierarchy"] < min(times["ring"], times["tree"])


def rank(alone: bool = True) -> Rank:
    """Return a rank with steps of its own, without a network; `alone` is whether a batch fits without a plan."""
    steps = SimpleNamespace(parameters=25_000_000, buckets=[4 << 20] * 24, largest=lambda memory: 64 * alone)
    points = {
        "vanilla": [ALONE] * alone,
        "planned": [PLANNED],
        "accumulated": [accumulated(ALONE, 2, 50.0, 40.0)] * alone,
    }
    common = {"steps": steps, "profile": RTX_A6000, "alone": 64 * alone, "most": 128, "most_part": 64 * alone}
    return cast(Rank, SimpleNamespace(**common, **points))


def results(**chosen: bool) -> dict[str, Any]:
    about = {"network": "net", "device": "RTX_A6000"}
    machine = {"cpu": "cpu", "cores": 2, "memory_bytes": 2**30}
    return {
        "machine": machine,
        "versions": {"torch": "2", "python": "3"},
        "rows": [about | bench_ranks.rank_row(rank(**chosen)) | {"most_rows": 4096, "revision": "r"}],
        "worlds": [about | row for row in bench_ranks.worlds(rank(**chosen), 4096)],
        "cards": bench_ranks.card_rows(),
    }


def test_worlds_gain_more_the_slower_their_links_are() -> None:
    rows = [row for row in results()["worlds"] if row["layout"] == "tree" and row["ranks"] == 512]
    gains = [row["gain"] for row in rows]
    assert gains == sorted(gains, reverse=True) and gains[0] > gains[-1] >= 1.0
    assert [row["alone_efficiency"] for row in rows] == sorted(row["alone_efficiency"] for row in rows)
    assert all(row["limited_alone_rate"] is None for row in rows)  # 512 × 64 rows are too many


@pytest.mark.parametrize("alone", [True, False])
def test_the_document_has_all_worlds(alone: bool) -> None:
    text = bench_ranks.page_part(bench_ranks.rounded(results(alone=alone)))
    assert text.count("| net | RTX_A6000 | 10G Ethernet |") == 2
    assert "| 48 | 1,500 | 2,000 |" in text
    assert "None" not in text and "nan" not in text
