"""The view of `pg-tensile top`: made-up snapshots in terminals of any size."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace

import pytest
from rich.cells import cell_len
from rich.console import Console, Group

from pg_tensile.tools.top import details
from pg_tensile.tools.top.cells import flow
from pg_tensile.tools.top.history import History
from pg_tensile.tools.top.state import ViewState
from pg_tensile.tools.top.table import ORDERS
from pg_tensile.tools.top.view import page_lines, view
from tests.unit.snapshots import HOSTILE, MB, NOW, QUEUED, new_device, new_job, new_snapshot, new_tuning

SIZES = [(80, 24), (200, 50), (120, 30), (79, 24), (40, 10), (20, 5), (300, 100), (1, 1)]


def shown(snapshot, history=None, **chosen):
    if history is None:
        history = History()
        history.add(snapshot)
    return ViewState(snapshot, history, "mydb on /tmp:5432 as alice", **chosen)


def texts(what, width=80, height=24):
    """The lines; fails if they do not fit or are not printed as they are."""
    lines = [line.plain for line in view(what, width, height)]
    assert height is None or len(lines) <= height
    for line in lines:
        assert cell_len(line) <= width and line.isprintable(), repr(line)
    return lines


SNAPSHOTS = {
    "nothing": new_snapshot(devices=[]),
    "one": new_snapshot(new_job()),
    "many": new_snapshot(
        *(new_job(number) for number in range(1, 17)),
        *(new_job(number, **QUEUED, reason="all job slots are taken") for number in range(17, 40)),
        devices=[new_device(f"cuda:{number}") for number in range(8)],
    ),
    "without numbers": new_snapshot(
        new_job(1, **(QUEUED | {"state": "starting"})),
        new_job(2, **QUEUED),
        devices=[
            new_device(budget_bytes=None, out_bytes_per_s=None, in_bytes_per_s=None, utilisation=None, granted_bytes=0)
        ],
    ),
    "huge": new_snapshot(
        new_job(
            2**63 - 1, model="m" * 200, epoch=10**6, epochs=2**31 - 1, step=1, steps=2**62, loss=-1.23e-300,
            samples_per_s=1e300, planned_bytes=2**62, bytes_swapped=2**62, stall_s=1e12, started_at=0.0,
            plan_generation=2**62, passive_swap_ins=2**62, priority=-1000, heartbeat_at=0.0,
        ),
        devices=[new_device("d" * 63, budget_bytes=2**62, granted_bytes=2**63 - 1, inference_bytes=2**62)],
    ),
    "hostile": new_snapshot(
        new_job(1, model=HOSTILE, owner=HOSTILE, phase=HOSTILE, policy=HOSTILE, device=HOSTILE),
        new_job(2, owner="bob"),
        new_job(3, **(QUEUED | {"state": "waiting"}), reason=HOSTILE, model=HOSTILE),
        devices=[new_device(HOSTILE)],
    ),
    "tunings": replace(
        new_snapshot(new_job()),
        tunings=(
            new_tuning(1, model=HOSTILE, metric="log_loss"),
            new_tuning(2**63 - 1, best_trial=None, best_value=None, started_at=None, ended=0, pruned=0),
            *(new_tuning(number) for number in range(3, 30)),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_every_view_fits_into_every_terminal(name, width, height):
    snapshot = SNAPSHOTS[name]
    for selected in (None, *(job.job for job in snapshot.jobs)):
        assert len(texts(shown(snapshot, selected=selected), width, height)) == height
    for chosen in ({"alarm": HOSTILE}, {"note": HOSTILE}, {"page": "help"}, {"page": "help", "offset": 10**6}):
        texts(shown(snapshot, **chosen), width, height)
    for order in ORDERS:
        texts(shown(snapshot, order=order), width, height)
    texts(shown(snapshot), width, None)


def test_at_80_by_24_each_job_has_a_line_and_the_selected_one_every_number():
    jobs = [new_job(1, model="digit"), new_job(2, model="letter", epoch=3)]
    reason = "needs at least 73.5 MB of device memory; 38.5 MB of the 210.0 MB of cpu are not needed by the 2 jobs"
    jobs.append(new_job(3, **(QUEUED | {"state": "waiting"}), model="sign", reason=reason))
    lines = texts(shown(new_snapshot(*jobs), selected=1))
    assert lines[0].startswith("pg-tensile top  mydb on /tmp:5432 as alice") and "2 running, 1 waiting" in lines[0]
    assert lines[1].rstrip().endswith("██· 203 MB of 210 MB granted")
    assert "2 jobs" in lines[2] and "link 5.59 GB/s out, 6.52 GB/s in" in lines[2] and "others' load 4.0%" in lines[2]
    titles = ["JOB", "MODEL", "PHASE", "EPOCH", "PROGRESS", "ETA", "LOSS", "COURSE", "SAMP/S", "MEMORY"]
    assert lines[4].split() == titles
    assert lines[5].startswith("▸  1 digit    training") and lines[5].rstrip().endswith("1.20k  101 MB")
    assert " 7/20 " in lines[5] and "0.1134" in lines[5]
    assert lines[6].startswith("   2 letter   training") and " 3/20 " in lines[6]
    assert "queue" in lines[7] and lines[9].startswith("   3 sign     waiting") and "needs at least" in lines[9]
    assert lines[19].startswith("── job 1 digit ──")
    assert lines[20] == "training  epoch 7 of 20  step 5 of 10  loss 0.1134  1.20k samples/s  44s left"
    assert lines[21] == "planned 101 MB  granted 102 MB  peak 100 MB  kept 98.0 MB  unplanned 118 MB"
    assert lines[22] == "swapped 4.14 GB  stall 0.08s  plan 3 costs 1.02x  measured 1.50x  passive 0"
    assert lines[23].startswith("q quit") and "c cancel" in lines[23]
    waiting = texts(shown(new_snapshot(*jobs), selected=3))
    assert " ".join(waiting[20:23]).strip() == "waiting: " + reason


def test_a_wide_terminal_has_all_columns_and_uses_its_width():
    early = {"least_time_left_s": 9.0, "time_left_s": 270.0, "max_slowdown": 1.05, "measured_slowdown": 2.3}
    jobs = new_job(1), new_job(2, owner="bob", device="cuda:0", **early)
    lines = texts(shown(new_snapshot(*jobs)), 200, 50)
    assert set(lines[4].split()) >= {"STEP", "PEAK", "KEPT", "SWAPPED", "SWAP/S", "STALL", "STALL%", "SLOWER", "PRIO"}
    assert {"DEVICE", "OWNER"} <= set(lines[4].split())
    assert max(map(len, lines)) == 200
    assert "cuda:0" in lines[6] and "bob" in lines[6] and "≤4:30" in lines[6] and "2.30x" in lines[6]
    assert " 44s " in lines[5] and "≤" not in lines[5]
    strip = "\n".join(texts(shown(new_snapshot(*jobs), selected=2), 200, 50))
    assert "9.0s to 4:30 left" in strip and "costs 1.02x (at most 1.05x)  measured 2.30x" in strip


def test_narrow_terminals_lose_the_least_important_columns_first():
    seen = [set(texts(shown(new_snapshot(new_job())), width)[4].split()) for width in range(200, 20, -1)]
    for wider, narrower in itertools.pairwise(seen):
        assert narrower <= wider
    assert {"JOB", "MODEL"} <= seen[-1]


@pytest.mark.parametrize("height", [24, 16, 12])
def test_more_jobs_than_lines_are_scrolled_to_the_selected_one(height):
    snapshot = SNAPSHOTS["many"]
    for job in snapshot.jobs:
        lines = texts(shown(snapshot, selected=job.job), 80, height)
        assert [line for line in lines if line.startswith("▸") and f" {job.job} " in line], job.job
    assert any("of 16 ──" in line for line in lines) and any("of 23 ──" in line for line in lines)
    assert sum("model" in line for line in texts(shown(snapshot), 80, None)) == 39


def test_without_jobs_it_says_how_to_submit_one():
    assert "No open jobs: SELECT train_model(…)" in "\n".join(texts(shown(new_snapshot())))
    assert "You see your own jobs only." not in "\n".join(texts(shown(new_snapshot())))
    others = "\n".join(texts(shown(new_snapshot(sees_all=False))))
    assert "You see your own jobs only." in others.replace("\n", " ")


def test_what_others_wrote_is_shown_and_not_obeyed():
    for chosen in ({"selected": 1}, {"selected": 3}, {"alarm": HOSTILE}, {"note": HOSTILE}):
        file = io.StringIO()
        lines = view(shown(SNAPSHOTS["hostile"], **chosen), 160, 40)
        Console(file=file, width=160, color_system=None).print(Group(*lines))
        written = file.getvalue()
        assert "[bold]x[/bold] :boom: 漢字" in written
        assert not {each for each in written if not each.isprintable()} - {"\n"}


def test_a_silent_executor_is_called_so():
    silent = new_job(heartbeat_at=NOW - 45)
    assert "silent 45s" in texts(shown(new_snapshot(silent)))[5]
    assert "silent" not in texts(shown(new_snapshot(new_job(heartbeat_at=NOW - 5))))[5]


def test_a_device_says_how_much_of_its_link_is_used():
    history = History()
    for second in (0, 1):
        at = NOW + second
        snapshot = new_snapshot(new_job(heartbeat_at=at, bytes_swapped=300 * MB * second), at=at)
        history.add(snapshot)
    assert "link 300 MB/s, 2.4% of 12.1 GB/s" in texts(shown(snapshot, history))[2]
    assert "(300 MB/s)" in "\n".join(texts(shown(snapshot, history, selected=1)))
    partly = new_snapshot(*snapshot.jobs, at=snapshot.at, sees_all=False)
    assert "link 300 MB/s by your jobs" in texts(shown(partly, history))[2]


def test_a_device_shows_what_jobs_and_predictor_have_of_it():
    device = new_device(granted_bytes=100 * MB, inference_bytes=50 * MB)
    lines = texts(shown(new_snapshot(devices=[device])), 120)
    assert f" {29 * '█'}{14 * '▒'}{17 * '·'} 100 MB of 210 MB granted" in lines[1]
    assert "predictor 50.0 MB" in lines[2] and "150 MB kept between steps" in lines[2]


def test_a_device_over_its_budget_is_red():
    lines = view(shown(new_snapshot(devices=[new_device(granted_bytes=300 * MB)])), 80, 24)
    assert [span for span in lines[1].spans if span.style == "red"]
    assert "·" not in lines[1].plain


# -- details ----------------------------------------------------------------------------------------------------------


DETAILS = (
    {"job": 7, "model": "late", "owner": "alice", "kind": "train", "state": "failed", "reason": None}
    | {"query": "SELECT *\n  FROM flights", "target": "late", "epochs": 20, "batch_size": 1024, "optimizer": "adamw"}
    | {"split_by": "day", "validation_query": None, "max_time": "00:10:00"}
    | {"learning_rate": 0.001, "validation": 0.2, "seed": 0, "policy": None, "memory_budget": 100 * MB, "priority": 5}
    | {"options": '{"clip": 1}', "attempts": 2, "retries": 0, "rows": 336_776, "version": None, "warnings": None}
    | {"submitted_at": NOW, "started_at": NOW + 1, "ended_at": NOW + 62, "sqlstate": "22000", "error": "no rows"}
    | {"hint": "Ask for some.", "detail": None, "device": "cpu", "planned_policy": "joint", "parameters": 93_642}
    | {"vanilla_bytes": 118 * MB, "least_bytes": 98 * MB, "largest_operator": "addmm", "generation": 3}
    | {"planned_bytes": 100 * MB, "granted_bytes": 102 * MB, "host_bytes": 25 * MB, "out_bytes": 25 * MB}
    | {"in_bytes": 25 * MB, "iteration_us": 12_300.0, "vanilla_us": 11_000.0, "stall_us": 400.0, "recomputes": 2}
    | {"log": [{"at": NOW, "event": "planned", "generation": 3, "reason": "job 2 has come"}]}
    | {"ranks": None}
)
RANK = {"node": "10.0.0.4", "device": "cuda:0", "state": "training", "step": 5, "samples_per_s": 1204.0}
RANK |= {"device_bytes": 98 * MB}
STARTING = RANK | {"device": None, "state": "starting", "step": None, "samples_per_s": None, "device_bytes": None}


def test_parts_of_details_are_not_torn():
    assert flow(["one two", None, "three", "four five six"], 12) == ["one two", "three", "four five six"]
    assert flow(["one two", "three"], 14) == ["one two  three"] and flow([], 14) == []


def test_help_is_not_cut_at_80():
    assert "…" not in "\n".join(texts(shown(new_snapshot(), page="help"), 80, 40)).replace("(…)", "")


def test_details_have_query_options_plan_log_and_error():
    what = shown(new_snapshot(), page="details", details=DETAILS)
    lines = "\n".join(texts(what, 80, 40))
    for part in (
        *("7 late, of alice", "failed", "attempt 2", "no rows (22000)", "Ask for some.", "SELECT * FROM flights"),
        *(
            "batch size 1,024",
            "split by day",
            "at most 00:10:00",
            '{"clip": 1}',
            "memory budget 100 MB",
            "plan 3 by joint",
            "100 MB of 102 MB granted",
        ),
        *("12.3 ms", "+11.8% by the plan", "25.0 MB out, 25.0 MB in", "2 recomputations", "planned 3: job 2 has come"),
    ):
        assert part in lines, part
    assert page_lines(what, 80) > 10


def test_details_have_a_line_for_each_rank():
    ranks = [RANK | {"rank": 0}, RANK | {"rank": 1, "node": "10.0.0.15", "step": 12_345}, STARTING | {"rank": 10}]
    lines = texts(shown(new_snapshot(), page="details", details=DETAILS | {"ranks": ranks}), 80, 40)
    (first,) = [number for number, line in enumerate(lines) if line.startswith("ranks")]
    assert lines[first : first + 4] == [
        "ranks      rank  node       device  state      step  rows/s   memory",
        "              0  10.0.0.4   cuda:0  training      5   1.20k  98.0 MB",
        "              1  10.0.0.15  cuda:0  training  12.3k   1.20k  98.0 MB",
        "             10  10.0.0.4   –       starting      –       –        –",
    ]
    assert lines[first + 4].startswith("log ")
    assert "ranks" not in "\n".join(texts(shown(new_snapshot(), page="details", details=DETAILS), 80, 40))


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_details_fit_and_scroll(width, height):
    hostile = DETAILS | dict.fromkeys(("query", "error", "hint", "reason", "model", "owner"), HOSTILE)
    hostile |= {"log": [{"at": NOW, "event": HOSTILE, "generation": None, "reason": None}] * 8}
    hostile |= {"ranks": [RANK | {"rank": 0} | dict.fromkeys(("node", "device", "state"), HOSTILE)]}
    nothing = dict.fromkeys(DETAILS) | {"kind": "calibrate", "attempts": 0, "query": "", "options": "{}"}
    for row in (hostile, nothing | {"job": 1, "model": "", "state": "queued", "submitted_at": NOW, "priority": 0}):
        for offset in (0, 3, 10**6):
            texts(shown(new_snapshot(), page="details", details=row, offset=offset), width, height)
    assert details.page(hostile, 80)[-1].plain.rstrip()


# -- orders -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "expected"),
    [("job", [1, 2, 3]), ("memory", [2, 1, 3]), ("stall", [3, 1, 2]), ("samples/s", [1, 3, 2]), ("start", [3, 2, 1])],
)
def test_running_jobs_are_in_the_chosen_order(order, expected):
    jobs = [
        new_job(1, planned_bytes=2, device_peak_bytes=9, stall_s=0.2, samples_per_s=9.0, started_at=NOW - 30),
        new_job(2, planned_bytes=None, device_peak_bytes=3, stall_s=None, samples_per_s=None, started_at=NOW - 20),
        new_job(3, planned_bytes=None, device_peak_bytes=None, stall_s=0.3, samples_per_s=5.0, started_at=NOW - 10),
    ]
    assert [job.job for job in shown(new_snapshot(*jobs), order=order).running] == expected


def test_the_queue_is_in_the_order_of_turns():
    def waits(number, state="queued", waited=0.0, priority=0, not_before=None):
        changes = {"state": state, "submitted_at": NOW - waited, "priority": priority, "not_before": not_before}
        return new_job(number, **(QUEUED | changes))

    snapshot = new_snapshot(
        waits(1),
        waits(2, waited=10.0),
        waits(3, waited=1000.0, priority=-2),  # 3.3 steps for waiting
        waits(4, priority=1),
        waits(5, state="interrupted", not_before=NOW + 4, priority=9),
        waits(6, state="waiting"),
        waits(7, state="interrupted", not_before=NOW - 4, priority=2),
        new_job(8),
    )
    assert [job.job for job in snapshot.queue()] == [6, 7, 3, 4, 2, 1, 5]
    never = new_snapshot(*snapshot.jobs, ageing_s=0.0)
    assert [job.job for job in never.queue()] == [6, 7, 4, 2, 1, 3, 5]
    assert "again in 4.0s" in "\n".join(texts(shown(snapshot), 120))


def test_each_tuning_has_a_line():
    tunings = (new_tuning(), new_tuning(2, state="comparing", running=0, pruned=0))
    lines = texts(shown(replace(new_snapshot(new_job()), tunings=tunings)), 120)
    (running,) = [line for line in lines if line.startswith("tuning 1 model 1: 7 of 20 trials")]
    assert all(part in running for part in ("2 running", "3 pruned", "best rmse 0.1134 of trial 5", "for 3"))
    (comparing,) = [line for line in lines if line.startswith("tuning 2 model 2: 7 of 20 trials")]
    assert "comparing" in comparing and "running" not in comparing and "pruned" not in comparing
