"""The demo's training: both models at once, within less memory than they need, and again without a plan."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn

from scripts.cluster import Cluster
from scripts.demo.screen import Connection, DemoError, Rows, console, print_rows, print_sql, rows_of, show
from scripts.demo.server import DATABASE
from scripts.demo.sql import DEVICE, DURING, LATENCY, MEMORY, PLAN, REGISTER, TRAIN, WEIGHTS

SHARE = 0.6  # of the memory that both jobs take without a plan


@dataclass
class Job:
    id: int
    model: str
    epochs: int
    bar: TaskID
    epochs_shown: int = 0
    state: str = "queued"


class SpeedColumn(ProgressColumn):
    """Current activity of a job: its phase, or the loss and the speed."""

    def render(self, task: Any) -> str:
        return f"{task.fields['note']:<31.31}"


def command(function: str, model: str, more: str = "", options: str = "") -> str:
    """Return SELECT function(…) for a model's training.

    `more`: further arguments; `options`: further keys of its options.
    """
    return f"\nSELECT {function}{TRAIN[model].format(more=more, options=options)};\n"


def submit(conn: Connection, model: str, bars: Progress, more: str = "") -> Job:
    sql = command("train_model", model, more)
    print_sql(sql)
    row = conn.execute(sql.encode()).fetchone()
    assert row is not None
    epochs = conn.execute("SELECT epochs FROM tensile.jobs WHERE id = %s", row).fetchone()
    assert epochs is not None
    console.print(f"job {row[0]}", style="dim")
    return Job(row[0], model, epochs[0], bars.add_task(model, total=1.0, note="queued", start=True))


def cancel_leftovers(conn: Connection) -> None:
    """Cancel the jobs of a demo that was interrupted."""
    for (job,) in conn.execute("SELECT job FROM tensile.progress WHERE model = ANY(%s)", (list(TRAIN),)).fetchall():
        conn.execute("SELECT cancel_job(%s)", (job,))
        conn.execute("SELECT tensile._wait_for_change(0)")


def memory_of_both(conn: Connection) -> tuple[int, int]:
    """Return the bytes that both jobs take together without a plan, according to explain_training.

    The first number is that of their tensors, the second what their processes take besides; a plan saves none of that.
    """
    tensors = processes = 0
    for model in TRAIN:
        arguments = {"options": ', "format": "json"'} if "{options}" in TRAIN[model] else {}
        more = "" if arguments else ', options => \'{"format": "json"}\''
        row = conn.execute(command("explain_training", model, more, **arguments).encode()).fetchone()
        assert row is not None
        explanation = json.loads(row[0])
        tensors += int(explanation["memory"]["vanilla_bytes"])
        processes += int(explanation["overhead_bytes"])
    return tensors, processes


def set_memory(cluster: Cluster, conn: Connection, size: str | None) -> None:
    """Set the device memory; `size` None means the whole device."""
    what = "RESET pg_tensile.device_memory" if size is None else f"SET pg_tensile.device_memory = '{size}'"
    with cluster.connect(DATABASE) as admin:
        print_sql(f"ALTER SYSTEM {what}; SELECT pg_reload_conf();")
        admin.execute(f"ALTER SYSTEM {what}".encode())
        admin.execute("SELECT pg_reload_conf()")
    wanted = size or "0"
    while conn.execute("SELECT current_setting('pg_tensile.device_memory')").fetchone() != (wanted,):
        time.sleep(0.01)


def train(conn: Connection, more: str = "", during: Sequence[str] = ()) -> tuple[list[int], dict[str, Rows]]:
    """Submit both jobs and show them until both have ended; return them, and the results of the queries `during`.

    The results are from the last of the moments at which the first query had the most rows, the first job among them.
    """
    bars = Progress(
        TextColumn("{task.description:<12}"), BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}%"),
        SpeedColumn(), console=console,
    )  # fmt: skip
    jobs = [submit(conn, model, bars, more) for model in TRAIN]
    seen: dict[str, Rows] = {}
    print_sql("SELECT * FROM tensile.progress; SELECT * FROM tensile.epoch_metrics;")
    console.print(
        f"{'':<12} {'epoch':>7} {'loss':>8}   validation {'loss':>8} {'accuracy':>9} {'F1':>7} {'s':>6}", style="bold"
    )
    with bars:
        while any(job.state != "ended" for job in jobs):
            for job in jobs:
                update(conn, job, bars)
            results = {sql: rows for sql in during if (rows := rows_of(conn, sql)) is not None}
            if len(results) == len(during) and rows_in(results, jobs[0].model) >= max(1, rows_in(seen, jobs[0].model)):
                seen = results
            time.sleep(0.1)
    for job in jobs:
        conn.execute("SELECT wait_for_job(%s)", (job.id,))  # raises what went wrong
    return [job.id for job in jobs], seen


def rows_in(results: dict[str, Rows], model: str) -> int:
    """Return the number of rows of the first query's result, or 0 if its first row belongs to another model."""
    rows = next((table.rows for table in results.values()), [])
    return len(rows) if rows and rows[0][0] == model else 0


def train_within(cluster: Cluster, conn: Connection) -> list[int]:
    """Train both jobs at once on a device too small for both, show their plans and latencies, and return the jobs."""
    show(conn, command("explain_training", "late_arrival"))
    tensors, processes = memory_of_both(conn)
    besides = f", and {processes / 1e6:.1f} MB for their processes" if processes else ""
    console.print(
        f"\nBoth jobs together take {tensors / 1e6:.1f} MB without a plan. They get {SHARE:.0%} of that{besides}:",
        style="bold",
    )
    set_memory(cluster, conn, f"{(int(SHARE * tensors) + processes) // 1024}kB")
    jobs, seen = train(conn, during=(MEMORY, DEVICE, PLAN))
    for what, sql in DURING.items():
        console.print(f"\n{what}", style="bold")
        print_sql(sql)
        if sql in seen:
            print_rows(seen[sql])
        else:
            console.print("(the jobs were over too soon to look)", style="dim")
    console.print("\nTheir slowest operators, as predicted and as measured, in µs:")
    show(conn, LATENCY, jobs=jobs)
    set_memory(cluster, conn, None)
    return jobs


def compare_weights(conn: Connection, jobs: list[int]) -> None:
    """Train both models again without plans, and check that the weights are the same."""
    again, _ = train(conn, ", policy => 'none'")
    show(conn, WEIGHTS, jobs=jobs + again)
    digests = conn.execute(
        "SELECT count(DISTINCT digest) FROM (SELECT sha256(string_agg(w.data, '' ORDER BY w.seq)) AS digest"
        " FROM tensile.model_versions v JOIN tensile.model_weights w ON w.version = v.id"
        " WHERE v.job = ANY (%s) GROUP BY v.job) AS each",
        (jobs + again,),
    ).fetchone()
    if digests != (len(jobs),):
        raise DemoError("the weights of a run with a plan are not those of a run without one")
    console.print("The same, to the bit: a plan changes where tensors are, never what they are.")


def show_and_register(conn: Connection) -> None:
    print_sql(REGISTER)
    for statement in REGISTER.strip().split(";")[:-1]:
        conn.execute(statement.encode())


def update(conn: Connection, job: Job, bars: Progress) -> None:
    """Update the bar of a job and print the epochs that have ended."""
    row = conn.execute(
        "SELECT state, coalesce(reason, ''), coalesce(phase, ''), coalesce(epoch, 0), coalesce(step, 0),"
        " coalesce(steps, 0), loss, samples_per_s FROM tensile.progress WHERE job = %s",
        (job.id,),
    ).fetchone()
    if row is None:
        job.state = "ended"
        bars.update(job.bar, completed=1.0, note="done")
    else:
        job.state, reason, phase, epoch, step, steps, loss, rate = row
        done = (max(epoch - 1, 0) + (step / steps if steps else 0)) / job.epochs
        training = f"loss {loss:.4f}, {rate:,.0f} rows/s" if loss is not None and rate else ""
        note = training if job.state == "running" and phase == "training" and training else reason or phase or job.state
        bars.update(job.bar, completed=min(done, 1.0), note=note)
    print_epochs(conn, job)


def print_epochs(conn: Connection, job: Job) -> None:
    every = max(1, job.epochs // 8)
    for epoch, loss, seconds, validation_loss, accuracy, f1 in conn.execute(
        "SELECT epoch, t.loss, t.seconds, v.loss, v.accuracy, v.f1 FROM tensile.epoch_metrics t"
        " JOIN tensile.epoch_metrics v USING (job, epoch)"
        " WHERE job = %s AND epoch > %s AND t.split = 'training' AND v.split = 'validation' ORDER BY epoch",
        (job.id, job.epochs_shown),
    ).fetchall():
        job.epochs_shown = epoch
        if epoch % every == 0 or epoch == job.epochs:
            console.print(
                f"{job.model:<12} {epoch:>3}/{job.epochs:<3} {loss:>8.4f}              {validation_loss:>8.4f}"
                f" {accuracy:>9.4f} {f1:>7.4f} {seconds:>6.1f}"
            )
