"""Queries of other dialects, and statements of BigQuery ML, without a server."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.client.dialects import in_postgres
from pg_tensile.queries.bigquery import CreateModel, DropModel, Model, Plain, statements, with_functions
from pg_tensile.queries.dialects import DialectError, transpile

MODELS = {
    "ds.late": Model("late", ("f", "t"), {"f1": 0.5}, 3),
    "price": Model("price", (), {"rmse": 2.0, "r2": 0.5}, None),
    "kind": Model("kind", ("a", "b", "c"), {}, 4),
}
REGRESSOR = "CREATE MODEL m OPTIONS(model_type = 'LINEAR_REG'{}) AS SELECT 1 AS label, 2 AS a"


def created(options: str = "", model_type: str = "DNN_REGRESSOR") -> CreateModel:
    (statement,) = statements(REGRESSOR.format(options).replace("LINEAR_REG", model_type))
    assert isinstance(statement, CreateModel)
    return statement


def query(text: str) -> str:
    (statement,) = statements(text)
    assert isinstance(statement, Plain)
    return with_functions(statement, "public", MODELS.__getitem__)


@pytest.mark.parametrize(
    ("given", "read", "expected"),
    [
        ("SELECT IFF(a > 1, 1, 0) AS x FROM t", "snowflake", "SELECT CASE WHEN a > 1 THEN 1 ELSE 0 END AS x FROM t"),
        ("SELECT `a` FROM `t` -- note", "MySQL", 'SELECT "a" FROM "t"'),
        ("SELECT CAST(a AS INT64) FROM `p.ds.t`", "bigquery", 'SELECT CAST(a AS BIGINT) FROM "ds"."t"'),
        ("SELECT TOP 5 a FROM t", "tsql", "SELECT a FROM t LIMIT 5"),
    ],
)
def test_queries_become_postgresqls(given: str, read: str, expected: str) -> None:
    assert transpile(given, read) == expected == in_postgres(given, read)
    assert in_postgres(given, None) == given


@pytest.mark.parametrize(
    ("given", "read", "message", "hint"),
    [
        ("SELECT 1", "klingon", 'unknown dialect "klingon"', "bigquery"),
        ("", "spark", "the query has no statement", "one SELECT"),
        ("SELECT 1; SELECT 2", "spark", "the query has 2 statements", "one SELECT"),
        ("DROP TABLE t", "spark", "the query is not a SELECT", "one SELECT"),
        ("CALL f()", "spark", "the query is not a SELECT", "one SELECT"),
        ("SELECT a b c FROM t", "spark", "line 1, column 12: ", "read as spark SQL"),
        ("SELECT 'a", "spark", "the statement is not spark SQL", "syntax"),
        ("(" * 5000, "spark", "", ""),
    ],
)
def test_what_is_refused(given: str, read: str, message: str, hint: str) -> None:
    with pytest.raises(DialectError) as caught:
        transpile(given, read)
    assert caught.value.message.startswith(message) and hint in (caught.value.hint or "")


@given(st.text(max_size=60), st.sampled_from(("bigquery", "snowflake", "mysql", "tsql")))
def test_any_text_is_a_query_or_refused(text: str, read: str) -> None:
    try:
        transpile(text, read)
        list(statements(text, read))
    except DialectError:
        pass


# -- CREATE MODEL -----------------------------------------------------------------------------------------------------


def test_options_become_arguments() -> None:
    options = (
        ", hidden_units = [8, 4], activation_fn = 'TANH', dropout = 0.1, max_iterations = 7, learn_rate = 0.01,"
        " batch_size = 32, optimizer = 'sgd', l2_reg = 0.5, early_stop = FALSE, data_split_method = 'SEQ',"
        " data_split_col = 'a', data_split_eval_fraction = 0.3"
    )
    statement = created(options)
    assert statement.architecture == {"type": "mlp", "hidden": [8, 4], "activation": "tanh", "dropout": 0.1}
    job = {"task": "regression", "weight_decay": 0.5, "early_stopping": {"patience": 0}}
    assert statement.arguments == {
        "epochs": 7,
        "learning_rate": 0.01,
        "batch_size": 32,
        "optimizer": "sgd",
        "validation": 0.3,
        "split_by": "a",
        "options": job,
    }
    assert (statement.target, statement.replace, statement.if_not_exists) == ("label", False, False)


def test_defaults_are_left_to_the_server() -> None:
    assert created().arguments == {"options": {"task": "regression"}}
    assert created(model_type="logistic_reg").architecture == {"type": "mlp", "hidden": []}
    balanced = created(", auto_class_weights = TRUE", "DNN_CLASSIFIER").arguments["options"]
    assert balanced == {"task": "classification", "class_weight": "balanced"}
    assert created(", data_split_method = 'NO_SPLIT'").arguments["validation"] == 0.0


def test_names_and_words_of_create_model() -> None:
    first, second, third = statements(
        "CREATE OR REPLACE MODEL `p.ds.m` OPTIONS(model_type='LINEAR_REG', input_label_cols=['y']) AS (SELECT 1 AS y);"
        "CREATE MODEL IF NOT EXISTS ds.m OPTIONS(model_type='LINEAR_REG') AS SELECT 1 AS label;"
        "DROP MODEL IF EXISTS ds.m"
    )
    assert isinstance(first, CreateModel) and (first.model, first.target, first.replace) == ("p.ds.m", "y", True)
    assert isinstance(second, CreateModel) and (second.model, second.if_not_exists) == ("ds.m", True)
    assert third == DropModel("ds.m", True)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (REGRESSOR.format(", num_trials = 3"), "option num_trials of CREATE MODEL is not supported"),
        (REGRESSOR.format(", max_iterations = 'x'"), "option max_iterations is not a whole number"),
        (REGRESSOR.format(", max_iterations = TRUE"), "option max_iterations is not a whole number"),
        (REGRESSOR.format(", max_iterations = 1 + 1"), "option max_iterations is not a constant"),
        (REGRESSOR.format(", hidden_units = [4]"), "LINEAR_REG has no hidden layers"),
        (REGRESSOR.format(", input_label_cols = ['a', 'b']"), "option input_label_cols is not a list of one column"),
        (REGRESSOR.format(", optimizer = 'FTRL'"), "optimizer 'FTRL' is not supported"),
        (REGRESSOR.format(", data_split_method = 'CUSTOM'"), "data_split_method 'CUSTOM' is not supported"),
        (
            REGRESSOR.format(", data_split_method = 'SEQ'"),
            "data_split_col and the data_split_method SEQ need each other",
        ),
        (REGRESSOR.format("").replace("LINEAR_REG", "KMEANS"), "model_type 'KMEANS' is not supported"),
        ("CREATE MODEL m OPTIONS(model_type='LINEAR_REG')", "CREATE MODEL m has no query"),
        ("CREATE MODEL m AS SELECT 1 AS label", "CREATE MODEL has no model_type"),
        ("CREATE MODEL m TRANSFORM(a) OPTIONS(model_type='LINEAR_REG') AS SELECT 1", "TRANSFORM is not supported"),
        ("CALL f()", 'statement "CALL'),
    ],
)
def test_refused_statements(statement: str, message: str) -> None:
    with pytest.raises(DialectError) as caught:
        list(statements(statement))
    assert caught.value.message.startswith(message) and caught.value.hint


# -- functions --------------------------------------------------------------------------------------------------------


def test_predictions_have_the_columns_of_bigquery() -> None:
    assert query("SELECT * FROM ML.PREDICT(MODEL price, TABLE ds.t)") == (
        """SELECT * FROM (SELECT q.*, "public"."predict"('price', q) AS "predicted_price" FROM"""
        " (SELECT * FROM ds.t) AS q) AS ml"
    )
    binary = query("SELECT * FROM ML.PREDICT(MODEL `ds.late`, (SELECT 1 AS a)) AS p")
    assert '"predicted_late"' in binary and '"predicted_late_probs"' in binary and binary.endswith("AS p")
    assert "_probs" not in query("SELECT * FROM ML.PREDICT(MODEL kind, TABLE t)")


def test_evaluations_and_histories() -> None:
    assert "'SELECT ''x'' AS a FROM t'" in query("SELECT * FROM ML.EVALUATE(MODEL price, (SELECT 'x' AS a FROM t))")
    assert 'CAST(4.0 AS DOUBLE PRECISION) AS "mean_squared_error"' in query("SELECT * FROM ML.EVALUATE(MODEL price)")
    assert "t.job = 3" in query("SELECT * FROM ML.TRAINING_INFO(MODEL ds.late)")
    assert "t.job = NULL" in query("SELECT * FROM ML.TRAINING_INFO(MODEL price)")


def test_functions_with_settings_or_without_rows_are_refused() -> None:
    with pytest.raises(DialectError, match="STRUCT"):
        query("SELECT * FROM ML.PREDICT(MODEL price, TABLE t, STRUCT(0.5 AS threshold))")
    for rows in ("", ", STRUCT(0.5 AS threshold)"):
        with pytest.raises(DialectError, match="line 1"):
            query(f"SELECT * FROM ML.PREDICT(MODEL price{rows})")


def test_a_models_name_is_a_literal() -> None:
    (statement,) = statements("SELECT * FROM ML.PREDICT(MODEL `it's`, TABLE t)")
    assert isinstance(statement, Plain)
    text = with_functions(statement, 'odd"schema', lambda _: MODELS["price"])
    assert """"odd""schema"."predict"('it''s', q)""" in text
