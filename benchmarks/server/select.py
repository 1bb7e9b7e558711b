"""Predictions where people write them, `SELECT sum(predict(model, t)) FROM t`, and what else a session waits for.

Models are trained on a synthetic table of 12 numbers and 8 categories (synthetic_table.py), those of networks for two
epochs, because speed does not depend on the weights.

- **mlp**, **tabular**, **boosted**, **ensemble** (the default for tables): rates for a million rows, within SELECT,
  without and with two parallel workers, and by predict_rows; beside networks their matrix products alone (products.py),
  beside trees two libraries that fetch the rows first (fetched.py);
- **cnn**, **text**: the same for models that the predictor answers for, images and texts;
- **row**: one row after the other, in one session, in eight, and beside a training (one_row.py);
- **cold**: first predictions, and evaluations and explanations (first_predictions.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.checks import Check, Goal
from benchmarks.command import Row
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.server import first_predictions, one_row, table_rates
from benchmarks.server.cluster import fresh_cluster
from benchmarks.server.predict import LATENCIES
from benchmarks.server.serving import TIMED, Work
from benchmarks.server.table_rates import ARCHITECTURES, FOR_PREDICTOR, Connection, Sizes
from benchmarks.tables import table
from scripts.cluster import Cluster

NETWORKS = ("mlp", "tabular")
SCENARIOS = (*ARCHITECTURES, *FOR_PREDICTOR, "row", "cold")
COLD = ("mlp", "ensemble")
SETTINGS = {"shared_buffers": "1GB", "pg_tensile.predict_timeout": "60s"}
ROW_WORK, QUICK_ROW_WORK = Work(rounds=3, seconds=3.0, rows=0), Work(rounds=1, seconds=0.5, rows=0)
QUICK_CALLS = 500


# ---- measuring ------------------------------------------------------------------------------------------------------


def rows(run: Run) -> Iterator[Row]:
    sizes = table_rates.QUICK if run.quick else Sizes()
    if not run.wanted(SCENARIOS):
        return
    with fresh_cluster(SETTINGS) as cluster:
        table_rates.load(cluster, sizes)
        with cluster.connect() as conn:
            conn.execute(LATENCIES)
            conn.execute(TIMED)
        for name in run.scenarios(SCENARIOS):
            with cluster.connect() as conn:
                yield from measure(cluster, conn, name, sizes, run.quick)


def measure(cluster: Cluster, conn: Connection, name: str, sizes: Sizes, quick: bool) -> Iterator[Row]:
    """Yield the rows of a scenario; the models that it needs are trained."""
    needed = {"row": NETWORKS, "cold": COLD}.get(name, (name,))
    for model in needed:
        if model in ARCHITECTURES:
            table_rates.train_on_table(conn, model)
    if name in NETWORKS:
        yield table_rates.measure_beside_products(conn, name, sizes)
    elif name == "boosted":
        from benchmarks.server import fetched  # LightGBM, which the other scenarios do without

        libraries = fetched.Libraries(cluster, fetched.trees_of(conn, name), sizes.fetched)
        inside = table_rates.measure_table(conn, name, sizes, sizes.rounds_of_trees, libraries.measure)
        yield inside
        yield from libraries.rows(inside)
    elif name in ARCHITECTURES:
        yield table_rates.measure_table(conn, name, sizes, sizes.rounds_of_trees)
    elif name in FOR_PREDICTOR:
        yield table_rates.measure_for_predictor(conn, name, sizes)
    elif name == "row":
        work, calls = (QUICK_ROW_WORK, QUICK_CALLS) if quick else (ROW_WORK, one_row.CALLS)
        for model in needed:
            yield one_row.measure_row(cluster, conn, model, work, calls)
    else:
        for model in needed:
            yield from first_predictions.measure_first(
                cluster, model, first_predictions.QUICK if quick else first_predictions.FirstSizes()
            )


# ---- the document ---------------------------------------------------------------------------------------------------

OF_PRODUCTS = Goal("of_products", "of the rate of its matrix products", ".0%", least=0.6)
SPEEDUP = Goal("speedup", "times as fast with two parallel workers", ".2f", least=1.7)
WITH_PREDICT_ROWS = (
    Goal("serial_times", "times the time of predict_rows", ".2f", most=2.0),
    Goal("parallel_times", "times the time of predict_rows, with two parallel workers", ".2f", most=1.2),
)
ONE_ROW = (
    Goal("sessions_times", "predictions per second of eight sessions, times those of one", ".2f", least=1.9),
    Goal("training_times", "99th percentile beside a training, times that alone", ".2f", most=3.0),
)
GOALS: dict[tuple[str, str], tuple[Goal, ...]] = {
    **{("rates", model): (OF_PRODUCTS, SPEEDUP, *WITH_PREDICT_ROWS) for model in NETWORKS},
    **{("rates", model): WITH_PREDICT_ROWS for model in ("boosted", "ensemble")},
    **{("predictor", model): (Goal("serial_times", "times the time of predict_rows", ".2f", most=1.5),)
       for model in FOR_PREDICTOR},
    **{("row", model): (Goal("p50_us", "predict of one row in a session, median µs", ".0f", most=most), *ONE_ROW)
       for model, most in (("mlp", 40), ("tabular", 170))},
    **{("server", model): (Goal("first_ms", "first prediction after a start of the server, ms", ".0f", most=300),)
       for model in COLD},
    **{("session", model): (Goal("first_ms", "first prediction of a session, ms", ".1f", most=2),) for model in COLD},
    **{("evaluation", model): (Goal("ms", "evaluate_model with a warm fork server, ms", ",.0f", most=1000),)
       for model in COLD},
}  # fmt: skip


def checks(results: Results) -> list[Check]:
    checked = [
        goal.check(name, row | {"model": model})._replace(what=f"{model}: {goal.what}")
        for (name, model), goals in GOALS.items()
        for row in results.rows(name)
        if row["model"] == model
        for goal in goals
    ]
    faster = Goal("times_as_fast", "", ".2f", least=1)
    for row in results.rows("libraries"):
        what = f"boosted: times as fast as {row['library']} over fetched rows, {row['threads']} thread"
        checked.append(faster.check("libraries", row)._replace(what=what + "s" * (row["threads"] == "all")))
    return checked


TABLES: dict[str, Sequence[tuple[str, str, str]]] = {  # heading, key and format of each column
    "rates": (
        ("rows", "rows", ","),
        ("SELECT, rows/s", "serial_per_s", ","),
        ("with two workers", "parallel_per_s", ","),
        ("predict_rows", "predict_rows_per_s", ","),
        ("matrix products alone", "products_per_s", ","),
        ("their GFLOP/s", "gflops", ".0f"),
        ("SELECT of that", "of_products", ".0%"),
    ),
    "libraries": (
        ("threads", "threads", ""),
        ("trees", "trees", ","),
        ("rows", "rows", ","),
        ("fetching, s", "fetching_s", ".2f"),
        ("encoding, s", "encoding_s", ".2f"),
        ("predicting, s", "predicting_s", ".2f"),
        ("rows/s", "per_s", ","),
        ("SELECT, times as fast", "times_as_fast", ".2f"),
    ),
    "predictor": (
        ("rows", "rows", ","),
        ("SELECT, rows/s", "serial_per_s", ","),
        ("predict_rows", "predict_rows_per_s", ","),
        ("times the time", "serial_times", ".2f"),
    ),
    "row": (
        ("p50, µs", "p50_us", ".0f"),
        ("p99, µs", "p99_us", ".0f"),
        ("predictions/s", "per_s_1", ",.0f"),
        ("of eight sessions", "per_s_8", ",.0f"),
        ("p99 in a loop, µs", "p99_alone_us", ",.0f"),
        ("beside a training", "p99_training_us", ",.0f"),
    ),
    "server": (("first prediction after a start, ms", "first_ms", ",.1f"), ("second", "second_ms", ",.2f")),
    "session": (("connecting, ms", "connecting_ms", ".1f"), ("first prediction", "first_ms", ".1f")),
    "evaluation": (("rows", "rows", ","), ("evaluate_model, ms", "ms", ",.0f")),
    "explanation": (
        ("first explain_prediction after a start, ms", "first_ms", ",.1f"),
        ("second", "second_ms", ",.1f"),
    ),
}


def tables(results: Results) -> list[str]:
    return [line for name in TABLES for line in table_of(name, results.rows(name))]


def table_of(name: str, rows: Sequence[Row]) -> list[str]:
    """Return a table of the page; what a row does not have stays empty."""

    def cell(row: Row, key: str, form: str) -> str:
        return "" if row.get(key) is None else f"{row[key]:{form}}"

    headings, keys = [heading for heading, _, _ in TABLES[name]], TABLES[name]
    first = "library" if name == "libraries" else "model"
    cells = [(row[first], *(cell(row, key, form) for _, key, form in keys)) for row in rows]
    return table((first, *headings), cells)


BENCHMARK = Section("Predictions within SELECT", rows, tables, checks, lambda _: SCENARIOS)
