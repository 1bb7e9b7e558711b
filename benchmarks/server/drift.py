"""Cost of counting rows for drift, in predictions.

The model is the MLP of predict.py. The same server predicts with pg_tensile.drift_sample_rate 0, with its
default, with 0 again, and with 1, turn by turn in each round:

- **one**, **eight**: busy sessions that predict single rows; the median, and with eight the predictor's CPU time of a
  prediction: with one it polls the socket in between;
- **many**: rows per second of predict_rows.

The two turns without counting show what chance does, which is more than the default costs. So its cost for single rows
is taken from that of counting all of them: as much for each row that is counted. predict_rows counts rows of a batch
together, so its cost is measured at the default, as the least of some runs in each turn.

Each ratio is the median of the rounds' ratios to the turns without counting, before and after.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section, once
from benchmarks.server.cluster import fresh_cluster
from benchmarks.server.predict import MODEL, set_up
from benchmarks.server.serving import QUICK, TIMED, Server, Work, measure_sessions
from benchmarks.tables import table

DEFAULT = 0.01
TURNS = {"none": 0.0, "default": DEFAULT, "none again": 0.0, "all": 1.0}  # name: pg_tensile.drift_sample_rate
MOST = 0.01  # of a prediction without counting
FULL = Work(rounds=30, seconds=0.5, rows=100_000)  # short turns: the machine changes from one to the next
MEASURES = {
    "p50_us_1": "one session, p50, µs",
    "p50_us_8": "eight sessions, p50, µs",
    "predictor_cpu_us_8": "eight sessions, CPU of the predictor, µs",
    "many_us": "predict_rows, µs for a row",
}
MANY_RUNS = 3


class PredictingServer(Server):
    """A server with one model."""

    def prepare(self) -> None:
        with self.cluster.connect() as conn:
            set_up(conn)
            conn.execute(TIMED)
        self.calls(0.1)  # starts the predictor

    def use(self, rate: float) -> None:
        """Set the rate, and wait until the predictor must know it."""
        with self.cluster.connect() as conn:
            conn.execute(f"ALTER SYSTEM SET pg_tensile.drift_sample_rate = {rate}")
            conn.execute("SELECT pg_reload_conf()")
        time.sleep(1)

    def many_us(self, rows: int) -> float:
        """Return the microseconds for a row of predict_rows, the least of MANY_RUNS."""
        seconds = []
        with self.cluster.connect() as conn:
            for _ in range(MANY_RUNS):
                began = time.perf_counter()
                conn.execute("SELECT count(*) FROM predict_rows(%s, %s)", (MODEL, f"SELECT * FROM rows LIMIT {rows}"))
                seconds.append(time.perf_counter() - began)
        return min(seconds) / rows * 1e6


def measure(run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row for each turn: the medians of the measures, and their ratios to the turns without counting."""
    work = QUICK if run.quick else FULL
    rounds: dict[str, list[dict[str, float]]] = {turn: [] for turn in TURNS}
    with fresh_cluster({"shared_buffers": "256MB"}) as cluster:
        server = PredictingServer(cluster)
        server.prepare()
        for _ in range(work.rounds):
            for turn, rate in TURNS.items():
                server.use(rate)
                measured = measure_sessions(server, work) | {"many_us": server.many_us(work.rows)}
                rounds[turn].append({name: measured[name] for name in MEASURES})
    for turn, rows in rounds.items():
        medians = {name: round(statistics.median(row[name] for row in rows), 3) for name in MEASURES}
        ratios = {f"{name}_ratio": None if turn == "none" else _ratio(rounds, turn, name) for name in MEASURES}
        yield {"turn": turn, "rounds": work.rounds} | medians | ratios


def _ratio(rounds: Mapping[str, Sequence[Mapping[str, float]]], turn: str, name: str) -> float:
    """Return the median of the ratios of a measure to that of the other turns in the round that count nothing."""
    bare = [other for other, rate in TURNS.items() if rate == 0 and other != turn]
    pairs = [pair for other in bare for pair in zip(rounds[turn], rounds[other], strict=True)]
    return round(statistics.median(row[name] / without[name] for row, without in pairs), 4)


# ---- the document ---------------------------------------------------------------------------------------------------


def cost(turns: Mapping[str, Mapping[str, Any]], name: str) -> float:
    """Return the share of a measure that the default adds."""
    default, every = (turns[turn][f"{name}_ratio"] - 1 for turn in ("default", "all"))
    return float(default if name == "many_us" else DEFAULT * every)


def by_turn(results: Results) -> dict[str, dict[str, Any]]:
    return {row["turn"]: row for row in results.rows()}


def checks(results: Results) -> list[Check]:
    costs = {title: cost(by_turn(results), name) for name, title in MEASURES.items()}
    asked = f"below {MOST:.0%}"
    return [Check("drift", title, f"{share:.2%} more", asked, share < MOST) for title, share in costs.items()]


def tables(results: Results) -> list[str]:
    turns = by_turn(results)
    rows = [
        (
            title,
            *(f"{turns[turn][name]:,.1f}" for turn in TURNS),
            *(f"{turns[turn][f'{name}_ratio']:.3f}" for turn in TURNS if turn != "none"),
            f"{cost(turns, name):.2%}",
        )
        for name, title in MEASURES.items()
    ]
    ratios = (f"{turn}, ratio" for turn in TURNS if turn != "none")
    return table(("measure", *TURNS, *ratios, "cost of the default"), rows)


BENCHMARK = Section("Counting rows for drift", once("turns", measure), tables, checks)
