"""The query for predictions that is derived from a training query.

What it returns is compared in SQLite, which needs no server: the derived query has the rows of the training query whose
target is known, and those whose target is not.
"""

from __future__ import annotations

import sqlite3
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.queries.prediction import Key, derive

FEATURES = ["carrier", "distance"]


def only(query: str, target: str = "late", features: list[str] = FEATURES) -> str:
    """Return the derived query of a training query that has one."""
    derived = derive(query, target, features)
    assert derived.reason is None
    return derived.variants[0].query


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("SELECT carrier, late, distance FROM f", "SELECT carrier, distance FROM f"),
        ("SELECT carrier, distance, d > 5 AS late FROM f WHERE d IS NOT NULL", "SELECT carrier, distance FROM f"),
        (
            "SELECT carrier, distance, late FROM f WHERE (late IS NOT NULL AND distance > 1) AND carrier = 'A'",
            "SELECT carrier, distance FROM f WHERE distance > 1 AND carrier = 'A'",
        ),
        ("TABLE f", 'SELECT "carrier", "distance" FROM f'),
        ("SELECT * FROM f WHERE late IS NOT NULL;", 'SELECT "carrier", "distance" FROM f'),
        ("SELECT g.* FROM f g WHERE g.late", 'SELECT g."carrier", g."distance" FROM f AS g'),
        ("SELECT Carrier, distance, LATE FROM f WHERE Late", "SELECT Carrier, distance FROM f"),
        ("SELECT carrier, distance, late FROM f ORDER BY late, carrier",
         "SELECT carrier, distance FROM f ORDER BY carrier"),
        ("SELECT carrier, distance, late FROM f ORDER BY 1", "SELECT carrier, distance FROM f"),
        ("SELECT carrier, distance, delay = distance AS late FROM f WHERE distance > 1",
         "SELECT carrier, distance FROM f WHERE distance > 1"),
        ("SELECT carrier, distance, count(*) AS late FROM f GROUP BY carrier, distance",
         "SELECT carrier, distance FROM f GROUP BY carrier, distance"),
    ],
)  # fmt: skip
def test_what_only_the_target_needs_is_dropped(query: str, expected: str) -> None:
    assert only(query) == expected


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("SELECT DISTINCT carrier, distance, late FROM f", "the training query has DISTINCT"),
        ("SELECT carrier, distance, late FROM f LIMIT 5", "the training query has LIMIT or FETCH"),
        ("SELECT carrier, distance, late FROM f OFFSET 5", "the training query has OFFSET"),
        ("SELECT 1 UNION SELECT 2", "the training query is not a single SELECT"),
        ("DELETE FROM f", "the training query is not a single SELECT"),
        ("SELECT 1; SELECT 2", "the training query is not a single SELECT"),
        ("SELECT FROM WHERE", "the training query cannot be read outside of the server"),
        ("(" * 5000, "the training query cannot be read outside of the server"),
        ("SELECT carrier, distance, avg(late) AS late FROM f GROUP BY 1, 2", "the groups of the training query"),
        ("SELECT carrier, distance, late FROM f GROUP BY carrier, distance, late", "the groups of the training query"),
        ("SELECT carrier, lag(distance) OVER () AS distance, late FROM f WHERE late", "a feature is computed"),
        ("SELECT carrier, row_number() OVER () AS distance, late FROM f WHERE late", "a feature is computed"),
        ("SELECT lower(a), upper(b), distance FROM f", "only the server can say which column"),
        ("SELECT late FROM f", "the training query has no column besides the target"),
    ],
)
def test_why_nothing_is_derived(query: str, reason: str) -> None:
    derived = derive(query, "late", FEATURES)
    assert derived.variants == () and (derived.reason or "").startswith(reason)


@pytest.mark.parametrize("join", ["JOIN", "LEFT JOIN"])
def test_a_join_that_only_the_target_needs(join: str) -> None:
    query = f"SELECT f.carrier, a.delay > 5 AS late FROM f {join} air.arrivals a ON a.flight = f.id AND a.kind = 'x'"
    without, with_join = derive(query + " WHERE a.delay < 100 AND f.id > 3", "late", ["carrier"]).variants
    assert without.query == "SELECT f.carrier FROM f WHERE f.id > 3"
    assert without.keys == (Key("air", "arrivals", ("flight", "kind")),)
    assert "arrivals" in with_join.query and with_join.keys == ()
    assert without.template == 'SELECT f.carrier FROM tensile_source AS "f" WHERE f.id > 3' and without.source == "f"


@pytest.mark.parametrize(
    "query",
    [
        "SELECT f.carrier, a.kind, a.delay > 5 AS late FROM f JOIN a ON a.flight = f.id",  # a feature
        "SELECT f.carrier, a.delay > 5 AS late FROM f JOIN a ON a.flight = f.id AND f.kind = 'x'",  # chooses rows of f
        "SELECT f.carrier, a.delay > 5 AS late FROM f JOIN a ON a.flight = id",  # whose id?
        "SELECT f.carrier, a.delay > 5 AS late FROM f JOIN a ON a.flight > f.id",
        "SELECT f.carrier, a.delay > 5 AS late FROM f RIGHT JOIN a ON a.flight = f.id",
        "SELECT f.carrier, a.delay > 5 AS late FROM f CROSS JOIN a",
        "SELECT f.carrier, a.delay > 5 AS late FROM f, a WHERE a.flight = f.id",
        "SELECT f.carrier, f.delay > 5 AS late FROM f JOIN a ON a.flight = f.id",  # only chooses rows
        "SELECT f.carrier, a.delay > 5 AS late FROM f JOIN a ON a.flight = f.id JOIN b ON b.x = a.x",
        "SELECT f.carrier, a.delay > 5 AS late FROM f JOIN (SELECT * FROM a) a ON a.flight = f.id",
        "WITH a AS (SELECT 1) SELECT f.carrier, a.delay > 5 AS late FROM f JOIN a ON a.flight = f.id",
    ],
)
def test_other_joins_stay(query: str) -> None:
    (variant,) = derive(query, "late", ["carrier"]).variants
    assert variant.keys == ()


def test_a_template_needs_a_table() -> None:
    for source in ("generate_series(1, 9) f", "(SELECT 1 AS carrier, 2 AS late) f", "unnest(ARRAY[1]) f"):
        (variant,) = derive(f"SELECT carrier, late FROM {source}", "late", ["carrier"]).variants
        assert variant.template is None
    (variant,) = derive('SELECT carrier, late FROM "My"."Table"', "late", ["carrier"]).variants
    assert (variant.source, variant.template) == ('"My"."Table"', 'SELECT carrier FROM tensile_source AS "Table"')


COLUMNS = ("a", "b", "c", "y")
NUMBERS = st.one_of(st.none(), st.integers(-2, 2))
ROWS = st.lists(st.tuples(*[NUMBERS] * len(COLUMNS)), max_size=12)
CONDITIONS = st.lists(
    st.builds("{} {} {}".format, st.sampled_from(COLUMNS), st.sampled_from(("<", ">", "=", "<>")), st.integers(-2, 2)),
    max_size=3,
)
SELECTED = st.sampled_from(("a, b, {}", "{}, a, b + 1 AS b", "{}, a, b"))
TARGETS = st.sampled_from(("y", "y > 0 AS y", "y + 0 AS y", "y * c AS y"))


@given(ROWS, CONDITIONS, SELECTED, TARGETS)
def test_rows_with_a_target_stay_the_same(
    rows: list[tuple[int | None, ...]], conditions: list[str], selected: str, target: str
) -> None:
    where = " AND ".join(f"({condition})" for condition in ["y IS NOT NULL", *conditions])
    training = f"SELECT {selected.format(target)} FROM t WHERE {where}"
    query = only(training, "y", ["a", "b"])
    with sqlite3.connect(":memory:") as db:
        db.execute("CREATE TABLE t (a, b, c, y)")
        db.executemany("INSERT INTO t VALUES (?, ?, ?, ?)", rows)
        trained = Counter(db.execute(f"SELECT a, b FROM ({training})").fetchall())
        derived = Counter(db.execute(f"SELECT a, b FROM ({query})").fetchall())
        # The same rows, but for conditions on columns that only the target needs
        assert trained <= derived
        db.execute("UPDATE t SET y = NULL")
        unknown = Counter(db.execute(f"SELECT a, b FROM ({query})").fetchall())
        assert unknown == derived
    db.close()
