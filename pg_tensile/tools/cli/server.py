"""The commands that inspect a server: `pg-tensile top`, `plan`, `report` and `trace`. They connect as psql does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pg_tensile.errors import OptionError
from pg_tensile.extras import needing
from pg_tensile.tools.cli.output import check, is_device, refusing, writing

CONNECTION = """\
The server is found as psql finds it: -d takes a database's name, a connection string or a URI; what is not said
comes from PGSERVICE, PGHOST, PGPORT, PGUSER, PGDATABASE, PGPASSWORD or ~/.pgpass.
"""
TOP_EXAMPLES = """
examples:
  pg-tensile top -d mydb
  pg-tensile top --once --json | jq '.jobs[] | {job, state, loss}'
"""


def add(commands: Any) -> None:
    """Add the commands to the parsers of `pg-tensile`; each sets `run`, which takes the parsed arguments."""
    top = add_command(commands, "top", "a live view of devices, jobs and the queue", TOP_EXAMPLES)
    top.add_argument("--once", action="store_true", help="print the view once and leave")
    top.add_argument("--json", action="store_true", help="with --once, as JSON; without it a line for each refresh")
    top.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds between refreshes (1)")
    top.set_defaults(run=_top)
    plan = add_command(commands, "plan", "the memory plan of a job: the events at each operator", "")
    plan.add_argument("job", type=_job, metavar="JOB", help="the number that train_model has returned")
    plan.add_argument("-a", "--all", action="store_true", help="operators without events, too")
    plan.add_argument("-o", "--output", default="-", metavar="FILE", help="the file to write (stdout)")
    plan.set_defaults(run=_plan)
    for name, what, run in (
        ("report", "one HTML page about a job, which opens offline", _report),
        ("trace", "a job's iteration as trace events, for Perfetto or chrome://tracing", _trace),
    ):
        parser = add_command(commands, name, what, "")
        parser.add_argument("job", type=_job, metavar="JOB", help="the number that train_model has returned")
        parser.add_argument("-o", "--output", required=True, metavar="FILE", help="the file to write; - is stdout")
        if name == "report":
            what = "show how good the job's model is on the rows of this query, and what it predicts by"
            parser.add_argument("--evaluate", metavar="QUERY", help=what)
        parser.set_defaults(run=run)


def add_command(commands: Any, name: str, what: str, examples: str, verb: str = "Shows") -> argparse.ArgumentParser:
    """Return the parser of a new command that connects to a server; `verb` and `what` describe it."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=what,
        description=f"{verb} {what}.",
        epilog=CONNECTION + examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,  # -h is the host, as in psql
    )
    parser.add_argument("--help", action="help", help="show this and leave")
    group = parser.add_argument_group("connection")
    group.add_argument("-d", "--dbname", metavar="DBNAME", help="database, connection string or URI")
    group.add_argument("-h", "--host", metavar="HOST", help="the server's host, or the folder of its socket")
    group.add_argument("-p", "--port", metavar="PORT", help="its port")
    group.add_argument("-U", "--username", metavar="ROLE", help="the role to connect as")
    return parser


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise OptionError(f'"{text}" is not a number of seconds from 0.1 to 3600', "Write --interval 2.")
    return seconds


def _job(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 1 << 63:
        raise OptionError(
            f'"{text}" is not the number of a job', "SELECT job FROM tensile.progress; lists those that run."
        )
    return int(text)


def connected(arguments: argparse.Namespace) -> Any:
    """Return a connection to the server that the arguments name. Raises ServerError."""
    from pg_tensile.client.connection import connect

    name = arguments.dbname or ""
    is_string = "=" in name or "://" in name
    where = {"host": arguments.host, "port": arguments.port, "user": arguments.username}
    return connect(name, **where) if is_string else connect(dbname=name or None, **where)


def _top(arguments: argparse.Namespace) -> int:
    from pg_tensile.client.connection import refusals
    from pg_tensile.tools.top.app import run

    with connected(arguments) as connection, refusals():
        return run(connection, once=arguments.once, as_json=arguments.json, interval=arguments.interval)


def _report(arguments: argparse.Namespace) -> int:
    with needing("report", "reports need"):
        from pg_tensile.tools.report.page import render

    return _write(arguments, render, arguments.evaluate)


def _trace(arguments: argparse.Namespace) -> int:
    with needing("report", "traces need"):
        from pg_tensile.tools.report.trace_events import render

    return _write(arguments, render)


def _plan(arguments: argparse.Namespace) -> int:
    from pg_tensile.text import printable

    with needing("report", "plans need"):
        from pg_tensile.planning.plan.listing import plan_listing
        from pg_tensile.tools.report.iteration import iteration_of

    def render(record: Any) -> str:
        iteration = iteration_of(record)
        listing = plan_listing(iteration.trace, iteration.plan, brief=not arguments.all)
        return "".join(f"{printable(line)}\n" for line in listing.splitlines())

    return _write(arguments, render)


def _write(arguments: argparse.Namespace, render: Callable[[Any], str], evaluate: str | None = None) -> int:
    """Write the job's record, rendered by `render`, to the output file: completely or not at all.

    `evaluate`: the query whose rows its version is evaluated on, or None."""
    from pg_tensile.client.connection import refusals
    from pg_tensile.client.record import read_job

    path = None if arguments.output == "-" else Path(arguments.output)
    if path is not None:
        with refusing(path):
            check(path)
    with connected(arguments) as connection, refusals():
        record = read_job(connection, arguments.job, evaluate)
    text = render(record)
    with writing(arguments.output) as file:
        file.write(text)
    if path is None or is_device(path):
        return 0
    print(f"{arguments.output}: {path.stat().st_size:,} bytes")
    if arguments.command == "report" and evaluate is None and record.job["version"] is not None:
        print("It shows how good the model is on the rows of a query with --evaluate QUERY.")
    return 0
