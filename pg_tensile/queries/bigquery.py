"""Statements of BigQuery ML: CREATE MODEL, DROP MODEL, and queries with ML.PREDICT, ML.EVALUATE and ML.TRAINING_INFO.

`statements` reads a script. The result says what to call, or is a query in which the functions are still BigQuery's:
`with_functions` replaces them by queries that call the extension's functions, for which it has to know the models.
docs/dialects.md has tables of what corresponds to what.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from sqlglot import exp, parse_one
from sqlglot.dialects.bigquery import BigQuery
from sqlglot.parsers.bigquery import BigQueryParser
from sqlglot.tokens import TokenType

from pg_tensile.queries.dialects import POSTGRES, DialectError, check_dialect, parse, written

ROWS = "tensile_rows"  # stands for the rows of a function in the templates below


class Evaluate(exp.Expression, exp.Func):
    """ML.EVALUATE(MODEL m[, rows])"""

    arg_types = {"this": True, "expression": False, "params_struct": False}  # noqa: RUF012


class TrainingInfo(exp.Expression, exp.Func):
    """ML.TRAINING_INFO(MODEL m)"""

    arg_types = {"this": True, "expression": False, "params_struct": False}  # noqa: RUF012


class _BigQueryML(BigQuery):
    """BigQuery's dialect, with the functions of a model that sqlglot does not know."""

    class Parser(BigQueryParser):
        FUNCTION_PARSERS = {  # noqa: RUF012
            **BigQueryParser.FUNCTION_PARSERS,
            "EVALUATE": lambda self: self._parse_function_of_model(Evaluate),
            "TRAINING_INFO": lambda self: self._parse_function_of_model(TrainingInfo),
        }

        def _parse_function_of_model(self, kind: type[exp.Func]) -> exp.Func:
            """Parse MODEL m, and behind a comma TABLE t, a query, or a STRUCT of settings, as they are given."""
            self._match_text_seq("MODEL")
            parts: dict[str, Any] = {"this": self._parse_table()}
            while self._match(TokenType.COMMA):
                self._match_text_seq("TABLE")
                if self._match(TokenType.STRUCT, advance=False):
                    parts["params_struct"] = self._parse_bitwise()
                else:
                    parts["expression"] = self._parse_table()
            return self.expression(kind(**parts))


@dataclass(frozen=True)
class CreateModel:
    """CREATE MODEL: the arguments of register_model and train_model."""

    model: str
    query: str
    target: str
    architecture: dict[str, Any]
    arguments: dict[str, Any]
    replace: bool
    if_not_exists: bool


@dataclass(frozen=True)
class DropModel:
    model: str
    if_exists: bool


@dataclass(frozen=True)
class Plain:
    """Any other statement. `returns_rows`: it is a query."""

    tree: exp.Expr
    read: str
    returns_rows: bool


class Model(NamedTuple):
    """A model's deployed version; `labels` is empty for a regression, `metrics` are those of its validation."""

    target: str
    labels: tuple[str, ...]
    metrics: dict[str, float]
    job: int | None


# ---- scripts ----


def statements(script: str, read: str = "bigquery") -> Iterator[CreateModel | DropModel | Plain]:
    """Yield the statements of a script. All of it is parsed before the first one is yielded. Raises DialectError."""
    read = check_dialect(read)
    trees = parse(script, read, _BigQueryML if read == "bigquery" else None)
    yield from [_statement(tree, read) for tree in trees]


def _statement(tree: exp.Expr, read: str) -> CreateModel | DropModel | Plain:
    kind = str(tree.args.get("kind") or "").upper()
    if isinstance(tree, exp.Create) and kind == "MODEL":
        return _create_model(tree, read)
    if isinstance(tree, exp.Drop) and kind == "MODEL":
        (name,) = tree.args["tables"]
        return DropModel(_name(name), bool(tree.args.get("exists")))
    if isinstance(tree, exp.Command):
        said = f"{tree.name} {tree.expression}".strip().partition("\n")[0][:60]
        raise DialectError(f'statement "{said}" is not supported', "Use psql for statements of the server.")
    return Plain(tree, read, isinstance(tree, exp.Query))


def _name(table: exp.Expr) -> str:
    """Return the name of a model: its parts with dots between them, without quotes."""
    return ".".join(part.name for part in cast(exp.Table, table).parts)


# ---- CREATE MODEL ----

FULLY_CONNECTED = {
    "DNN_CLASSIFIER": "classification",
    "DNN_REGRESSOR": "regression",
    "LOGISTIC_REG": "classification",
    "LINEAR_REG": "regression",
}
ACTIVATIONS = {"RELU": "relu", "TANH": "tanh", "GELU": "gelu", "SILU": "silu"}
OPTIMIZERS = {"ADAM": "adam", "SGD": "sgd"}


@dataclass
class _Options:
    """The options of a CREATE MODEL statement, and what follows from them."""

    given: dict[str, Any]
    architecture: dict[str, Any] = field(default_factory=lambda: {"type": "mlp"})
    arguments: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)  # the argument options

    def take(self, name: str, kind: type | tuple[type, ...], what: str) -> Any:
        """Return and remove an option, None if it is not given. Raises DialectError if it has another type."""
        value = self.given.pop(name, None)
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise DialectError(f"option {name} is not {what}", f"Write {name} = {what}.")
        return value

    def choose(self, name: str, known: dict[str, Any]) -> Any:
        """Return the meaning of an option that is one of these words."""
        word = self.take(name, str, f"one of {', '.join(known)}")
        if word is not None and word.upper() not in known:
            hint = f"It can be {', '.join(known)}."
            raise DialectError(f"{name} '{word}' is not supported", hint)
        return None if word is None else known[word.upper()]


def _create_model(tree: exp.Create, read: str) -> CreateModel:
    model = _name(tree.this)
    properties = tree.args.get("properties")
    given = {}
    for item in properties.expressions if properties else []:
        if not isinstance(item, exp.Property) or isinstance(item, exp.TransformModelProperty):
            raise DialectError("TRANSFORM is not supported", "Compute the columns in the query.")
        given[item.name.lower()] = _constant(item.args["value"], item.name)
    query = tree.expression
    if not isinstance(query, exp.Query):
        raise DialectError(f"CREATE MODEL {model} has no query", "Write AS SELECT ... behind the options.")
    options = _Options(given)
    labels = options.take("input_label_cols", list, "a list of one column")
    if labels is not None and (len(labels) != 1 or not isinstance(labels[0], str)):
        raise DialectError("option input_label_cols is not a list of one column", "A model has one target.")
    _model_type(options)
    _course(options)
    _split(options)
    if options.given:
        raise DialectError(f"option {min(options.given)} of CREATE MODEL is not supported", f"Supported are: {KNOWN}.")
    arguments = options.arguments | ({"options": options.job} if options.job else {})
    return CreateModel(
        model=model,
        query=written(query.unnest(), read),
        target=labels[0] if labels else "label",
        architecture=options.architecture,
        arguments=arguments,
        replace=bool(tree.args.get("replace")),
        if_not_exists=bool(tree.args.get("exists")),
    )


KNOWN = (
    "model_type, input_label_cols, hidden_units, activation_fn, dropout, max_iterations, learn_rate, batch_size,"
    " optimizer, l2_reg, early_stop, auto_class_weights, data_split_method, data_split_eval_fraction, data_split_col"
)


def _constant(node: exp.Expr, name: str) -> Any:
    """Return the value of an option: a string, number, truth value, or a list of them."""
    if isinstance(node, exp.Array):
        return [_constant(item, name) for item in node.expressions]
    if isinstance(node, exp.Boolean):
        return bool(node.this)
    if isinstance(node, exp.Literal):
        return node.this if node.is_string else _python_number(node)
    if isinstance(node, exp.Neg) and isinstance(node.this, exp.Literal):
        return -_python_number(node.this)
    raise DialectError(f"option {name} is not a constant", "Write a string, a number, TRUE, FALSE or a list of them.")


def _python_number(node: exp.Literal) -> int | float:
    return int(node.this) if node.is_int else float(node.this)


def _model_type(options: _Options) -> None:
    if "model_type" not in options.given:
        raise DialectError("CREATE MODEL has no model_type", f"It can be {', '.join(FULLY_CONNECTED)}.")
    word = options.given["model_type"]
    options.job["task"] = options.choose("model_type", FULLY_CONNECTED)
    hidden = options.take("hidden_units", list, "a list of whole numbers, such as [128, 64]")
    network = {
        "hidden": hidden,
        "activation": options.choose("activation_fn", ACTIVATIONS),
        "dropout": options.take("dropout", (int, float), "a number"),
    }
    if str(word).upper() in ("LINEAR_REG", "LOGISTIC_REG"):
        if any(value is not None for value in network.values()):
            raise DialectError(f"{word} has no hidden layers", "Leave hidden_units, activation_fn and dropout out.")
        network = {"hidden": []}
    options.architecture |= {key: value for key, value in network.items() if value is not None}


def _course(options: _Options) -> None:
    """Take the options of the optimizer and of the training's length."""
    taken = {
        "epochs": options.take("max_iterations", int, "a whole number"),
        "learning_rate": options.take("learn_rate", (int, float), "a number"),
        "batch_size": options.take("batch_size", int, "a whole number"),
        "optimizer": options.choose("optimizer", OPTIMIZERS),
    }
    options.arguments |= {key: value for key, value in taken.items() if value is not None}
    decay = options.take("l2_reg", (int, float), "a number")
    if decay is not None:
        options.job["weight_decay"] = decay
    if options.take("early_stop", bool, "TRUE or FALSE") is False:
        options.job["early_stopping"] = {"patience": 0}
    if options.take("auto_class_weights", bool, "TRUE or FALSE"):
        options.job["class_weight"] = "balanced"


def _split(options: _Options) -> None:
    """Take the options that divide the rows into training and validation."""
    method = options.choose("data_split_method", {word: word for word in ("AUTO_SPLIT", "RANDOM", "SEQ", "NO_SPLIT")})
    share = options.take("data_split_eval_fraction", (int, float), "a number")
    column = options.take("data_split_col", str, "the name of a column")
    if method == "NO_SPLIT":
        options.arguments["validation"] = 0.0
    elif share is not None:
        options.arguments["validation"] = share
    if (method == "SEQ") != (column is not None):
        hint = "Write data_split_method = 'SEQ', data_split_col = '...': its largest values are for validation."
        raise DialectError("data_split_col and the data_split_method SEQ need each other", hint)
    if column is not None:
        options.arguments["split_by"] = column


# ---- functions ----

PREDICTED = "SELECT q.*, {function}({model}, q) AS {column} FROM {rows} AS q"
PREDICTED_LABEL = """
    SELECT q.*, {label}({model}, q) AS {column},
           (SELECT jsonb_build_array(jsonb_build_object('label', {second}, 'prob', p.p),
                                     jsonb_build_object('label', {first}, 'prob', 1 - p.p))
            FROM (SELECT {number}({model}, q) AS p OFFSET 0) AS p) AS {probabilities}
    FROM {rows} AS q
"""
HISTORY = """
    SELECT 0 AS training_run, t.epoch AS iteration, t.loss, v.loss AS eval_loss, t.seconds * 1000 AS duration_ms
    FROM tensile.epoch_metrics AS t
         LEFT JOIN tensile.epoch_metrics AS v ON v.job = t.job AND v.epoch = t.epoch AND v.split = 'validation'
    WHERE t.job = {job} AND t.split = 'training'
    ORDER BY t.epoch
"""
CLASSIFIER = {
    "precision": "precision",
    "recall": "recall",
    "accuracy": "accuracy",
    "f1_score": "f1",
    "log_loss": "log_loss",
    "roc_auc": "roc_auc",
}
REGRESSOR = {
    "mean_absolute_error": "mae",
    "mean_squared_error": "rmse",
    "median_absolute_error": "median_absolute_error",
    "r2_score": "r2",
}


def with_functions(statement: Plain, schema: str, describe: Callable[[str], Model]) -> str:
    """Return the statement in PostgreSQL's dialect, with the functions of `schema`; `describe` knows the models."""
    tree = statement.tree.copy()
    for table in [node for node in tree.find_all(exp.Table) if isinstance(node.this, exp.Func)]:
        build = FUNCTIONS.get(type(table.this))
        if build is None:
            continue
        call = table.this
        if call.args.get("params_struct") is not None:
            raise DialectError("a function of a model has no STRUCT of settings here", "Leave it out.")
        name = _name(call.this)
        rows = _rows(call)
        query = build(_Call(schema, name, rows, statement.read), describe(name))
        alias = table.args.get("alias") or exp.TableAlias(this=exp.to_identifier("ml"))
        table.replace(exp.Subquery(this=query, alias=alias.copy()))
    return written(tree, statement.read)


def _rows(call: exp.Func) -> exp.Query | None:
    """Return the query of the rows that a function is given; None without one."""
    given = call.args.get("expression")
    if given is None:
        return None
    if isinstance(given, exp.Table):
        return exp.select("*").from_(given.copy())
    return cast(exp.Query, given.copy().unnest())


class _Call(NamedTuple):
    schema: str
    model: str
    rows: exp.Query | None
    read: str

    def function(self, name: str) -> str:
        return f"{_quoted(self.schema)}.{_quoted(name)}"

    def over_rows(self, template: str, **parts: str) -> exp.Query:
        """Return the query of a template, with the rows in the place of {rows}."""
        assert self.rows is not None  # without them, the statement cannot be parsed
        query = parse_one(template.format(rows=ROWS, model=_literal(self.model), **parts), read=POSTGRES)
        for table in list(query.find_all(exp.Table)):
            if table.name == ROWS:
                table.replace(exp.Subquery(this=self.rows, alias=table.args["alias"].copy()))
        return cast(exp.Query, query)


def _quoted(name: str) -> str:
    return exp.to_identifier(name, quoted=True).sql(dialect=POSTGRES)


def _literal(value: str) -> str:
    return exp.Literal.string(value).sql(dialect=POSTGRES)


def _predict(call: _Call, model: Model) -> exp.Query:
    column = _quoted(f"predicted_{model.target}")
    if not model.labels:
        return call.over_rows(PREDICTED, function=call.function("predict"), column=column)
    if len(model.labels) != 2:
        return call.over_rows(PREDICTED, function=call.function("predict_class"), column=column)
    first, second = (_literal(label) for label in model.labels)
    return call.over_rows(
        PREDICTED_LABEL,
        label=call.function("predict_class"),
        number=call.function("predict"),
        column=column,
        probabilities=_quoted(f"predicted_{model.target}_probs"),
        first=first,
        second=second,
    )


def _evaluate(call: _Call, model: Model) -> exp.Query:
    names = CLASSIFIER if model.labels else REGRESSOR
    if call.rows is None:
        values = {name: model.metrics.get(metric) for name, metric in names.items()}
        columns = [f"{_number(_squared(name, value))} AS {_quoted(name)}" for name, value in values.items()]
        return cast(exp.Query, parse_one(f"SELECT {', '.join(columns)}", read=POSTGRES))
    arguments = f"{_literal(call.model)}, {_literal(written(cast(exp.Expr, call.rows), call.read))}"
    columns = [
        f"{_power(name)} AS {_quoted(name)}".format(f"MAX(e.value) FILTER (WHERE e.metric = '{metric}')")
        for name, metric in names.items()
    ]
    source = f"{_quoted(call.schema)}.evaluate_model({arguments}) AS e"  # quoted, it would become upper case
    where = "e.label IS NULL AND e.predicted IS NULL AND e.quantile IS NULL"
    return cast(exp.Query, parse_one(f"SELECT {', '.join(columns)} FROM {source} WHERE {where}", read=POSTGRES))


def _squared(name: str, value: float | None) -> float | None:
    return value * value if value is not None and name == "mean_squared_error" else value


def _power(name: str) -> str:
    return "({0}) ^ 2" if name == "mean_squared_error" else "{0}"


def _number(value: float | None) -> str:
    return f"CAST({'NULL' if value is None else json.dumps(value)} AS DOUBLE PRECISION)"


def _training_info(call: _Call, model: Model) -> exp.Query:
    return cast(exp.Query, parse_one(HISTORY.format(job="NULL" if model.job is None else model.job), read=POSTGRES))


FUNCTIONS: dict[type[exp.Expr], Callable[[_Call, Model], exp.Query]] = {
    exp.Predict: _predict,
    Evaluate: _evaluate,
    TrainingInfo: _training_info,
}
