"""`make bench-drift`: cost of counting rows for drift, in predictions.

The model is the MLP of bench_predict.py. The same server predicts with pg_tensile.drift_sample_rate 0, with its
default, with 0 again, and with 1, turn by turn in each round:

- **one**, **eight**: busy sessions that predict single rows; the median, and with eight the predictor's CPU time of a
  prediction: with one it polls the socket in between;
- **many**: rows per second of predict_rows.

The two turns without counting show what chance does, which is more than the default costs. So its cost for single rows
is taken from that of counting all of them: as much for each row that is counted. predict_rows counts rows of a batch
together, so its cost is measured at the default, as the least of some runs in each turn.

Each ratio is the median of the rounds' ratios to the turns without counting, before and after. Results go to
benchmarks/results/drift-host.json and as a table to docs/benchmarks.md; `--document` writes the table of the existing
results, `--quick` tries everything and writes no file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench_predict import MODEL, set_up
from benchmarks.bench_serving import QUICK, TIMED, Server, Work, measure_sessions
from benchmarks.scenarios import RESULTS as FOLDER
from benchmarks.scenarios import Check, measured_on, print_checks, verdicts, write_document
from benchmarks.server.cluster import fresh_cluster
from benchmarks.tables import table
from pg_tensile.tools.bench.report import machine, versions

RESULTS = FOLDER / "drift-host.json"
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


def run(work: Work) -> dict[str, Any]:
    rounds: dict[str, list[dict[str, float]]] = {turn: [] for turn in TURNS}
    with fresh_cluster({"shared_buffers": "256MB"}) as cluster:
        server = PredictingServer(cluster)
        server.prepare()
        for number in range(work.rounds):
            print(f"round {number + 1} of {work.rounds} …", flush=True)
            for turn, rate in TURNS.items():
                server.use(rate)
                measured = measure_sessions(server, work) | {"many_us": server.many_us(work.rows)}
                rounds[turn].append({name: measured[name] for name in MEASURES})
        with cluster.connect() as conn:
            counted = conn.execute("SELECT sum(rows)::bigint FROM tensile.drift_counts").fetchone()
    medians = {
        turn: {name: round(statistics.median(row[name] for row in rows), 3) for name in MEASURES}
        for turn, rows in rounds.items()
    }
    ratios = {turn: {name: _ratio(rounds, turn, name) for name in MEASURES} for turn in TURNS if turn != "none"}
    common = {"machine": machine(None), "versions": versions(), "rounds": work.rounds}
    return common | {"counted_rows": counted and counted[0], "medians": medians, "ratios": ratios}


def _ratio(rounds: Mapping[str, Sequence[Mapping[str, float]]], turn: str, name: str) -> float:
    """Return the median of the ratios of a measure to that of the other turns in the round that count nothing."""
    bare = [other for other, rate in TURNS.items() if rate == 0 and other != turn]
    pairs = [pair for other in bare for pair in zip(rounds[turn], rounds[other], strict=True)]
    return round(statistics.median(row[name] / without[name] for row, without in pairs), 4)


# ---- the document ---------------------------------------------------------------------------------------------------


def cost(results: Mapping[str, Any], name: str) -> float:
    """Return the share of a measure that the default adds."""
    ratios = results["ratios"]
    return float(ratios["default"][name] - 1 if name == "many_us" else DEFAULT * (ratios["all"][name] - 1))


def checks(results: Mapping[str, Any]) -> list[Check]:
    return [
        Check("drift", title, f"{cost(results, name):.2%} more", f"below {MOST:.0%}", cost(results, name) < MOST)
        for name, title in MEASURES.items()
    ]


def page_part(results: Mapping[str, Any]) -> str:
    """Return the generated part of the section."""
    rows = [
        (
            title,
            *(f"{results['medians'][turn][name]:,.1f}" for turn in TURNS),
            *(f"{results['ratios'][turn][name]:.3f}" for turn in TURNS if turn != "none"),
            f"{cost(results, name):.2%}",
        )
        for name, title in MEASURES.items()
    ]
    ratios = (f"{turn}, ratio" for turn in TURNS if turn != "none")
    lines = [
        *(measured_on("host", results["machine"], results["versions"], results["versions"]["revision"]), ""),
        *(verdicts(checks(results), ()), ""),
        *table(("measure", *TURNS, *ratios, "cost of the default"), rows),
    ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="bench_drift", description="What counting rows for drift costs.")
    parser.add_argument("--quick", action="store_true", help="try everything, and write no file")
    parser.add_argument("--document", action="store_true", help="write the table of the results that there are")
    options = parser.parse_args()
    if options.document:
        write_document("drift", "host", page_part(json.loads(RESULTS.read_text())))
        return 0
    results = run(QUICK if options.quick else FULL)
    if not options.quick:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
        write_document("drift", "host", page_part(results))
    print(page_part(results))
    found = checks(results)
    print_checks(found)
    return 0 if all(check.holds for check in found) else 1


if __name__ == "__main__":
    raise SystemExit(main())
