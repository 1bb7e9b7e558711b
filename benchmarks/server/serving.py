"""The predictor with several sessions, while it loads models, and on standbys.

The model is the MLP of predict.py, whose single rows are predicted one after the other, timed in PL/pgSQL:

- **sessions**: the median of one busy session and of eight, and the CPU time that sessions and predictor take for it;
- **beside**: the 99th percentile of one session while others have the predictor load a model of 100 MB, load and plan
  it within a memory budget, and predict all rows of a query with it and with the same model;
- **standbys**: predictions per second of one client of the primary, of a client of each of the primary and a standby,
  and of one more standby; with sessions that poll for answers, as is the default, and with sessions that do not.

`--beside REVISION` measures another revision as well, on a server of its own, in the same rounds. Medians are taken.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psycopg

from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section, once
from benchmarks.server.cluster import fresh_cluster
from benchmarks.server.installation import installation
from benchmarks.server.predict import MODEL, QUERY, set_up
from benchmarks.tables import table
from scripts.cluster import Cluster

THIS = "this"  # revision
SESSIONS = (1, 8)
NUMBERS = ("p50_us", "p99_us", "per_s", "session_cpu_us", "predictor_cpu_us")
CLIENTS = ("one, of the primary", "two, of the primary and a standby", "three, of the primary and two standbys")
STANDBYS = 2
BIG = ("big_one", "big_two")
BIG_ARCHITECTURE = {"type": "mlp", "hidden": [4800, 4800]}  # 100 MB of weights
CACHE = "250MB"  # too small for a large model and another one within a memory budget, which counts twice
MOST_SESSIONS_RATIO = 1.5  # the median of eight sessions over that of one
MOST_P99_US = 5000  # while a model is loaded

Connection = psycopg.Connection[tuple[Any, ...]]

TIMED = """
    CREATE TABLE gate (open int);
    CREATE FUNCTION timed(model text, seconds float8, OUT at float8, OUT us float8) RETURNS SETOF record
    LANGUAGE plpgsql AS $$
    DECLARE
        r rows;
        began timestamptz := clock_timestamp();
        started timestamptz;
    BEGIN
        WHILE clock_timestamp() < began + seconds * interval '1 s' LOOP
            FOR r IN SELECT * FROM rows LIMIT 200 LOOP
                started := clock_timestamp();
                PERFORM predict(model, r);
                at := extract(epoch FROM started);
                us := extract(epoch FROM clock_timestamp() - started) * 1e6;
                RETURN NEXT;
            END LOOP;
        END LOOP;
    END $$
"""


class Call(NamedTuple):
    """One prediction: when it began, in seconds since the epoch, and how long it took, in microseconds."""

    at: float
    us: float


class Work(NamedTuple):
    """How much is measured: rounds, and seconds of each measurement in a round."""

    rounds: int
    seconds: float
    rows: int  # of the query of predict_rows


FULL = Work(rounds=5, seconds=3.0, rows=300_000)
QUICK = Work(rounds=2, seconds=1.0, rows=50_000)


class Server:
    """A server with the models, to be measured with predictions of one of them."""

    def __init__(self, cluster: Cluster, model: str = MODEL) -> None:
        self.cluster, self.model = cluster, model

    def prepare(self) -> None:
        with self.cluster.connect() as conn:
            set_up(conn)
            conn.execute(TIMED)
            for name in BIG:
                conn.execute("SELECT register_model(%s, %s)", (name, json.dumps(BIG_ARCHITECTURE)))
                query = f"{QUERY} LIMIT 1000"
                train = "SELECT train_model(%s, %s, 'late', epochs => 1, batch_size => 500)"
                job = conn.execute(train, (name, query)).fetchone()
                state = conn.execute("SELECT wait_for_job(%s)", job).fetchone()
                if state != ("finished",):
                    raise SystemExit(f"{name} was not trained: {state}")
        self.calls(0.1)  # starts the predictor

    def calls(self, seconds: float, begin: threading.Barrier | None = None, polls: bool = True) -> list[Call]:
        """Return the predictions of one session in so many seconds, after some others and the barrier.

        `polls`: as the default of pg_tensile.predict_spin has it, else the session sleeps at once."""
        with self.cluster.connect() as conn:
            if not polls:
                conn.execute("SET pg_tensile.predict_spin = 0")
            conn.execute("SELECT count(*) FROM timed(%s, 0.1)", (self.model,))
            if begin is not None:
                begin.wait()
            return [Call(*row) for row in conn.execute("SELECT at, us FROM timed(%s, %s)", (self.model, seconds))]

    def cpu_seconds(self) -> tuple[float, float]:
        """Return the CPU time of the sessions that there are, and of the predictor."""
        sessions = predictor = 0.0
        for pid, command in self.cluster.processes().items():
            with contextlib.suppress(OSError):
                threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
                seconds = sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9
                if "-m pyworker predictor" in command:
                    predictor += seconds
                elif command.startswith("postgres: postgres "):
                    sessions += seconds
        return sessions, predictor


# ---- several sessions -----------------------------------------------------------------------------------------------


def measure_sessions(server: Server, work: Work) -> dict[str, Any]:
    """Return p50_us and predictions per second by the number of sessions, and the CPU time of a prediction."""
    result: dict[str, Any] = {}
    for count in SESSIONS:
        begin = threading.Barrier(count + 1)
        with ThreadPoolExecutor(count) as pool:
            running = [pool.submit(server.calls, work.seconds, begin) for _ in range(count)]
            begin.wait()
            before, began = server.cpu_seconds(), time.time()
            time.sleep(work.seconds * 0.9)
            after, ended = server.cpu_seconds(), time.time()
            calls = [call for future in running for call in future.result()]
        counted = sum(began <= call.at < ended for call in calls)
        result[f"p50_us_{count}"] = statistics.median(call.us for call in calls)
        result[f"p99_us_{count}"] = percentile([call.us for call in calls], 99)
        result[f"per_s_{count}"] = counted / (ended - began)
        result[f"session_cpu_us_{count}"] = (after[0] - before[0]) / counted * 1e6
        result[f"predictor_cpu_us_{count}"] = (after[1] - before[1]) / counted * 1e6
    return result


def percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100]


# ---- beside other work ----------------------------------------------------------------------------------------------


def measure_beside(server: Server, work: Work) -> dict[str, Any]:
    """Return p50, p99 and the longest of one session's predictions while each other work goes on, and its seconds."""
    result: dict[str, Any] = {}
    for name, (model, ask) in other_work(work).items():
        with server.cluster.connect() as conn, ThreadPoolExecutor(1) as pool:
            conn.execute("SET pg_tensile.predict_timeout = '10 min'")
            if name == "loading":  # takes the place of the model if it is loaded already
                conn.execute("SELECT predict(%s, r, %s) FROM rows r LIMIT 1", (BIG[1], f"{budget()}B"))
            elif name != "loading and planning":
                conn.execute("SELECT predict(%s, r) FROM rows r LIMIT 1", (model,))
            begin = threading.Barrier(2)
            watching = pool.submit(server.calls, 4 * work.seconds, begin)
            begin.wait()
            began = time.time()
            conn.execute(ask)
            ended = time.time()
            calls = watching.result()
        during = [call.us for call in calls if call.at + call.us / 1e6 > began and call.at < ended]
        result[name] = {
            "p50_us": statistics.median(during),
            "p99_us": percentile(during, 99),
            "longest_us": max(during),
            "seconds": ended - began,
        }
    return result


def other_work(work: Work) -> dict[str, tuple[str, str]]:
    """Return by name what another session does: the model and the query."""
    rows = f"SELECT r.* FROM rows r LIMIT {work.rows}"
    big_rows = f"SELECT r.* FROM rows r LIMIT {work.rows // 30}"
    return {
        "nothing": (MODEL, "SELECT pg_sleep(1)"),
        "loading": (BIG[0], f"SELECT predict('{BIG[0]}', r) FROM rows r LIMIT 1"),
        "loading and planning": (BIG[1], f"SELECT predict('{BIG[1]}', r, '{budget()}B') FROM rows r LIMIT 1"),
        "rows of a large model": (BIG[0], f"SELECT count(*) FROM predict_rows('{BIG[0]}', '{big_rows}')"),
        "rows of the same model": (MODEL, f"SELECT count(*) FROM predict_rows('{MODEL}', '{rows}')"),
    }


def budget() -> int:
    """Return a memory budget that no earlier call has returned: a version within another budget is loaded anew."""
    global _budgets
    _budgets += 1
    return 110_000_000 + _budgets


_budgets = 0

# ---- standbys -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def standby_of(primary: Cluster, number: int) -> Iterator[Server]:
    """Yield a hot standby that streams from the primary."""
    cluster = Cluster(primary.folder.with_name(f"standby{number}"), bin=primary.bin)
    cluster._make_folder()
    try:
        backup = (str(cluster.bin / "pg_basebackup"), "-D", str(cluster.data), "-d", primary.dsn())
        cluster._run(*backup, "-c", "fast", "-R", "-X", "stream")
        cluster.configure({"unix_socket_directories": str(cluster.folder)})
        cluster.start()
        yield Server(cluster)
    finally:
        cluster.remove()


def measure_standbys(servers: Sequence[Server], work: Work, polls: bool) -> dict[str, float]:
    """Return predictions per second of the first server alone, of the first two and so on, a client each."""
    result = {}
    for count in range(1, len(servers) + 1):
        begin = threading.Barrier(count)
        with ThreadPoolExecutor(count) as pool:
            running = [pool.submit(server.calls, work.seconds, begin, polls) for server in servers[:count]]
        result[f"per_s_{count}"] = sum(len(future.result()) for future in running) / work.seconds
    return result


# ---- all ------------------------------------------------------------------------------------------------------------


def measure(servers: Mapping[str, Server], standbys: Sequence[Server], work: Work) -> dict[str, Any]:
    """Return the medians of all rounds, by revision; those of the standbys of this one only."""
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in servers}
    for _ in range(work.rounds):
        for name, server in servers.items():
            measured = {"sessions": measure_sessions(server, work), "beside": measure_beside(server, work)}
            if name == THIS:
                measured["standbys"] = {
                    "polling": measure_standbys([server, *standbys], work, True),
                    "sleeping": measure_standbys([server, *standbys], work, False),
                }
            rounds[name].append(measured)
    return {name: median_of(measured) for name, measured in rounds.items()}


def median_of(measured: Sequence[Any]) -> Any:
    """Return the medians of dictionaries of numbers, of the same keys, nested."""
    if isinstance(measured[0], dict):
        return {key: median_of([one[key] for one in measured]) for key in measured[0]}
    value = statistics.median(measured)
    return round(value, 1) if value < 1000 else round(value)


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the medians of all rounds: rows of the tables sessions, beside and standbys."""
    work, beside = QUICK if run.quick else FULL, run.options.beside
    settings = {"shared_buffers": "256MB", "pg_tensile.model_cache": CACHE, "wal_level": "replica"}
    with contextlib.ExitStack() as stack:
        this = stack.enter_context(fresh_cluster(settings))
        servers = {THIS: Server(this)}
        if beside is not None:
            bin = stack.enter_context(installation(beside))
            servers[beside] = Server(stack.enter_context(fresh_cluster(settings, bin)))
        for server in servers.values():
            server.prepare()
        standbys = [stack.enter_context(standby_of(this, number)) for number in range(STANDBYS)]
        measured = measure(servers, standbys, work)
    yield from rows_of(measured)


def rows_of(measured: Mapping[str, Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for server, found in measured.items():
        for count in SESSIONS:
            numbers = {name: found["sessions"][f"{name}_{count}"] for name in NUMBERS}
            yield {"table": "sessions", "server": server, "sessions": count} | numbers
        for name, numbers in found["beside"].items():
            yield {"table": "beside", "server": server, "beside": name} | numbers
        for way, rates in found.get("standbys", {}).items():
            yield {"table": "standbys", "way": way} | rates


# ---- the document ---------------------------------------------------------------------------------------------------


def checks(results: Results) -> list[Check]:
    medians = {row["sessions"]: row["p50_us"] for row in results.rows("sessions") if row["server"] == THIS}
    ratio, what = medians[8] / medians[1], "median of eight busy sessions over that of one"
    found = [Check("sessions", what, f"{ratio:.2f}", f"at most {MOST_SESSIONS_RATIO}", ratio <= MOST_SESSIONS_RATIO)]
    for row in results.rows("beside"):
        if row["server"] == THIS and row["beside"] in ("loading", "loading and planning"):
            what, p99 = f"99th percentile beside {row['beside']} a model of 100 MB, µs", row["p99_us"]
            found.append(Check("beside", what, f"{p99:,.0f}", f"below {MOST_P99_US:,}", p99 < MOST_P99_US))
    return found


def tables(results: Results) -> list[str]:
    def revision(row: Mapping[str, Any]) -> str:
        return results.runs[row["run"]]["revision"] if row["server"] == THIS else row["server"]

    sessions = [
        (revision(row), str(row["sessions"]), *(f"{row[name]:,.0f}" for name in NUMBERS))
        for row in results.rows("sessions")
    ]
    beside = [
        (revision(row), row["beside"], *(f"{row[name]:,.0f}" for name in ("p50_us", "p99_us", "longest_us")),
         f"{row['seconds']:.1f}")
        for row in results.rows("beside")
    ]  # fmt: skip
    ways = {row["way"]: row for row in results.rows("standbys")}
    standbys = [
        (title, *(f"{ways[way][f'per_s_{count}']:,.0f}" for way in ("polling", "sleeping")))
        for count, title in enumerate(CLIENTS, 1)
    ]
    times = ("p50, µs", "p99, µs")
    headings = ("revision", "sessions", *times, "predictions/s", "CPU of a session, µs", "of the predictor")
    return [
        *table(headings, sessions),
        *table(("revision", "beside", *times, "longest, µs", "seconds"), beside),
        *table(("clients", "predictions/s", "of sessions that do not poll"), standbys),
    ]


BENCHMARK = Section("Several sessions", once("rounds", rows), tables, checks)
