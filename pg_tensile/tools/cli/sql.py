"""The command `pg-tensile sql`: statements of BigQuery ML, and queries in other dialects, run by the server."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import IO, Any

from pg_tensile.errors import OptionError
from pg_tensile.tools.cli import server
from pg_tensile.tools.cli.output import writing

EXAMPLES = """
The rows of queries are CSV; other results go to stderr. The whole script is parsed before its first statement runs.

examples:
  pg-tensile sql "CREATE MODEL late OPTIONS(model_type='DNN_CLASSIFIER', input_label_cols=['late']) AS
                  SELECT carrier, distance, late FROM flights"
  pg-tensile sql "SELECT * FROM ML.PREDICT(MODEL late, TABLE flights_today)" -o predictions.csv
  pg-tensile sql --read snowflake -f report.sql
"""
MODEL = """
    SELECT v.task, v.preprocessing->'target'->>'name' AS target, v.preprocessing->'labels' AS labels,
           v.metrics->'validation' AS metrics, v.job, m.deployed_version
    FROM tensile.models m
         LEFT JOIN tensile.model_versions v ON v.model_id = m.model_id AND v.version = m.deployed_version
    WHERE m.model = %s
"""


def add(commands: Any) -> None:
    """Add the command to the parsers of `pg-tensile`; it sets `run`, which takes the parsed arguments."""
    what = "statements of BigQuery ML, or of another dialect of SQL"
    parser = server.add_command(commands, "sql", what, EXAMPLES, verb="Runs")
    parser.add_argument("statements", metavar="SQL", nargs="?", help="the statements; default: the file of -f")
    parser.add_argument("-f", "--file", default="-", metavar="FILE", help="a file of statements; - is stdin (-)")
    parser.add_argument("--read", default="bigquery", metavar="DIALECT", help="their dialect (bigquery)")
    parser.add_argument("--no-wait", action="store_true", help="do not wait for the job of a CREATE MODEL")
    parser.add_argument("-o", "--output", default="-", metavar="FILE", help="the CSV file to write (stdout)")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from pg_tensile.client.connection import refusals
    from pg_tensile.client.training import Client
    from pg_tensile.queries.bigquery import statements

    script = arguments.statements if arguments.statements is not None else _contents(arguments.file)
    listed = list(statements(script, arguments.read))
    if not listed:
        raise OptionError("there are no statements", "Give them as an argument, in a file, or on stdin.")
    with writing(arguments.output) as output, server.connected(arguments) as connection, refusals():
        runner = _Runner(Client(connection), output, not arguments.no_wait)
        for statement in listed:
            runner.run(statement)
    return 0


def _contents(path: str) -> str:
    try:
        return sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise OptionError(f"{path} cannot be read: {error.strerror}", "Check the path.") from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} cannot be read: {error}", "It must be UTF-8.") from None


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


class _Runner:
    """Runs statements one after the other."""

    def __init__(self, client: Any, output: IO[str], wait: bool) -> None:
        self._client = client
        self._connection = client.connection
        self._output = output
        self._wait = wait
        self._written = False  # rows of a query

    def run(self, statement: Any) -> None:
        """Run a statement and show its result. Raises TensileError and psycopg.Error."""
        from pg_tensile.queries.bigquery import CreateModel, DropModel

        if isinstance(statement, CreateModel):
            self._create(statement)
        elif isinstance(statement, DropModel):
            self._drop(statement)
        else:
            self._execute(statement)

    def _exists(self, model: str) -> bool:
        return self._connection.execute(MODEL, (model,)).fetchone() is not None

    def _create(self, statement: Any) -> None:
        from pg_tensile.client.connection import ServerError

        name, exists = statement.model, self._exists(statement.model)
        if exists and statement.if_not_exists:
            _tell(f'model "{name}" exists already')
            return
        if exists and not statement.replace:
            hint = "CREATE OR REPLACE MODEL trains another version of it."
            raise ServerError(f'model "{name}" already exists', hint)
        with self._connection.transaction():
            self._client.register(name, statement.architecture, replace=exists)
            job = self._client.train(name, statement.query, statement.target, **statement.arguments)
        if not self._wait:
            _tell(f'model "{name}" is trained by job {job.number}')
            return
        job.wait()
        _tell(f'model "{name}" was trained by job {job.number}')

    def _drop(self, statement: Any) -> None:
        if statement.if_exists and not self._exists(statement.model):
            _tell(f'there is no model "{statement.model}"')
            return
        self._client.drop(statement.model)
        _tell(f'model "{statement.model}" was dropped')

    def _execute(self, statement: Any) -> None:
        from psycopg import sql

        from pg_tensile.client.connection import extension_schema
        from pg_tensile.queries.bigquery import with_functions

        text = with_functions(statement, extension_schema(self._connection), self._describe)
        if not statement.returns_rows:
            _tell(self._connection.execute(sql.SQL(text)).statusmessage or "")
            return
        if self._written:
            self._output.write("\n")
        self._written = True
        copied = sql.SQL("COPY ({}\n) TO STDOUT (FORMAT csv, HEADER)").format(sql.SQL(text))
        encoding = self._connection.info.encoding
        with self._connection.cursor() as cursor, cursor.copy(copied) as rows:
            for row in rows:
                self._output.write(bytes(row).decode(encoding))

    def _describe(self, model: str) -> Any:
        """Return what a query with functions of a model depends on. Raises ServerError if there is no version."""
        from pg_tensile.client.connection import ServerError
        from pg_tensile.queries.bigquery import Model

        row = self._connection.execute(MODEL, (model,)).fetchone()
        if row is None:
            raise ServerError(f'model "{model}" does not exist', "tensile.models lists the models that you may use.")
        if row["deployed_version"] is None:
            raise ServerError(
                f'model "{model}" has no deployed version', "Train it, or wait until its job has finished."
            )
        labels = () if row["task"] == "regression" else tuple(row["labels"])
        return Model(row["target"], labels, row["metrics"] or {}, row["job"])
