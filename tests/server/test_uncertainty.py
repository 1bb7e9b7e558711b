"""predict_interval, explain_prediction and calibrated probabilities of trained models.

Models are trained once for the file, on the first part of a table whose other rows are held out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from psycopg import errors
from psycopg.types.json import Jsonb

from tests.server.refusals import refusal
from tests.server.shared import SharedServer
from tests.server.support import Connection, finish, submit, value

TRIPS = """
    CREATE TABLE trips AS
    SELECT i AS id, CASE WHEN i % 50 > 0 THEN random() END AS far, random() AS luck,
           '2024-01-01'::timestamp + i * interval '1 hour' AS at,
           (ARRAY['bus', 'bus', 'tram', 'train'])[1 + floor(random() * 4)::int] AS kind,
           ARRAY[random(), random()] AS noise
    FROM generate_series(1, 12000) i;
    ALTER TABLE trips ADD late float8, ADD missed bool, ADD stops int;
    UPDATE trips SET late = 100 + 30 * coalesce(far, 0.5) + CASE kind WHEN 'train' THEN 12 ELSE 0 END
                            + 10 * (random() + random() + random() - 1.5),
                     missed = random() < 0.5 * coalesce(far, 0.5),
                     stops = floor(4 * coalesce(far, 0.5) * random() * (1 + id / 6000.0));
"""
FEATURES = "far, luck, at, kind, noise"
NAMES = FEATURES.split(", ")
NUMBERS = "far, luck"
TRAINING, HELD_OUT = "id <= 6000", "id > 6000"
MLP = {"type": "mlp", "hidden": [16]}
# A network that is too sure of itself in predictions, whatever it has learned.
SURE = {
    "type": "python",
    "source": """
import torch

class Sure(torch.nn.Module):
    def __init__(self, n_inputs):
        super().__init__()
        self.linear = torch.nn.Linear(n_inputs, 1)

    def forward(self, x):
        return self.linear(x) * (1.0 if self.training else 6.0)

def build(n_inputs, n_outputs):
    return Sure(n_inputs)
""",
}
TRAINED: dict[str, dict[str, Any]] = {  # name: features, target, arguments
    "late": {"features": FEATURES, "target": "late", "epochs": 10, "batch_size": 128, "learning_rate": 0.03},
    "stops": {"features": "far, at", "target": "stops", "epochs": 3, "split_by": "at"},
    "few": {"features": NUMBERS, "target": "late", "where": "id <= 40"},
    "unvalidated": {"features": NUMBERS, "target": "late", "where": "id <= 40", "validation": 0.0},
    "missed": {"features": NUMBERS, "target": "missed", "architecture": SURE, "where": "id <= 3000"},
    "uncalibrated": {
        "features": NUMBERS, "target": "missed", "architecture": SURE, "where": "id <= 3000",
        "options": {"calibrate": False},
    },
    "kind": {"features": "far, noise", "target": "kind", "where": "id <= 500"},
}  # fmt: skip
INTERVAL = "SELECT (predict_interval('late', %s::jsonb, {})).*"


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> SharedServer:
    """The worker's cluster with trained models."""
    with shared_server.connect() as conn:
        conn.execute(f"SELECT setseed(0.5); {TRIPS}")
        conn.execute("GRANT SELECT ON trips TO PUBLIC")
        jobs = []
        for name, trained in TRAINED.items():
            arguments: dict[str, Any] = {"learning_rate": 0.01, "batch_size": 32, "seed": 1} | trained
            features, where = arguments.pop("features"), arguments.pop("where", TRAINING)
            query = f"SELECT {features}, {arguments['target']} FROM trips WHERE {where}"
            jobs.append(submit(conn, name, arguments.pop("architecture", MLP), query=query, **arguments))
        for job in jobs:
            finish(conn, job)
        value(conn, "SELECT predict('few', '{1,2}'::float8[])")  # starts the predictor
    return shared_server


@pytest.fixture
def conn(server: Any) -> Iterator[Connection]:
    with server.connect() as connection:
        connection.execute("SET pg_tensile.predict_timeout = '20 s'")
        yield connection


def explanation(conn: Connection, sql: str, *parameters: Any) -> dict[str | None, tuple[str | None, float]]:
    """Return value and attribution by feature; None is the row without a feature."""
    return {feature: (text, attribution) for feature, text, attribution in conn.execute(sql, parameters)}


# ---- intervals ----


@pytest.mark.parametrize("coverage", [0.8, 0.9, 0.95])
def test_held_out_targets_lie_in_their_intervals_as_often_as_asked(conn: Connection, coverage: float) -> None:
    share, width, outside = conn.execute(
        "SELECT avg((late BETWEEN lower AND upper)::int)::float8, avg(upper - lower), count(*) FILTER"
        " (WHERE prediction NOT BETWEEN lower AND upper) FROM (SELECT * FROM trips WHERE "
        + HELD_OUT
        + " LIMIT 1500) t,"
        " predict_interval('late', t, %s)",
        (coverage,),
    ).fetchall()[0]
    assert share == pytest.approx(coverage, abs=0.035) and outside == 0
    assert 10 < width < 40


def test_an_interval_of_a_count_begins_at_zero_and_covers_rows_that_come_later(conn: Connection) -> None:
    """The counts, and with them the errors, grow with time."""
    share, lowest, least = conn.execute(
        "SELECT avg((stops BETWEEN lower AND upper)::int)::float8, min(lower), min(prediction)"
        " FROM (SELECT far, at, stops FROM trips WHERE id BETWEEN 6000 AND 6600) t, predict_interval('stops', t)"
    ).fetchall()[0]
    assert share > 0.88 and lowest == 0.0 and least >= 0.0


def test_records_arrays_and_objects_have_the_same_interval(conn: Connection) -> None:
    rows = conn.execute("""
        SELECT predict_interval('few', t, 0.8) = predict_interval('few', ARRAY[far, luck], 0.8),
               predict_interval('few', t, 0.8) = predict_interval('few', to_jsonb(t), 0.8),
               (predict_interval('few', t, 0.8)).prediction = predict('few', t),
               predict_interval('few', t, 0.8, '1 MB') IS NOT NULL
        FROM (SELECT far, luck FROM trips LIMIT 20) t
    """).fetchall()
    assert rows == [(True, True, True, True)] * 20


def test_a_larger_coverage_has_a_wider_interval_and_null_arguments_none(conn: Connection) -> None:
    trip = json.dumps({"far": 0.5, "luck": None, "at": "2024-05-05", "kind": "bus", "noise": [0, 1]})
    widths = [conn.execute(INTERVAL.format(share), (trip,)).fetchall()[0] for share in ("0.5", "0.9", "0.99")]
    assert widths[0][0] > widths[1][0] > widths[2][0] and widths[0][2] < widths[1][2] < widths[2][2]
    assert (
        conn.execute(INTERVAL.format("0.9"), (trip,)).fetchall()
        == conn.execute("SELECT (predict_interval('late', %s::jsonb)).*", (trip,)).fetchall()
    )
    assert conn.execute(INTERVAL.format("NULL"), (trip,)).fetchall() == [(None, None, None)]
    assert conn.execute(INTERVAL.format("0.9"), (None,)).fetchall() == [(None, None, None)]


def test_what_has_no_interval_is_refused(conn: Connection) -> None:
    trip = "SELECT predict_interval(%s, '{0.1, 0.2}'::float8[], %s)"
    for coverage in (0.0, 1.0, -1.0, float("nan"), float("inf")):
        assert refusal(conn, trip, "few", coverage)[0] == "22023"
    sqlstate, message, hint = refusal(conn, trip, "few", 0.99)
    assert sqlstate is not None and sqlstate[:2] == "22" and "needs at least 99 validation rows" in message
    assert "at most 0." in hint
    _, message, hint = refusal(conn, trip, "unvalidated", 0.9)
    assert "without validation rows" in message and "validation" in hint
    assert refusal(conn, trip, "missed", 0.9)[::2] == ("42804", "Use predict_probabilities.")
    assert refusal(conn, trip, "fewer", 0.9)[0] == "42704"
    assert refusal(conn, "SELECT predict_interval('few', '{\"far\": 1}'::jsonb)")[0] == "42703"
    assert conn.execute("SELECT (predict_interval('few', '{0.1, 0.2}'::float8[], 0.5)).prediction").fetchone()


@pytest.mark.long
def test_learned_quantiles_cover_as_asked_too_and_within_a_plan(conn: Connection) -> None:
    """Long: it trains two models, one of them for thousands of steps."""
    query = f"SELECT far, kind, late FROM trips WHERE {TRAINING}"
    learned: dict[str, Any] = {"epochs": 20, "batch_size": 32, "learning_rate": 0.01, "seed": 1}
    learned["options"] = {"quantiles": [0.1, 0.9]}
    finish(conn, submit(conn, "quantiles", MLP, query=query, target="late", **learned))
    share, widths, contained = conn.execute(
        "SELECT avg((late BETWEEN lower AND upper)::int)::float8, count(DISTINCT round((upper - lower)::numeric, 3)),"
        " bool_and(prediction BETWEEN lower AND upper AND abs(prediction - predict('quantiles', t)) < 1e-9)"
        f" FROM (SELECT * FROM trips WHERE {HELD_OUT} LIMIT 3000) t, predict_interval('quantiles', t, 0.9)"
    ).fetchall()[0]
    assert share == pytest.approx(0.9, abs=0.035) and widths > 10 and contained
    query = "SELECT far, kind, late FROM trips WHERE id <= 200"
    options = {"quantiles": [0.2, 0.8]}
    arguments: dict[str, Any] = {"batch_size": 32, "epochs": 3, "policy": "joint", "options": options}
    job = submit(conn, "planned", MLP, query=query, target="late", **arguments)
    finish(conn, job)
    assert value(conn, "SELECT (predict_interval('planned', t, 0.7)).upper FROM trips t LIMIT 1") > 0


def test_quantiles_of_labels_are_refused(conn: Connection) -> None:
    quantiles: Any
    for quantiles in ([0.9, 0.1], [0, 0.5], [0.5], 0.5):
        with pytest.raises(errors.InvalidParameterValue):
            submit(conn, "few", query="SELECT far, late FROM trips", target="late", options={"quantiles": quantiles})
    query = "SELECT far, missed FROM trips WHERE id <= 100"
    job = submit(conn, "few", query=query, target="missed", batch_size=32, options={"quantiles": [0.1, 0.9]})
    with pytest.raises(errors.InvalidParameterValue, match="is for regressions"):
        finish(conn, job)


# ---- attributions ----


def test_attributions_add_up_to_the_prediction_and_show_what_matters(conn: Connection) -> None:
    for number in (7, 50, 900):  # "far" of the second is null
        ask = f"FROM (SELECT {FEATURES} FROM trips WHERE id = {number}) t"
        rows = explanation(conn, f"SELECT e.* {ask}, explain_prediction('late', t) e")
        assert [*rows] == [*NAMES, None]
        predicted = value(conn, f"SELECT predict('late', t) {ask}")
        assert sum(attribution for _, attribution in rows.values()) == pytest.approx(predicted, abs=1e-5)
        assert rows[None][0] is None and 90 < rows[None][1] < 140
        texts = conn.execute(f"SELECT {', '.join(name + '::text' for name in NAMES)} {ask}").fetchone()
        assert texts == tuple(rows[name][0] for name in NAMES)
    matters = """
        SELECT corr(e.attribution, t.far) FILTER (WHERE feature = 'far'),
               avg(abs(e.attribution)) FILTER (WHERE feature = 'far'),
               avg(abs(e.attribution)) FILTER (WHERE feature = 'luck')
        FROM (SELECT * FROM trips WHERE far IS NOT NULL LIMIT 25) t, explain_prediction('late', t) e
    """
    correlation, strength, noise = conn.execute(matters).fetchall()[0]
    assert correlation > 0.9 and strength > 3 and noise < strength / 3


def test_an_object_is_explained_like_the_record(conn: Connection) -> None:
    trip = f"(SELECT {FEATURES} FROM trips WHERE id = 11) t"
    record = conn.execute(f"SELECT feature, attribution FROM {trip}, explain_prediction('late', t)").fetchall()
    json_ = conn.execute(f"SELECT feature, attribution FROM {trip}, explain_prediction('late', to_jsonb(t))").fetchall()
    assert record == json_ and len(record) == len(NAMES) + 1


def test_unknown_categories_and_nulls_are_explained(conn: Connection) -> None:
    ask = "SELECT * FROM explain_prediction('late', %s::jsonb)"
    for trip in ({"kind": "balloon"}, {"kind": None}, {"noise": None}, {"at": None}, {}):
        features = Jsonb({"far": 0.9, "luck": 0.1, "at": "2024-02-02", "kind": "bus", "noise": [0.1, 0.9]} | trip)
        rows = explanation(conn, ask, features)
        total = sum(attribution for _, attribution in rows.values())
        assert total == pytest.approx(value(conn, "SELECT predict('late', %s::jsonb)", features), abs=1e-5)
        assert all(rows[name][0] == text for name, text in trip.items() if not isinstance(text, list))
    assert explanation(conn, ask, None) == {}


def test_the_most_frequent_category_has_no_attribution(conn: Connection) -> None:
    trip = {"far": 0.9, "luck": 0.1, "at": "2024-02-02", "noise": [0.1, 0.9]}
    attributions = {
        kind: explanation(conn, "SELECT * FROM explain_prediction('late', %s::jsonb)", Jsonb(trip | {"kind": kind}))[
            "kind"
        ][1]
        for kind in ("bus", "train")
    }
    assert abs(attributions["bus"]) < 1e-4 and attributions["train"] > 4


def test_probabilities_are_explained(conn: Connection) -> None:
    ask = "FROM (SELECT far, luck, noise FROM trips WHERE id = 12) t"
    binary = explanation(conn, f"SELECT e.* {ask}, explain_prediction('missed', t) e")
    assert binary[None][0] == "true"
    total = sum(attribution for _, attribution in binary.values())
    assert total == pytest.approx(value(conn, f"SELECT predict('missed', t) {ask}"), abs=1e-6)
    several = explanation(conn, f"SELECT e.* {ask}, explain_prediction('kind', t) e")
    assert several[None][0] == value(conn, f"SELECT predict_class('kind', t) {ask}")
    probability = value(conn, "SELECT probability FROM predict_rows('kind', 'SELECT * FROM trips WHERE id = 12')")
    assert sum(attribution for _, attribution in several.values()) == pytest.approx(probability, abs=1e-5)


def test_errors_of_features_and_budgets_are_those_of_predict(conn: Connection) -> None:
    assert refusal(conn, "SELECT * FROM explain_prediction('few', '{\"far\": 1}'::jsonb)")[0] == "42703"
    assert refusal(conn, "SELECT * FROM explain_prediction('fewer', '{\"far\": 1}'::jsonb)")[0] == "42704"
    trip = '\'{"far": 1, "luck": 0}\'::jsonb'
    plain = explanation(conn, f"SELECT * FROM explain_prediction('few', {trip})")
    within = explanation(conn, f"SELECT * FROM explain_prediction('few', {trip}, '1 MB')")
    assert [*plain] == [*within]
    for feature, (_, attribution) in plain.items():
        assert within[feature][1] == pytest.approx(attribution, rel=1e-3, abs=1e-3)


# ---- calibration ----


def test_probabilities_are_calibrated_where_that_helps(conn: Connection) -> None:
    calibration = (
        "SELECT preprocessing->'calibration' FROM tensile.model_versions v"
        " JOIN tensile.models m ON m.model_id = v.model_id"
        " WHERE m.model = %s"
    )
    assert value(conn, calibration, "uncalibrated") is None
    fitted = value(conn, calibration, "missed")
    assert 0 < fitted["scale"] < 1
    log_loss = (
        "SELECT avg(-ln(CASE WHEN missed THEN p ELSE 1 - p END)) FROM (SELECT missed,"
        f" predict(%s, t) AS p FROM trips t WHERE {HELD_OUT} LIMIT 1500) q"
    )
    assert value(conn, log_loss, "missed") < value(conn, log_loss, "uncalibrated")


# ---- others ----


def test_the_privilege_predict_is_enough_and_needed(conn: Connection, server: Any) -> None:
    conn.execute("CREATE ROLE predictor LOGIN IN ROLE tensile_user")
    functions = ("predict_interval('late', t)", "explain_prediction('late', t)")
    with server.connect(user="predictor") as other:
        for function in functions:
            with pytest.raises(errors.InsufficientPrivilege):
                other.execute(f"SELECT * FROM (SELECT * FROM trips LIMIT 1) t, {function}")
        conn.execute("SELECT grant_model('late', 'predictor')")
        for function in functions:
            assert other.execute(f"SELECT * FROM (SELECT * FROM trips LIMIT 1) t, {function}").fetchall()


def test_sessions_that_predict_while_others_explain_get_their_own_answers(conn: Connection, server: Any) -> None:
    expected = conn.execute("SELECT id, predict('late', t) FROM trips t WHERE id <= 200 ORDER BY id").fetchall()

    def predict(_: int) -> list[tuple[Any, ...]]:
        with server.connect() as other:
            return other.execute("SELECT id, predict('late', t) FROM trips t WHERE id <= 200 ORDER BY id").fetchall()

    def explain(number: int) -> float:
        with server.connect() as other:
            total = f"SELECT sum(attribution) FROM trips t, explain_prediction('late', t) WHERE id = {number}"
            return float(value(other, total))

    with ThreadPoolExecutor(8) as pool:
        predictions = pool.map(predict, range(4))
        totals = list(pool.map(explain, range(1, 13)))
        assert all(answer == expected for answer in predictions)
    assert totals == pytest.approx([prediction for _, prediction in expected[:12]], abs=1e-5)


def test_a_cancelled_explanation_leaves_the_session_usable(conn: Connection) -> None:
    conn.execute("SET statement_timeout = '30 ms'")
    with pytest.raises(errors.QueryCanceled):
        conn.execute("SELECT * FROM trips t, explain_prediction('late', t)").fetchall()
    conn.execute("RESET statement_timeout")
    trip = "FROM (SELECT * FROM trips WHERE id = 5) t"
    total = value(conn, f"SELECT sum(attribution) {trip}, explain_prediction('late', t)")
    assert total == pytest.approx(value(conn, f"SELECT predict('late', t) {trip}"), abs=1e-5)
