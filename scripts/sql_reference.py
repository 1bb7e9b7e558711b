"""Generator of docs/sql.md: all functions, tables, views and settings from the catalogues, and every SQLSTATE.

    python -m scripts.sql_reference [--check]

Writes the file; with --check it only reports whether the file is up to date (exit status 1: it is not). The catalogues
are those of a temporary server with the extension as it is installed. Functions, tables, views and columns are
described by their COMMENTs in sql/, settings by pg_tensile/csrc/guc.c, architectures and options by
pg_tensile/rules.json, arguments and SQLSTATEs by the tables here, which tests compare with the catalogues and the
sources (tests/server/test_docs.py, tests/unit/project/test_docs.py). Private objects (a name that begins with an
underscore, or a comment with "private:") are left out.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from psycopg.rows import class_row

from pg_tensile.rules import ARCHITECTURES, OPTIONS, describe, resolved
from scripts.cluster import REPOSITORY, temporary_cluster

Connection = psycopg.Connection[tuple[Any, ...]]

REFERENCE = REPOSITORY / "docs" / "sql.md"
COMMAND = "python -m scripts.sql_reference"
WIDTH = 100  # of a signature on one line
VOLATILITIES = {"i": "Immutable", "s": "Stable", "v": "Volatile"}
KINDS = {"r": "Table", "v": "View"}
CHANGED_BY = {"user": "session", "sighup": "reload", "postmaster": "restart"}
OF_THE_BUILD = {"pg_tensile.python": "`PYTHON=` of `make install`"}  # defaults that differ from machine to machine

FUNCTIONS = """
    SELECT p.proname::text AS name, n.nspname::text AS schema, pg_get_function_arguments(p.oid) AS arguments,
           pg_get_function_result(p.oid) AS result, p.provolatile::text AS volatility,
           coalesce(p.proargnames, '{}') AS names,
           has_function_privilege('tensile_user', p.oid, 'EXECUTE') AS for_users,
           obj_description(p.oid, 'pg_proc') AS description
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
         JOIN pg_depend d ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid AND d.deptype = 'e'
         JOIN pg_extension e ON e.oid = d.refobjid AND d.refclassid = 'pg_extension'::regclass
    WHERE e.extname = 'pg_tensile' AND p.proname !~ '^_'
      AND coalesce(obj_description(p.oid, 'pg_proc'), '') !~ '^private:'
    ORDER BY p.proname::text COLLATE "C", pg_get_function_arguments(p.oid) COLLATE "C"
"""
COLUMNS = """
    SELECT c.relname::text AS relation, c.relkind::text AS kind, obj_description(c.oid, 'pg_class') AS about,
           a.attname::text AS name, format_type(a.atttypid, a.atttypmod) AS type,
           col_description(c.oid, a.attnum) AS description
    FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    WHERE c.relnamespace = 'tensile'::regnamespace AND c.relkind IN ('r', 'v') AND c.relname !~ '^_'
    ORDER BY c.relname::text COLLATE "C", a.attnum
"""
SETTINGS = """
    SELECT name, vartype AS type, unit, boot_val AS initial, min_val AS least, max_val AS most, enumvals AS words,
           context, short_desc AS purpose, extra_desc AS details
    FROM pg_settings WHERE starts_with(name, 'pg_tensile.') ORDER BY name COLLATE "C"
"""

ARGUMENTS = {
    "architecture": "`type` and its keys: [architectures](#architectures)",
    "batch_size": "rows of one step, 1 to 10000000; 0: [chosen](training.md#the-batch-size)",
    "description": "of the model, for people",
    "device_seconds": "how long to measure, 1 to 86400",
    "epochs": "passes over the training rows, 1 to 1000000",
    "features": "a row, an object, or an array of numbers in the order of the training query",
    "grantee": "a role, or `public`",
    "job": "its number, as `train_model` returned it",
    "keep_versions": "1 or more; null: all",
    "label": "the most probable class; null for a regression",
    "learning_rate": "size of the optimizer's steps, above 0",
    "memory_budget": "device memory of this job, or that the model is executed within to predict, such as `2GB`; null:"
    " what the device has; in a prediction the model's own, else all that it takes",
    "model": "its name",
    "name": "of the model",
    "optimizer": "`sgd`, `adam` or `adamw`",
    "options": "[of a job](#options-of-a-job); `explain_training` has `format` as well: `text` or `json`",
    "policy": "one of the values of the setting `pg_tensile.policy`; null: what it is set to",
    "prediction": "a number, the probability of the second of two classes, or the class where classes are numbers;"
    " else null",
    "priority": "-1000 to 1000; a higher one starts earlier, and loses less time to others' memory",
    "privilege": "`predict` or `train`",
    "probability": "of the label; null for a regression",
    "query": "one SELECT that changes nothing; `train_model` runs it as the submitting role, `predict_rows` as the"
    " caller",
    "replace": "a model of that name gets the new architecture; its versions stay",
    "role": "that the model is given to",
    "row_number": "of the query's rows, from 1",
    "seed": "equal seeds and rows give equal weights, on one machine with as many threads",
    "state": "the job's last: `finished` or `cancelled`",
    "target": "column of the query that the model learns to predict",
    "timeout": "null: waits as long as it takes",
    "validation": "share of rows that are not trained on, but measured after each epoch: 0 or more, less than 1",
    "version": "its number, 1 for a model's first",
}

# SQLSTATE: the error, and its remedy
ERRORS = {
    "08000": ("The predictor cannot be reached.", "The message ends with the operating system's reason."),
    "08006": (
        "The predictor, or a job's executor, went away in the middle of a request.",
        "Try again: it is started anew. The server's log says why it ended.",
    ),
    "08P01": (
        "Two processes of pg_tensile do not understand each other.",
        "Run `make install` and restart the server, so that both are of one version.",
    ),
    "0A000": (
        "A column's type, a temporary table, `PREPARE TRANSACTION`, or a model that cannot be captured as a graph.",
        "Cast or leave out the column, use an ordinary table; train the model with `policy => 'none'`, predict without"
        " `memory_budget`.",
    ),
    "22000": (
        "The rows cannot be used: none, too few for a batch, one class only, arrays of different lengths.",
        "Change the query as the hint says.",
    ),
    "22003": (
        "The loss or a weight became infinite or not a number.",
        "Lower `learning_rate`, set the option `clip`, look for extreme values in the data.",
    ),
    "22004": ("An argument is null that may not be.", "Pass a value, or leave the argument out."),
    "22008": ("A date is too far away for a timestamp.", "Leave such rows out of the query."),
    "22023": (
        "An argument, an option or a key is unknown or out of range, or an architecture does not fit the columns.",
        "The hint has the range, the names there are, or the nearest one.",
    ),
    "2202E": (
        "`predict` got an array with more or fewer elements than the model has features.",
        "The hint has the features in their order.",
    ),
    "25006": (
        "The query changes something: a CTE that writes, `FOR UPDATE`, a function that writes.",
        "Give a query that only reads.",
    ),
    "38000": (
        "Code of the model, or of a library, raised an error that nobody has put into words.",
        "The traceback is in the job's row, or in the error's detail.",
    ),
    "3D000": (
        "In the server's log only: `pg_tensile.database` does not exist.",
        "Create it, or change the setting and reload.",
    ),
    "42501": (
        "The role may not do that: with the model, the job, the query's tables, or it may not log in.",
        "The hint says who can allow it.",
    ),
    "42601": ("The query is empty, not one SELECT, or has a syntax error.", "Give one SELECT."),
    "42701": ("The query returns two columns of one name.", "Give each its own name with `AS`."),
    "42702": ("A row to predict for has two columns with a feature's name.", "Give each its own name with `AS`."),
    "42703": (
        "The target is no column of the query, or a feature is missing in what is to be predicted for.",
        "The hint has the nearest name, or all of them.",
    ),
    "42704": (
        "There is no such model, version, job or role; or it was dropped while the job waited.",
        "`tensile.models` and `tensile.jobs` list what the role may see.",
    ),
    "42710": ("There is a model of that name.", "Choose another name, or `replace => true`."),
    "42804": (
        "A value's type does not fit the feature, or the function does not fit the task (numbers, classes).",
        "Cast the value; `predict` is for numbers, `predict_class` for classes.",
    ),
    "53000": (
        "There is no background worker for the predictor, no job slot for `explain_training`, or a session has too"
        " many open files.",
        "Raise `max_worker_processes`, `pg_tensile.max_jobs` or `max_files_per_process`, or try again later.",
    ),
    "53100": (
        "There is no disk space for training data that exceeds `pg_tensile.dataset_cache`.",
        "Free space in the data directory, raise the setting, or select less.",
    ),
    "53200": (
        "A job, or a model that is to predict, needs more device memory than it may have or there is, or its process"
        " more of the host's than `pg_tensile.child_memory`.",
        "Use the batch size of the hint, a larger `memory_budget`, or raise `pg_tensile.device_memory` or "
        "`pg_tensile.child_memory`.",
    ),
    "54000": (
        "A text column has more than a million distinct values, a row 1 GB, a plan too many events, or a job's"
        " checkpoint or weights are larger than `pg_tensile.max_state_size`.",
        "Leave the column out or group its values; raise `pg_tensile.plan_events` or `pg_tensile.max_state_size`.",
    ),
    "55000": (
        "Not here or not now: the library is not preloaded, another database or a standby, versions that differ, no"
        " device, no version to predict with, waiting for a job that is not committed.",
        "The hint says what comes first.",
    ),
    "55006": (
        "The model is being trained, the device is being calibrated, or the version is deployed.",
        "Wait with `wait_for_job`, or stop the job with `cancel_job`; deploy another version.",
    ),
    "57014": (
        "`wait_for_job` or a prediction took longer than allowed, or the query was canceled.",
        "Wait longer, or raise `pg_tensile.predict_timeout`; a job goes on all the same.",
    ),
    "58000": (
        "The executor died or hung, more often than `pg_tensile.max_retries` allows.",
        "The traceback in the job's row and the server's log say how; the kernel's log if it was killed.",
    ),
    "58P01": (
        "`pg_tensile.python` cannot be started, or has no PyTorch.",
        "Name an interpreter that the server's operating-system user can run, and reload.",
    ),
    "XX000": ("A fault of pg_tensile.", "Report it, with the traceback in the job's row."),
    "XX001": (
        "Stored weights or a checkpoint are damaged, or do not fit the model.",
        "Train the model again; if it comes back, look at disk and memory.",
    ),
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
    description: str | None

    @property
    def qualified(self) -> str:
        return f"tensile.{self.name}" if self.schema == "tensile" else self.name


class Column(NamedTuple):
    """A column of a table or view, with the description of that relation."""

    relation: str
    kind: str
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
    """Return the columns of all tables and views, by name of the relation and in its order."""
    return connection.cursor(row_factory=class_row(Column)).execute(COLUMNS).fetchall()


def settings(connection: Connection) -> list[Setting]:
    """Return the settings by name."""
    return connection.cursor(row_factory=class_row(Setting)).execute(SETTINGS).fetchall()


# ---- Markdown -------------------------------------------------------------------------------------------------------


def render(connection: Connection) -> str:
    """Render the whole document, from a database that has the extension."""
    parts = [
        "# SQL reference",
        f"Written by `{COMMAND}` from the comments in the catalogues, which psql's `\\df+` and `\\d+` show, too: not to"
        " be edited by hand. [tutorial.md](tutorial.md) is the way in.",
        "## Functions",
        "In the schema that the extension was created in, unless another one is named. What is for a model's or a job's"
        " owner is also for members of the owning role and for superusers.",
        *_functions(functions(connection)),
        "### Arguments and results",
        "One name means the same everywhere.",
        _table(("name", "meaning"), ((f"`{name}`", meaning) for name, meaning in sorted(ARGUMENTS.items()))),
        "## Architectures",
        "The argument `architecture` of `register_model` is an object with the `type` and these keys. One that is left"
        " out has its default.",
        *_architectures(),
        "## Options of a job",
        "The keys of the argument `options` of `train_model` and `explain_training`.",
        _table(("key", "value", "default", "meaning"), map(_key, OPTIONS["properties"].items())),
        "## Tables and views",
        "In schema `tensile`. Members of `tensile_user` may read all of them and only superusers write them; row-level"
        " security shows each role its own models and jobs and what it was granted, members of `pg_read_all_stats` all"
        " of them but weights and checkpoints. Columns without an explanation are what their names say, those of the"
        " arguments of `register_model` and `train_model` among them.",
        *_relations(columns(connection)),
        "## Settings",
        '"reload" means `postgresql.conf` and `pg_reload_conf()`, "restart" a restart of the server, "session" anybody'
        " with `SET`.",
        _table(("setting", "default", "values", "changed by", "meaning"), map(_setting, settings(connection))),
        "## SQLSTATEs",
        "The errors that pg_tensile raises itself. A job that fails keeps SQLSTATE, message, hint and traceback in its"
        " row of `tensile.jobs`, and `wait_for_job` raises it. What the query raises keeps PostgreSQL's SQLSTATE.",
        _table(
            ("SQLSTATE", "condition", "what is wrong", "what to do"),
            ((f"`{code}`", f"`{condition(code)}`", *texts) for code, texts in sorted(ERRORS.items())),
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _functions(found: Iterable[Function]) -> Iterator[str]:
    for name, overloads in groupby(found, lambda function: function.qualified):
        yield f"### {name}"
        for function in overloads:
            yield f"```\n{signature(function)}\n```"
            yield sentence(function.description)
            who = "members of `tensile_user`" if function.for_users else "superusers and those they grant EXECUTE"
            what = "Procedure" if function.result is None else VOLATILITIES[function.volatility]
            yield f"{what}; {who} may call it."


def signature(function: Function) -> str:
    """Format a function's signature as SQL: on one line, or with one argument a line if that is too long."""
    arguments = re.sub(r"(DEFAULT (?:'[^']*'|NULL))::[a-z ]+", r"\1", function.arguments)
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
    inner = ", ".join(f'"{name}": {describe(each)}' for name, each in rule.get("properties", {}).items())
    return f"`{key}`", f"{{{inner}}}" if inner else describe(rule), default, rule["description"]


def _relations(found: Iterable[Column]) -> Iterator[str]:
    for (relation, kind, about), members in groupby(found, lambda column: column[:3]):
        yield f"### tensile.{relation}"
        yield f"{KINDS[kind]}: {sentence(about)}"
        rows = ((f"`{column.name}`", column.type, column.description or "") for column in members)
        yield _table(("column", "type", "meaning"), rows)


def _setting(setting: Setting) -> tuple[str, ...]:
    unit = f" {setting.unit}" if setting.unit else ""
    words = ("on", "off") if setting.type == "bool" else setting.words or ()
    values = " ".join(f"`{word}`" for word in words)
    if setting.least is not None:
        values = f"{setting.least} to {setting.most}{unit}"
    initial = OF_THE_BUILD.get(setting.name, f"`{setting.initial}`{unit}")
    meaning = " ".join(filter(None, (setting.purpose, setting.details)))
    return f"`{setting.name}`", initial, values or "text", CHANGED_BY[setting.context], meaning


def condition(code: str) -> str:
    """Return the SQLSTATE's name in PL/pgSQL: "invalid_parameter_value"."""
    name = psycopg.errors.lookup(code).__name__
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).rstrip("_").lower()


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
