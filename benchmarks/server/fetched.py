"""Boosted trees of two libraries over rows that a client fetches from the server, beside predictions inside it.

scikit-learn's HistGradientBoostingRegressor and LightGBM are trained on the same rows as the model, with as many trees.
The client fetches rows by ADBC and makes a matrix of them, with codes in place of categories, which is what both take;
that counts for each of them, and so does predicting, on all cores, as is their default, or on one thread. They take
so long that fewer rows are fetched than are predicted inside.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import adbc_driver_postgresql.dbapi as adbc
import lightgbm
import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits

from benchmarks.command import Row
from benchmarks.server.predict import stored_model
from benchmarks.synthetic_table import FEATURES, NUMBERS
from pg_tensile.execution.models.boosted import Boosted
from scripts.cluster import Cluster

COLUMNS = ", ".join(FEATURES)
CODES = [*range(NUMBERS, len(FEATURES))]  # places of the categories among the features

Matrix = NDArray[np.float64]


def trees_of(conn: psycopg.Connection[Any], model: str) -> int:
    """Return the number of trees of a model of the architecture `boosted`."""
    module, _ = stored_model(conn, model)
    if not isinstance(module, Boosted):
        raise TypeError(f"{model} is not a model of trees")
    return len(module.get_buffer("node_root"))


def encoded(rows: pa.Table, categories: Sequence[pa.Array]) -> Matrix:
    """Return the features [rows, features]: numbers, and codes of the categories, NaN for null and unknown ones."""
    matrix = np.empty((rows.num_rows, len(FEATURES)))
    for column in range(NUMBERS):
        matrix[:, column] = rows.column(column).to_numpy()
    for column, known in zip(CODES, categories, strict=True):
        codes = pc.index_in(rows.column(column), value_set=known)  # null for what is not known
        matrix[:, column] = pc.cast(codes, pa.float64()).to_numpy()
    return matrix


class Libraries:
    """Both libraries' models, and the seconds of all rounds by library, threads and step."""

    def __init__(self, cluster: Cluster, trees: int, count: int) -> None:
        self._cluster, self._trees, self._count = cluster, trees, count
        with adbc.connect(cluster.dsn()) as conn, conn.cursor() as cursor:
            cursor.execute(f"SELECT {COLUMNS}, amount FROM train")
            rows = cursor.fetch_arrow_table()
        self._categories = [pc.unique(rows.column(column)).drop_null() for column in CODES]
        matrix, target = encoded(rows, self._categories), rows.column("amount").to_numpy()
        hist = HistGradientBoostingRegressor(max_iter=trees, early_stopping=False, categorical_features=CODES)
        hist.fit(matrix, target)
        light = lightgbm.LGBMRegressor(n_estimators=trees, verbose=-1)
        light.fit(matrix, target, categorical_feature=CODES)

        def hist_on_one(matrix: Matrix) -> Any:
            with threadpool_limits(1):
                return hist.predict(matrix)

        self._ways: dict[tuple[str, str], Callable[[Matrix], Any]] = {
            ("HistGradientBoosting", "all"): hist.predict,
            ("HistGradientBoosting", "one"): hist_on_one,
            ("LightGBM", "all"): light.booster_.predict,
            ("LightGBM", "one"): lambda matrix: light.booster_.predict(matrix, num_threads=1),
        }
        self._fetching: list[float] = []
        self._encoding: list[float] = []
        self._predicting: dict[tuple[str, str], list[float]] = {way: [] for way in self._ways}

    def measure(self) -> None:
        """Measure a round: fetch the rows, and predict in each way."""
        began = time.perf_counter()
        with adbc.connect(self._cluster.dsn()) as conn, conn.cursor() as cursor:
            cursor.execute(f"SELECT {COLUMNS} FROM rows LIMIT {self._count}")
            rows = cursor.fetch_arrow_table()
        fetched = time.perf_counter()
        matrix = encoded(rows, self._categories)
        self._fetching.append(fetched - began)
        self._encoding.append(time.perf_counter() - fetched)
        for way, predict in self._ways.items():
            began = time.perf_counter()
            float(np.sum(predict(matrix)))
            self._predicting[way].append(time.perf_counter() - began)

    def rows(self, inside: Row) -> Iterator[Row]:
        """Yield the medians of each way, and how many times as fast SELECT is (row `inside`), on as many cores."""
        fetching, encoding = statistics.median(self._fetching), statistics.median(self._encoding)
        for (library, threads), seconds in self._predicting.items():
            predicting = statistics.median(seconds)
            rate = self._count / (fetching + encoding + predicting)
            yield {
                "table": "libraries",
                "library": library,
                "threads": threads,
                "trees": self._trees,
                "rows": self._count,
                "fetching_s": fetching,
                "encoding_s": encoding,
                "predicting_s": predicting,
                "per_s": round(rate),
                "times_as_fast": inside["serial_per_s" if threads == "one" else "parallel_per_s"] / rate,
            }
