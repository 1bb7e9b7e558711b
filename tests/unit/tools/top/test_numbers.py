"""Numbers in `pg-tensile top`: rates, remaining times, JSON, and texts and bars of fixed widths."""

from __future__ import annotations

import json

import pytest
from rich.cells import cell_len

from pg_tensile.tools.top import cells
from pg_tensile.tools.top.history import POINTS, Course, History
from pg_tensile.tools.top.json_view import document
from pg_tensile.tools.top.snapshot import Epoch, _finite
from tests.unit.snapshots import HOSTILE, MB, NOW, QUEUED, new_job, new_snapshot

# -- what is remembered -----------------------------------------------------------------------------------------------


def course(*samples, **always):
    """Return the history of a job that reported these values, each with a heartbeat as `at`."""
    found = Course()
    for sample in samples:
        at = sample.pop("at")
        found.add(new_job(heartbeat_at=at, **sample, **always), at)
    return found


def test_rates_are_known_from_the_second_snapshot_of_an_attempt():
    job = new_job(heartbeat_at=NOW, bytes_swapped=0)
    history = History()
    history.add(new_snapshot(job), {1: [Epoch(1.0, 0.9, NOW - 30), Epoch(2.0, 0.6, NOW - 10)]})
    assert history.of(job).swap_bytes_per_s is None
    history.add(new_snapshot(new_job(heartbeat_at=NOW + 1, bytes_swapped=MB)))
    assert history.of(job).swap_bytes_per_s == MB
    again = new_job(heartbeat_at=NOW + 2, bytes_swapped=2 * MB, attempts=2)
    history.add(new_snapshot(again))  # its counters start from zero
    assert history.of(again).swap_bytes_per_s is None


def test_progress_counts_epochs_and_steps():
    assert new_job(epoch=1, step=0, steps=10, epochs=4).progress == 0
    assert new_job(epoch=3, step=5, steps=10, epochs=4).progress == 0.625
    assert new_job(epoch=4, step=11, steps=10, epochs=4).progress == 1
    assert new_job(epoch=None, step=3, steps=4, epochs=1).progress == 0.75
    assert new_job(steps=0).progress is None and new_job(**QUEUED).progress is None


def test_rates_are_differences_between_heartbeats():
    found = course(
        {"at": 100.0, "bytes_swapped": 0, "stall_s": 0.0},
        {"at": 110.0, "bytes_swapped": 10 * MB, "stall_s": 5.0},
        {"at": 112.0, "bytes_swapped": 14 * MB, "stall_s": 5.5},
        {"at": 114.0, "bytes_swapped": 20 * MB, "stall_s": 6.0},
        {"at": 116.0, "bytes_swapped": 26 * MB, "stall_s": 6.5},
    )
    assert found.swap_bytes_per_s == pytest.approx(16 * MB / 6)  # over the last 5 s, and the step they begin in
    assert found.stall_share == pytest.approx(0.25)
    found.add(new_job(heartbeat_at=116.0, bytes_swapped=99 * MB), 117.0)  # seen twice
    assert found.swap_bytes_per_s == pytest.approx(16 * MB / 6)
    found.add(new_job(heartbeat_at=116.0), 130.0)  # silent
    assert found.swap_bytes_per_s is None
    found.add(new_job(heartbeat_at=131.0, attempts=2, bytes_swapped=0), 131.0)  # another executor
    assert found.swap_bytes_per_s is None
    found.add(new_job(heartbeat_at=132.0, attempts=2, bytes_swapped=MB), 132.0)
    assert found.swap_bytes_per_s == MB
    unknown = course({"at": 0.0, "bytes_swapped": None}, {"at": 1.0, "bytes_swapped": 5})
    assert unknown.swap_bytes_per_s is None


def test_the_link_of_a_device_is_shared_by_its_jobs():
    history = History()
    for second, moved in ((0, 0), (1, 100 * MB)):
        jobs = [
            new_job(number, heartbeat_at=NOW + second, bytes_swapped=number * moved, device=device)
            for number, device in ((1, "cpu"), (2, "cpu"), (3, "cuda:0"))
        ]
        snapshot = new_snapshot(*jobs, new_job(4, **QUEUED), at=NOW + second)
        history.add(snapshot)
    assert history.link_bytes_per_s(snapshot, "cpu") == pytest.approx(300 * MB)
    assert history.link_bytes_per_s(snapshot, "cuda:0") == pytest.approx(300 * MB)
    assert history.link_bytes_per_s(snapshot, "cuda:1") is None


def test_losses_of_epochs_before_are_asked_for_once_and_a_checkpoint_takes_back_what_came_after():
    history = History()
    job = new_job(epoch=3, step=5, steps=10, loss=0.3)
    assert history.unknown(new_snapshot(job)) == [1]
    history.add(new_snapshot(job), {1: [Epoch(1.0, 0.9, NOW - 40), Epoch(2.0, 0.6, NOW - 20)]})
    assert history.unknown(new_snapshot(job)) == []
    assert history.of(job).losses == [(1.0, 0.9), (2.0, 0.6), (2.5, 0.3)]
    back = new_job(epoch=2, step=5, steps=10, loss=0.7, attempts=2, heartbeat_at=NOW + 1)
    history.add(new_snapshot(back))
    assert history.of(back).losses == [(1.0, 0.9), (1.5, 0.7)]
    history.add(new_snapshot())
    assert history.of(back).losses == [] and history.unknown(new_snapshot(back)) == [1]
    assert history.unknown(new_snapshot(new_job(epoch=1), new_job(2, **QUEUED))) == []


def test_a_long_course_is_thinned_and_keeps_both_ends():
    found = Course()
    for second in range(3 * POINTS):
        found.add(new_job(epoch=1 + second, step=5, epochs=10**6, heartbeat_at=float(second), loss=1.0), float(second))
    assert len(found.losses) <= POINTS
    assert found.losses[0][0] == 0.5 and found.losses[-1][0] == 3 * POINTS - 0.5
    assert found.losses == sorted(found.losses)


# -- JSON -------------------------------------------------------------------------------------------------------------


def test_the_document_is_json_with_numbers_in_bytes_and_seconds():
    snapshot = new_snapshot(new_job(1), new_job(2, **QUEUED, reason=HOSTILE))
    history = History()
    history.add(snapshot)
    text = document(snapshot, history)
    assert text.isascii() and text.isprintable()
    found = json.loads(text)
    assert list(found) == ["at", "devices", "jobs", "queue", "drifted", "tunings"]
    first, second = found["jobs"]
    assert (first["job"], first["state"], first["device_bytes"], first["stall_s"]) == (1, "running", 98 * MB, 0.083)
    assert first["progress"] == 0.325 and (first["eta_s"], first["may_stop_early"]) == (44.0, False)
    assert first["silent_s"] == 0.25 and first["swap_bytes_per_s"] is None
    assert second["progress"] is None and second["reason"] == HOSTILE
    waits = {"job": 2, "model": "model 2", "state": "queued", "reason": HOSTILE}
    assert found["queue"] == [waits | {"priority": 0, "waited_s": 300.0, "retry_in_s": None}]
    assert found["devices"][0]["granted_bytes"] == 203 * MB and found["devices"][0]["link_bytes_per_s"] is None


def test_numbers_that_are_none_do_not_come_as_texts():
    row = {"loss": "NaN", "samples_per_s": "Infinity", "stall_s": 1.5, "model": "NaN", "utilisation": "NaN"}
    expected = {"loss": None, "samples_per_s": None, "stall_s": 1.5, "model": "NaN", "utilisation": None}
    assert _finite(row) == expected


# -- cells ------------------------------------------------------------------------------------------------------------


def test_texts_are_fitted_by_cells():
    assert cells.fit("abc", 5) == "abc  " and cells.fit("abc", 5, right=True) == "  abc"
    assert cells.fit("abcdef", 4) == "abc…" and cells.fit("abc", 0) == "" and cells.fit("abc", 1) == "…"
    for width in range(1, 12):
        assert cell_len(cells.fit("漢字漢字", width)) == width
        assert cell_len(cells.fit(HOSTILE * 1000, width, right=True)) == width
    assert cells.wrap("one two three", 7, 5) == ["one two", "three"]
    assert cells.wrap("one two three four", 8, 2) == ["one two", "three f…"]
    assert cells.wrap("", 8, 2) == []
    for width in range(1, 40):
        for lines in (1, 2, 7):
            found = cells.wrap("漢字 " * 50 + HOSTILE, width, lines)
            assert len(found) <= lines and all(cell_len(line) <= max(width, 2) for line in found)
    assert cells.join(["one", None, "two", "three"], 8) == "one  two"


def test_bars():
    assert cells.bar(None, 4) == "····" and cells.bar(0.5, 4) == "██··" and cells.bar(2.0, 4) == "████"
    assert cells.bar(1 / 32, 4) == "▏···" and cells.bar(31 / 32, 4) == "███▉"
    assert cells.parts_bar([(50, "a"), (25, "b")], 100, 8) == "aaaabb··"
    assert cells.parts_bar([(80, "a"), (80, "b")], 100, 10) == "aaaaaaaabb"
    assert cells.parts_bar([(1, "a")], 0, 3) == "···"


def test_sparklines_show_the_course_over_x():
    assert cells.sparkline([], 8) == "" and cells.sparkline([(1.0, 5.0)], 8) == "▁"
    falling = [(float(x), 7.0 - x) for x in range(8)]
    assert cells.sparkline(falling, 8) == "█▇▆▅▄▃▂▁"
    assert cells.sparkline(falling, 4) == "█▆▃▁"
    assert cells.sparkline([(0.0, 1.0), (10.0, 0.0)], 5) == "████▁", "it stays where nothing was said"
    assert cells.sparkline([(x / 7, 3.0) for x in range(50)], 6) == "▁▁▁▁▁▁"
    tiny = cells.sparkline([(0.0, 1e-300), (1.0, 2e-300)], 4)
    assert len(tiny) == 4 and len(set(tiny)) == 2
