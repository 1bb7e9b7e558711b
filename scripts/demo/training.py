"""The demo's trainings: one model by itself, then two at once within less memory than they need, and without a plan."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn

from scripts.cluster import Cluster
from scripts.demo.screen import Connection, DemoError, Rows, console, print_rows, print_sql, rows_of, show
from scripts.demo.server import DATABASE
from scripts.demo.sql import LEARN, MEMORY, TRAIN, WEIGHTS

SHARE = 0.6  # of the memory that both jobs take without a plan


@dataclass
class Job:
    id: int
    model: str
    epochs: int
    bar: TaskID
    state: str = "queued"


class ActivityColumn(ProgressColumn):
    """Current activity of a job: its phase, or the pass over the rows, the loss and the speed."""

    def render(self, task: Any) -> str:
        return str(task.fields["note"])


def command(function: str, model: str, more: str = "") -> str:
    """Return SELECT function(…) for a model's training; `more`: further arguments."""
    return f"\nSELECT {function}{TRAIN[model].format(more=more)};\n"


def commands(more: str = "") -> dict[str, str]:
    return {model: command("train_model", model, more) for model in TRAIN}


def submit(conn: Connection, model: str, sql: str, bars: Progress) -> Job:
    print_sql(sql)
    row = conn.execute(sql.encode()).fetchone()
    assert row is not None
    epochs = conn.execute("SELECT epochs FROM tensile.jobs WHERE job = %s", row).fetchone()
    assert epochs is not None
    console.print(f"job {row[0]}", style="dim")
    return Job(row[0], model, epochs[0], bars.add_task(model, total=1.0, note="queued", start=True))


def cancel_leftovers(conn: Connection) -> None:
    """Cancel the jobs of a demo that was interrupted."""
    models = ["price", *TRAIN]
    for (job,) in conn.execute("SELECT job FROM tensile.progress WHERE model = ANY(%s)", (models,)).fetchall():
        conn.execute("SELECT cancel_job(%s)", (job,))
        conn.execute("SELECT tensile_worker._wait_for_change(0)")


def learn(conn: Connection) -> None:
    """Train the first model with the defaults, and say how long that took."""
    started = time.monotonic()
    (job,), _ = train(conn, {"price": LEARN})
    row = conn.execute(
        "SELECT (training->>'epochs')::int, training->>'stopped' FROM tensile.model_versions WHERE job = %s", (job,)
    ).fetchone()
    assert row is not None
    epochs, stopped = row
    why = ", when more of them no longer made it better" if stopped == "early_stopping" else ""
    console.print(f"Trained in {time.monotonic() - started:.0f} s. It ended after {epochs} passes over the rows{why}.")


def memory_of_both(conn: Connection) -> tuple[int, int]:
    """Return the bytes that both jobs take together without a plan, according to explain_training.

    The first number is that of their tensors, the second what their processes take besides; a plan saves none of that.
    """
    tensors = processes = 0
    for model in TRAIN:
        explain = command("explain_training", model, """, options => '{"format": "json"}'""")
        row = conn.execute(explain.encode()).fetchone()
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


def train(conn: Connection, statements: Mapping[str, str], during: str = "") -> tuple[list[int], Rows | None]:
    """Submit a job for each model and show them until all have ended; return them, and what the query `during` gave.

    Its result is from the last of the moments at which it had the most rows, the first job's among them.
    """
    bars = Progress(TextColumn("{task.description:<8}"), BarColumn(bar_width=24), ActivityColumn(), console=console)
    jobs = [submit(conn, model, sql, bars) for model, sql in statements.items()]
    seen: Rows | None = None
    with bars:
        while any(job.state != "ended" for job in jobs):
            for job in jobs:
                update(conn, job, bars)
            result = rows_of(conn, during) if during else None
            if result and result.rows[0][0] == jobs[0].model and (not seen or len(result.rows) >= len(seen.rows)):
                seen = result
            time.sleep(0.1)
    for job in jobs:
        conn.execute("SELECT wait_for_job(%s)", (job.id,))  # raises what went wrong
    return [job.id for job in jobs], seen


def train_within(cluster: Cluster, conn: Connection) -> list[int]:
    """Train both jobs at once on a device too small for both, show what memory they took, and return the jobs."""
    with console.status("Finding out how much memory both need"):
        tensors, processes = memory_of_both(conn)
    besides = f", and {processes / 1e6:.1f} MB for their processes" if processes else ""
    console.print(
        f"\nTogether, two such trainings need {tensors / 1e6:.1f} MB (explain_training says so before they start)."
        f" They get {SHARE:.0%} of that{besides}:"
    )
    set_memory(cluster, conn, f"{(int(SHARE * tensors) + processes) // 1024}kB")
    jobs, seen = train(conn, commands(), during=MEMORY)
    console.print("\nWhile both trained:")
    print_sql(MEMORY)
    if seen is not None:
        print_rows(seen)
    else:
        console.print("(the jobs were over too soon to look)", style="dim")
    set_memory(cluster, conn, None)
    return jobs


def compare_weights(cluster: Cluster, conn: Connection, jobs: list[int]) -> None:
    """Train both models again without plans, and check as a superuser that the weights are the same."""
    again, _ = train(conn, commands(", policy => 'none'"))
    with cluster.connect(DATABASE) as admin:
        show(admin, WEIGHTS, jobs=jobs + again)
        digests = admin.execute(
            "SELECT count(DISTINCT digest) FROM (SELECT sha256(string_agg(w.data, '' ORDER BY w.seq)) AS digest"
            " FROM tensile.model_versions v JOIN tensile_internal.model_weights w ON w.version = v.version_id"
            " WHERE v.job = ANY (%s) GROUP BY v.job) AS each",
            (jobs + again,),
        ).fetchone()
    if digests != (len(jobs),):
        raise DemoError("the weights of a run with a plan differ from those of a run without one")
    console.print("The same, to the bit: a plan changes where numbers are kept, never what they are.", style="bold")


def update(conn: Connection, job: Job, bars: Progress) -> None:
    """Update the bar of a job."""
    row = conn.execute(
        "SELECT state, coalesce(reason, ''), coalesce(phase, ''), coalesce(epoch, 0), coalesce(step, 0),"
        " coalesce(steps, 0), loss, samples_per_s FROM tensile.progress WHERE job = %s",
        (job.id,),
    ).fetchone()
    if row is None:
        job.state = "ended"
        bars.update(job.bar, completed=1.0, note="done")
        return
    job.state, reason, phase, epoch, step, steps, loss, rate = row
    done = (max(epoch - 1, 0) + (step / steps if steps else 0)) / job.epochs
    training = f"pass {epoch}, loss {loss:.4f}, {rate:,.0f} rows/s" if loss is not None and rate else ""
    note = training if job.state == "running" and phase == "training" and training else reason or phase or job.state
    bars.update(job.bar, completed=min(done, 1.0), note=note)
