"""Jobs share a device too small for all of them: each follows the plan that SQL shows and reaches the same weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.plan.validation import validate
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.text import size
from tests.server.pressure import BATCH_SIZE, STEPS, Lab, Sample
from tests.server.support import ENDLESS_ROWS, FOREVER, MLP, Connection, submit, value


@pytest.mark.long
@pytest.mark.parametrize(
    "trained", [(("mlp", 1), ("mlp", 2)), (("mlp", 1), ("cnn", 1), ("mlp", 2))], ids=["two alike", "three mixed"]
)
def test_jobs_share_a_device_and_their_weights_are_those_without_plans(
    lab: Lab, trained: tuple[tuple[str, int], ...]
) -> None:
    lab.set_memory(0.62 * lab.vanilla([network for network, _ in trained]))
    with lab.watch() as watch:
        jobs = [lab.submit(network, seed) for network, seed in trained]
        lab.bring_together(*jobs)
        weights = [lab.digest(job) for job in jobs]
    assert weights == [lab.weights[key] for key in trained]
    assert watch.granted > lab.sizes["mlp"].vanilla and watch.in_use > 0
    events = (
        "SELECT sum((details->>'events')::int) FROM tensile.scheduler_log WHERE job = ANY(%s) AND event = 'planned'"
    )
    assert value(lab.conn, events, jobs) > 0


@pytest.mark.long
def test_a_job_beyond_the_limit_waits_and_priorities_decide_the_next(lab: Lab) -> None:
    """Set memory for the minimal plans of two networks, not of three. Takes seconds: four jobs run, two at a time."""
    least = lab.sizes["mlp"].least
    lab.set_memory(2.8 * least)
    with lab.watch():
        first = lab.submit("mlp", epochs=FOREVER)
        lab.await_training(first)
        generation, granted = lab.used_generation(first), lab.granted(first)
        second = lab.submit("mlp", epochs=FOREVER)
        lab.await_training(second)
        assert lab.used_generation(first) > generation and least <= lab.granted(first) < granted
        third, fourth = (lab.submit("mlp", epochs=2) for _ in range(2))
        for job in (third, fourth):
            reason = lab.await_waiting(job, "needs at least")
            assert size(least) in reason and "the 2 jobs that run" in reason
        assert value(lab.conn, "SELECT set_job_priority(%s, 5)", fourth)  # it waits
        assert value(lab.conn, "SELECT set_job_priority(%s, 40)", first)  # it runs
        assert lab.column(fourth, "state") == lab.column(third, "state") == "waiting"
        lab.await_log("scheduled", None, "priorities have changed")
        lab.cancel(second)
        for job in (fourth, third):
            lab.digest(job)
        began = "SELECT min(id) FROM tensile.scheduler_log WHERE event = 'planned' AND job = %s"
        assert value(lab.conn, began, fourth) < value(lab.conn, began, third)
        lab.await_steps(first)
        lab.cancel(first)


def test_only_its_owner_changes_a_jobs_priority_while_it_goes_on(
    db: Connection, roles: Callable[..., str], connect: Callable[..., Connection]
) -> None:
    job = submit(db, "m", MLP, query=ENDLESS_ROWS)
    with connect(roles("trudy")) as trudy, pytest.raises(psycopg.errors.UndefinedObject) as denied:
        trudy.execute("SELECT set_job_priority(%s, 1)", (job,))
    assert denied.value.diag.message_primary == f"job {job} does not exist"  # in messages to other roles
    for number, priority, sqlstate, message in (
        (0, 1, "42704", "job 0 does not exist"),
        (job, 1_000_000, "22023", "priority"),
        (job, None, "22004", "priority"),
    ):
        with pytest.raises(psycopg.Error, match=message) as error:
            db.execute("SELECT set_job_priority(%s, %s)", (number, priority))
        assert error.value.sqlstate == sqlstate and error.value.diag.message_hint
    assert value(db, "SELECT set_job_priority(%s, 1)", job) is True
    db.execute("SELECT cancel_job(%s)", (job,))
    assert value(db, "SELECT wait_for_job(%s)", job) == "cancelled"
    assert value(db, "SELECT set_job_priority(%s, 1)", job) is False


@pytest.mark.long
def test_a_job_that_never_fits_gets_a_hint_with_a_batch_size_that_does(lab: Lab) -> None:
    lab.set_memory(0.8 * lab.sizes["mlp"].least)
    job = lab.submit("mlp", epochs=1)
    with pytest.raises(psycopg.Error) as refused:
        lab.digest(job)
    diag = refused.value.diag
    assert diag.sqlstate == "53200" and diag.message_primary is not None and diag.message_hint is not None
    assert "operator" in f"{diag.message_primary} {diag.message_detail}"
    suggestion = re.search(r"batch_size => (\d+)", diag.message_hint)
    assert suggestion is not None, diag.message_hint
    batch_size = int(suggestion[1])
    assert 0.4 * BATCH_SIZE < batch_size < BATCH_SIZE
    with lab.watch():
        fits = lab.submit("mlp", epochs=1, batch_size=batch_size)
        lab.digest(fits)


@pytest.mark.long
def test_the_plan_in_sql_is_the_plan_that_is_executed(lab: Lab) -> None:
    lab.set_memory(0.62 * lab.vanilla(["mlp", "mlp"]))
    jobs = [lab.submit("mlp", seed, epochs=FOREVER) for seed in (1, 2)]
    lab.await_training(*jobs)
    for job in jobs:
        first, last, shown = lab.wait_until(lambda job=job: one_generation(lab, job), what=lab.told)
        plan = Plan.build(Event(EventKind[name.upper()], *numbers[:-1]) for name, *numbers in shown["events"])
        trace = Trace.from_bytes(value(lab.conn, "SELECT traces[1] FROM tensile.traces WHERE job = %s", job))
        validate(trace, plan)
        expected = footprint(trace, plan)
        planned = expected.bytes + trace.workspace_bytes[expected.steps]
        assert list(zip(expected.steps.tolist(), planned.tolist(), strict=True)) == shown["footprint"]
        assert expected.device_peak_bytes == shown["planned_bytes"] == planned.max()
        moved = {
            kind: sum(event[-1] for event in shown["events"] if event[0] == kind) for kind in ("swap_in", "swap_out")
        }
        assert 0 < shown["in_bytes"] == moved["swap_in"] and 0 < shown["out_bytes"] <= moved["swap_out"]
        steps = last.steps - first.steps
        assert last.bytes_swapped - first.bytes_swapped == steps * (shown["in_bytes"] + shown["out_bytes"])
        assert last.passive_swap_ins == first.passive_swap_ins  # all swap-ins are planned
        peak = value(lab.conn, "SELECT device_peak_bytes FROM tensile.progress WHERE job = %s", job)
        granted = "SELECT max((details->>'granted_bytes')::bigint) FROM tensile.scheduler_log WHERE job = %s"
        assert shown["planned_bytes"] <= peak <= value(lab.conn, granted, job)
    lab.cancel(*jobs)


def one_generation(lab: Lab, job: int) -> tuple[Sample, Sample, dict[str, Any]] | None:
    """Return two reports of the trainer, at least two epochs apart, and rows of the views in between; None if
    the plan changed meanwhile, or has no events."""
    names = ("planned_bytes", "out_bytes", "in_bytes")
    first = lab.wait_until(lambda: lab.sample(job), what=lab.told)
    row = lab.conn.execute(f"SELECT {', '.join(names)} FROM tensile.plans WHERE job = %s", (job,)).fetchone()
    footprint = lab.conn.execute(
        "SELECT operator, planned_bytes FROM tensile.footprint WHERE job = %s ORDER BY sequence", (job,)
    ).fetchall()
    events = lab.conn.execute(
        "SELECT event, tensor, trigger_operator, deadline_operator, version, delay_us, bytes FROM tensile.plan_events"
        " WHERE job = %s AND generation = %s ORDER BY sequence",
        (job, first.generation),
    ).fetchall()
    lab.await_steps(job, 2 * STEPS)
    last = lab.sample(job)
    if row is None or last is None or last.generation != first.generation or not events:
        return None
    return first, last, dict(zip(names, row, strict=True)) | {"events": events, "footprint": footprint}


@pytest.mark.long
def test_a_promised_slowdown_is_kept_or_refused(lab: Lab) -> None:
    """Nothing is lost of a job's time where the option is 1, so it needs nearly all that it needs without a plan."""
    least = lab.sizes["mlp"].least
    lab.set_memory(1.05 * least)
    with (
        lab.watch(),
        pytest.raises(psycopg.Error, match=r"but may have [0-9,]+ \(for its max_slowdown of 1\)") as refused,
    ):
        lab.digest(lab.submit("mlp", options={"max_slowdown": 1}))
    assert refused.value.diag.sqlstate == "53200" and "Use a larger max_slowdown" in str(
        refused.value.diag.message_hint
    )
    shown = "SELECT slowdown, max_slowdown FROM tensile.progress WHERE job = %s"
    # What it needs depends on how fast the machine was found to be.
    needed = re.search(r"needs at least ([0-9,]+) bytes", refused.value.diag.message_primary or "")
    assert needed is not None
    lab.set_memory(int(needed[1].replace(",", "")) + least / 2)
    careless = lab.submit("mlp", epochs=FOREVER, options={"max_slowdown": 1000})
    lab.await_training(careless)
    slowdown, promise = lab.conn.execute(shown, [careless]).fetchone() or (None, None)
    assert promise == 1000 and slowdown == pytest.approx(1, rel=0.02)  # it has the device to itself
    strict = lab.submit("mlp", epochs=FOREVER, options={"max_slowdown": 1})
    lab.await_waiting(strict, "for its max_slowdown of 1")
    lab.cancel(careless)
    lab.await_training(strict)
    slowdown, promise = lab.conn.execute(shown, [strict]).fetchone() or (None, None)
    assert promise == 1 and slowdown == pytest.approx(1)
    lab.cancel(strict)
