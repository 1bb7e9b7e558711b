"""Generator of docs/sql.md: functions, views and settings from the catalogues, and every SQLSTATE.

    python -m scripts.sql_reference [--check]

writes the file; with --check it only reports whether the file is up to date (exit status 1 if not). The catalogues are
those of a temporary server with the installed extension. Functions, views and columns are described by their COMMENTs
in sql/, settings by pg_tensile/csrc/base/guc.c, architectures and options by pg_tensile/rules.json, SQLSTATEs by
scripts/sqlstates.py and arguments by a table below; tests compare both tables with the catalogues and the sources
(tests/server/test_docs.py, tests/unit/project/test_docs.py). Private objects (whose name begins with an underscore, or
whose comment with "private:") are left out.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import class_row

from pg_tensile.rules import ARCHITECTURES, OPTIONS, describe, resolved
from scripts.cluster import REPOSITORY, temporary_cluster
from scripts.sqlstates import ERRORS, condition

Connection = psycopg.Connection[tuple[Any, ...]]

REFERENCE = REPOSITORY / "docs" / "sql.md"
COMMAND = "python -m scripts.sql_reference"
WIDTH = 100  # of a signature on one line
VOLATILITIES = {"i": "Immutable", "s": "Stable", "v": "Volatile"}
CHANGED_BY = {"user": "session", "superuser": "superuser", "sighup": "reload", "postmaster": "restart"}
BUILD_DEFAULTS = {"pg_tensile.python": "`PYTHON=` of `make install`"}  # defaults that differ from machine to machine

FUNCTIONS = """
    SELECT p.proname::text AS name, n.nspname::text AS schema, pg_get_function_arguments(p.oid) AS arguments,
           pg_get_function_result(p.oid) AS result, p.provolatile::text AS volatility,
           coalesce(p.proargnames, '{}') AS names,
           has_function_privilege('tensile_user', p.oid, 'EXECUTE') AS for_users,
           has_function_privilege('tensile_predictor', p.oid, 'EXECUTE') AS for_predictors,
           obj_description(p.oid, 'pg_proc') AS description
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
         JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
         JOIN pg_extension e ON e.oid = d.refobjid AND d.refclassid = 'pg_extension'::regclass
    WHERE e.extname = 'pg_tensile' AND p.proname !~ '^_'
      AND coalesce(obj_description(p.oid, 'pg_proc'), '') !~ '^private:'
    ORDER BY p.proname::text COLLATE "C", pg_get_function_arguments(p.oid) COLLATE "C"
"""
COLUMNS = """
    SELECT c.relname::text AS relation, obj_description(c.oid, 'pg_class') AS about, a.attname::text AS name,
           format_type(a.atttypid, a.atttypmod) AS type,
           col_description(c.oid, a.attnum) AS description
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    WHERE c.relnamespace = 'tensile'::regnamespace
    ORDER BY c.relname::text COLLATE "C", a.attnum
"""
SETTINGS = """
    SELECT name, vartype AS type, unit, boot_val AS initial, min_val AS least, max_val AS most, enumvals AS words,
           context, short_desc AS purpose, extra_desc AS details
    FROM pg_settings WHERE starts_with(name, 'pg_tensile.') ORDER BY name COLLATE "C"
"""

DEVELOPERS = "Developer settings"
# The names of the settings by subject, each group in the order of its table
SETTING_GROUPS = {
    "Server and device": "database python python_path device model_path max_jobs log_jobs",
    "Memory": "device_memory host_memory memory_flow flow_timeout dataset_cache model_cache model_idle child_memory",
    "Jobs": "policy ageing search_time checkpoint_interval max_state_size max_retries executor_timeout job_retention"
    " version_retention",
    "Limits of roles": "role_max_jobs role_job_memory role_job_time",
    "Processor": "threads nice auto_calibrate",
    "Predictions": "predict_timeout predict_in_session predict_batching drift_sample_rate drift_window",
    "Ray cluster": "ray_address ray_token_file ray_timeout",
    DEVELOPERS: "plan_events update_threshold latency_weight search_processes predict_spin fork_server",
}

# What an argument or a column of a result means, the same in all functions that have it
ARGUMENTS = {
    "columns": "names of the columns that its query reads",
    "architecture": "object with the `type` and its keys: [architectures](#architectures); null: the first"
    " training chooses one by the columns of its query and the values of arrays",
    "baseline": "the value [without a model](evaluating.md#the-baseline)",
    "batch_size": "rows per step, 1 to 10000000; null: chosen by the number of rows; 0:"
    " [chosen by plans](training.md#the-batch-size)",
    "attribution": "share of the prediction that is due to the column; the base value where `feature` is null",
    "by": "column of the query by whose values rows are grouped: a text, number, boolean or date; null: no groups",
    "contents": "file that `export_model` has written in the format `tensile`",
    "coverage": "probability with which the target lies in the interval, above 0 and below 1",
    "description": "description of the model, for readers",
    "deployed": "true if predictions use the version",
    "deviation": "standard deviation of the importance over the repeats",
    "device_seconds": "duration of the measurements in seconds, 1 to 86400",
    "document": "text, of which the first 65,536 characters count",
    "drift": "drift of the deployed version above which a training starts, above 0 and up to 10:"
    " [drift](drift.md); null: not by drift",
    "embedding": "vector of the text; null if it is null",
    "epochs": "passes over the training rows, at most: 1 to 1000000",
    "every": "time between two trainings or evaluations, from 1 second to 100 years; null: not by time",
    "feature": "column of the training query",
    "features": "row, object, or array of numbers in the order of the training query",
    "format": "[format of the file](export.md): `tensile`, `onnx`, or `torch`, the weights only",
    "halving": "when trials are stopped early: `min_epochs` and `factor`"
    " ([tuning](tuning.md#stop-bad-trials-early)); null: none is",
    "grantee": "role, or `public`",
    "group_value": "value of the column `by`; null: without `by`, or the group of rows where it is null",
    "importance": "mean by which the metric becomes worse; 0: the feature does not matter on these rows",
    "into_table": "table for the predictions; it is made if it does not exist",
    "job": "number of the job, as returned by `train_model`",
    "keep_versions": "number of versions; 0: all; null: `pg_tensile.version_retention`",
    "key": "columns of the query that identify a row; null: the table's primary key",
    "label": "most probable class, null for a regression; of `predict_probabilities`: a class; of `evaluate_model`: the"
    " target of a row of `confusion`",
    "learning_rate": "step size of the optimizer, above 0; null: chosen by the architecture",
    "max_time": "longest time of training; of `tune_model`: time after which no trial begins or continues; null: no"
    " limit",
    "lower": "lower bound of the interval",
    "memory_budget": "device memory for a job, or for predictions with a model, such as `2GB`; null: for a job what the"
    " device has, for a prediction the model's own budget, or else no limit",
    "metric": "name of a metric: [evaluating](evaluating.md#metrics); null: `log_loss`, or `r2` of a regression; of"
    " `tune_model` `rmse`, of `schedule_evaluation` all",
    "metric_used": "metric that became worse",
    "model": "name of the model",
    "name": "name of the model",
    "optimizer": "`sgd`, `adam` or `adamw`",
    "options": "[options of the job](#options-of-a-job); `explain_training` accepts `format` as well: `text` or `json`",
    "policy": "one of the values of the setting `pg_tensile.policy`; null: the current value of the setting",
    "parallel": "number of trials that train at once, 1 to 64",
    "predicted": "predicted class of a row of `confusion`, else null; of `materialize_predictions` the number of"
    " predicted rows",
    "prediction": "number, or probability of the second of two classes, or class if classes are numbers; else null",
    "priority": "-1000 to 1000; a higher priority starts earlier and loses less time to other jobs' memory",
    "privilege": "`predict` or `train`",
    "probability": "probability of the label; null for a regression",
    "quantile": "share of the rows up to a residual, or up to the end of a bin of `calibration_…`; else null",
    "query": "one SELECT that changes nothing; `train_model` runs it as the submitting role, the other"
    " functions as the caller",
    "reason": "reason of the caller, kept in [deployments](#tensiledeployments); null: none",
    "removed": "number of rows that the query no longer has",
    "repeats": "number of times that a feature is shuffled, 1 to 1000",
    "replace": "true: an existing model of that name gets the new architecture and keeps its versions",
    "role": "new owner of the model",
    "rows": "number of new rows that cause a training; null: not by rows",
    "row_number": "number of the query's row, from 1",
    "scheduled": "true if a schedule trains the model",
    "seconds": "duration of the measurements in seconds, 1 to 86400",
    "seed": "seed of random numbers: equal seeds and rows give equal weights, on one machine with as many threads, and"
    " equal importances",
    "source": "table whose new rows count; of `predict_table`: table or view that is read in place of the first one of"
    " the training query; null: that one; of `models_of_table`: table or view",
    "space": "ranges and lists that values are chosen from, by key: [tuning](tuning.md#say-what-is-chosen-from); null:"
    " the architecture's",
    "split_by": "column of the query by which rows are divided into training and validation; null: by their content",
    "state": "final state of the job: `finished` or `cancelled`",
    "target": "column of the query that the model learns to predict",
    "template": "model whose deployed version has the same architecture and columns; then `contents` are weights only,"
    " a safetensors file as in the format `torch`; null: a model file",
    "timeout": "longest time to wait; null: no limit",
    "trained_on": "relation that the query of the version reads",
    "trials": "number of trials, 1 to 10000",
    "tuning": "number of the tuning, as returned by `tune_model`",
    "unchanged": "number of rows whose predictions are kept",
    "upper": "upper bound of the interval",
    "validation": "share of rows not used for training but for validation after each epoch: 0 or more, less than 1",
    "validation_query": "one SELECT like `query`, with the same columns: the rows for validation, in place of a share",
    "value": "value of the metric; null: not defined by these rows",
    "version": "number of the version, 1 for a model's first",
}


class Function(NamedTuple):
    """A function, or a procedure (`result` is None)."""

    name: str
    schema: str
    arguments: str
    result: str | None
    volatility: str
    names: list[str]  # of the arguments and the columns of the result
    for_users: bool
    for_predictors: bool
    description: str | None

    @property
    def qualified(self) -> str:
        return f"tensile.{self.name}" if self.schema == "tensile" else self.name


class Column(NamedTuple):
    """A column of a view, with the description of that view."""

    relation: str
    about: str | None
    name: str
    type: str
    description: str | None


class Setting(NamedTuple):
    """A setting as described in pg_settings."""

    name: str
    type: str
    unit: str | None
    initial: str
    least: str | None
    most: str | None
    words: list[str] | None
    context: str
    purpose: str
    details: str | None


# ---- the catalogues -------------------------------------------------------------------------------------------------


def functions(connection: Connection) -> list[Function]:
    """Return the functions by name; overloads by their arguments."""
    return connection.cursor(row_factory=class_row(Function)).execute(FUNCTIONS).fetchall()


def columns(connection: Connection) -> list[Column]:
    """Return the columns of all views, by name of the view and in its order."""
    return connection.cursor(row_factory=class_row(Column)).execute(COLUMNS).fetchall()


def settings(connection: Connection) -> list[Setting]:
    """Return the settings by name."""
    return connection.cursor(row_factory=class_row(Setting)).execute(SETTINGS).fetchall()


# ---- Markdown -------------------------------------------------------------------------------------------------------


def render(connection: Connection) -> str:
    """Render the whole document, from a database that has the extension."""
    parts = [
        "# SQL reference",
        f"Generated by `{COMMAND}` from the comments in the catalogues, which psql's `\\df+` and `\\d+` show as well;"
        " do not edit it by hand. [tutorial.md](tutorial.md) is the introduction.",
        "## Functions",
        "In the schema of the extension, unless another one is named. A function for the owner of a model or a job may"
        " also be called by members of the owning role and by superusers.",
        *_functions(functions(connection)),
        "### Arguments and results",
        "The same name has the same meaning everywhere.",
        _table(("name", "meaning"), ((f"`{name}`", meaning) for name, meaning in sorted(ARGUMENTS.items()))),
        "## Architectures",
        "The argument `architecture` of `register_model` is an object with the `type` and these keys. Keys left out"
        " have their defaults.",
        *_architectures(),
        "## Options of a job",
        "The keys of the argument `options` of `train_model` and `explain_training`.",
        _table(("key", "value", "default", "meaning"), map(_key, OPTIONS["properties"].items())),
        "## Views",
        "In schema `tensile`. Members of `tensile_user` and `tensile_predictor` may read all of them. Row-level"
        " security shows each role its own models and jobs and the models granted to it, and members of"
        " `pg_read_all_stats` those of all roles."
        " Columns without an explanation have the meaning of their names, among them those of the arguments of"
        " `register_model` and `train_model`; `model_id` and `owner_id` are the numbers of `model` and `owner`.",
        *_relations(columns(connection)),
        "## Settings",
        '"reload" means `postgresql.conf` and `pg_reload_conf()`, "restart" a restart of the server, "session" any role'
        ' with `SET`, "superuser" superusers, for a role with `ALTER ROLE`: see [limits per'
        " role](operations.md#limits-per-role).",
        *_settings(settings(connection)),
        "## SQLSTATEs",
        "The errors raised by pg_tensile itself. The row of a failed job in `tensile.jobs` has its SQLSTATE, message,"
        " hint and traceback, and `wait_for_job` raises that error. Errors of the query keep PostgreSQL's SQLSTATE.",
        _table(
            ("SQLSTATE", "condition", "cause", "remedy"),
            ((f"`{code}`", f"`{condition(code)}`", *texts) for code, texts in sorted(ERRORS.items())),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _functions(described: Iterable[Function]) -> Iterator[str]:
    for name, overloads in groupby(described, lambda function: function.qualified):
        yield f"### {name}"
        for function in overloads:
            yield f"```\n{signature(function)}\n```"
            yield sentence(function.description)
            callers = "members of `tensile_user`" if function.for_users else "superusers and roles granted EXECUTE"
            callers += " and `tensile_predictor`" if function.for_predictors else ""
            kind = "Procedure" if function.result is None else VOLATILITIES[function.volatility]
            yield f"{kind}; {callers} may call it."


def signature(function: Function) -> str:
    """Format a function's signature as SQL: on one line, or with one argument a line if that is too long."""
    arguments = re.sub(r"(DEFAULT (?:'[^']*'|NULL))::[a-z ]+(?:\[\])?", r"\1", function.arguments)
    name = function.qualified
    before, after = ("CALL ", "") if function.result is None else ("", f" → {function.result}")
    whole = f"{before}{name}({arguments}){after}"
    if len(whole) <= WIDTH:
        return whole
    return f"{before}{name}(\n    " + arguments.replace(", ", ",\n    ") + f"\n){after}"


def _architectures() -> Iterator[str]:
    for name, rules in ARCHITECTURES.items():
        yield f"### {name}"
        yield rules["description"] + (" Members of `pg_execute_server_program` only." if rules.get("code") else "")
        yield _table(
            ("key", "value", "default", "meaning"),
            (_key((key, rule), key in rules.get("required", ())) for key, rule in rules["properties"].items()),
        )


def _key(named: tuple[str, dict[str, Any]], required: bool = False) -> tuple[str, ...]:
    key, rule = named[0], resolved(named[1])
    default = f"`{json.dumps(rule['default'])}`" if "default" in rule else "required" if required else ""
    members = ", ".join(f'"{name}": {describe(inner)}' for name, inner in rule.get("properties", {}).items())
    return f"`{key}`", f"{{{members}}}" if members else describe(rule), default, rule["description"]


def _relations(described: Iterable[Column]) -> Iterator[str]:
    for (relation, about), members in groupby(described, lambda column: column[:2]):
        yield f"### tensile.{relation}"
        yield sentence(about)
        rows = ((f"`{column.name}`", column.type, column.description or "") for column in members)
        yield _table(("column", "type", "meaning"), rows)


def _settings(described: Sequence[Setting]) -> Iterator[str]:
    """Yield a heading and a table for each group. Raises ValueError if a setting is in none, or in two."""
    by_name = {setting.name.removeprefix("pg_tensile."): setting for setting in described}
    grouped = [name for names in SETTING_GROUPS.values() for name in names.split()]
    if sorted(grouped) != sorted(by_name):
        raise ValueError(f"SETTING_GROUPS differs in {sorted(set(grouped) ^ set(by_name)) or sorted(grouped)}")
    for group, names in SETTING_GROUPS.items():
        yield f"### {group}"
        if group == DEVELOPERS:
            yield "For work on pg_tensile itself, and for rare cases. Their defaults suit everybody else."
        heads = ("setting", "default", "values", "changed by", "meaning")
        yield _table(heads, (_setting(by_name[name]) for name in names.split()))


def _setting(setting: Setting) -> tuple[str, ...]:
    unit = f" {setting.unit}" if setting.unit else ""
    words = ("on", "off") if setting.type == "bool" else setting.words or ()
    values = " ".join(f"`{word}`" for word in words)
    if setting.least is not None:
        values = f"{setting.least} to {setting.most}{unit}"
    initial = BUILD_DEFAULTS.get(setting.name, f"`{setting.initial}`{unit}" if setting.initial else "empty")
    meaning = " ".join(filter(None, (setting.purpose, setting.details)))
    return f"`{setting.name}`", initial, values or "text", CHANGED_BY[setting.context], meaning


def sentence(comment: str | None) -> str:
    """Return a comment of the catalogue as a sentence; "" if there is no comment, which a test forbids."""
    return f"{comment[0].upper()}{comment[1:]}." if comment else ""


def _table(heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# ---- command --------------------------------------------------------------------------------------------------------


def generate() -> str:
    """Generate the document from a temporary server."""
    folder = Path(tempfile.mkdtemp(prefix="pgt-", dir="/tmp"))
    folder.chmod(0o711)  # the server's user has to pass through it
    try:
        with temporary_cluster(folder / "cluster") as cluster, cluster.connect() as connection:
            connection.execute("CREATE EXTENSION pg_tensile CASCADE")
            return render(connection)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(f"usage: {COMMAND} [--check]", file=sys.stderr)
        return 2
    text = generate()
    if not arguments:
        REFERENCE.write_text(text)
        return 0
    if REFERENCE.exists() and REFERENCE.read_text() == text:
        return 0
    print(f"{REFERENCE.relative_to(REPOSITORY)} is not what the catalogues say: run {COMMAND}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
