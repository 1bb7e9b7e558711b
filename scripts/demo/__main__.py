"""The demo: a PostgreSQL of its own learns the prices of diamonds, then trains two models at once in little memory.

    python -m scripts.demo [run | stop | remove]

The cluster is in DEMO_DIR (default /var/tmp/pg_tensile-demo-<uid>), listens on a free port and runs as an unprivileged
user, independently of any other PostgreSQL on the machine. It keeps running at the end; the next run uses it again with
all its contents, unless it was made by another version of pg_tensile.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time

import psycopg

from scripts.cluster import REPOSITORY, Cluster, ClusterError
from scripts.demo.data import load
from scripts.demo.evaluation import evaluate
from scripts.demo.screen import DemoError, console, print_notice, show
from scripts.demo.server import DATABASE, ROLE, demo_folder, open_cluster, start_cluster
from scripts.demo.sql import BY_CUT, DIGITS, FIRST_ROWS, ONE
from scripts.demo.training import cancel_leftovers, compare_weights, learn, train_within

INTRODUCTION = (
    "A training keeps the results of a network's layers in memory until they are needed again. Where memory is short,"
    " the server makes a plan for each training: which results are moved out and back in, or computed again, and when."
    " The second model here reads images of handwritten digits."
)
TO_TRY = (
    "SELECT *, predict('price', d)::int FROM diamonds d WHERE id > 53900 ORDER BY price / predict('price', d) LIMIT 5;",
    "SELECT * FROM feature_importance('price', 'SELECT * FROM diamonds WHERE id > 53000');",
    "SELECT model, ran_for, epochs, rmse, accuracy FROM tensile.job_history;",
    "\\df *predict*",
)


def address(cluster: Cluster) -> list[str]:
    """Return the connection options for psql and pg-tensile."""
    return ["-h", str(cluster.folder), "-p", str(cluster.port), "-U", ROLE, "-d", DATABASE]


def next_steps(cluster: Cluster) -> None:
    """Print commands to try next, which work as printed."""
    sudo = "sudo " if os.geteuid() == 0 and os.environ.get("SUDO_USER") else ""
    psql = "psql" if shutil.which("psql") else str(cluster.bin / "psql")
    where = shlex.join(address(cluster))
    make = f"{sudo}make -C {shlex.quote(str(REPOSITORY))}"
    if os.environ.get("DEMO_DIR"):
        make += f" DEMO_DIR={shlex.quote(os.environ['DEMO_DIR'])}"
    console.print("\nNow it is your turn:", style="bold")
    console.print(f"  {sudo}{psql} {where}", soft_wrap=True)
    for statement in TO_TRY:
        console.print(f"    {statement}", soft_wrap=True, markup=False)
    console.print(f"  {sudo}{shlex.quote(str(REPOSITORY))}/.venv/bin/pg-tensile top {where}", soft_wrap=True)
    console.print(f"  stop the server:        {make} demo-stop", soft_wrap=True)
    console.print(f"  remove it and its data: {make} demo-remove", soft_wrap=True)


def run() -> None:
    """Run the demo from the table to the last prediction."""
    started = time.monotonic()
    cluster = start_cluster()
    with cluster.connect(DATABASE, ROLE) as conn:
        conn.add_notice_handler(print_notice)
        console.rule("1. A table: 53,940 diamonds and their prices")
        load(conn)
        show(conn, FIRST_ROWS)
        cancel_leftovers(conn)
        console.rule("2. One statement trains a model")
        console.print(
            "It learns from 4,000 of the diamonds what price comes with a weight, cut, color and clarity. The kind of"
            " model is chosen by the columns: for a table, gradient-boosted trees and a network make an ensemble."
        )
        learn(conn)
        console.rule("3. Is it better than guessing?")
        console.print("Diamonds that it has not seen. The guess is the average price of the 4,000, for all of them:")
        evaluate(conn)
        console.rule("4. The model is a function in your queries")
        show(conn, BY_CUT)
        console.print("\nA diamond that is in no table:")
        show(conn, ONE)
        console.rule("5. Two models train at once, in less memory than they need")
        console.print(INTRODUCTION)
        jobs = train_within(cluster, conn)
        console.print("\nThe same two trainings with all the memory, without a plan:")
        compare_weights(cluster, conn, jobs)
        console.print("\nOf 297 handwritten digits that were kept out:")
        show(conn, DIGITS)
    console.print(f"\nThe demo took {time.monotonic() - started:.0f} s.")
    next_steps(cluster)


def stop() -> None:
    cluster = open_cluster(demo_folder())
    if cluster.running():
        cluster.stop()
        console.print(f"Stopped the server in {cluster.folder}; make demo starts it again.")
    else:
        console.print(f"No server runs in {cluster.folder}.")


def remove() -> None:
    cluster = open_cluster(demo_folder())
    cluster.remove()
    console.print(f"Removed {cluster.folder}.")


def main(arguments: list[str]) -> int:
    commands = {"run": run, "stop": stop, "remove": remove}
    if len(arguments) > 1 or not set(arguments) <= set(commands):
        console.print(f"usage: python -m scripts.demo [{' | '.join(commands)}]", markup=False)
        return 2
    try:
        commands[arguments[0] if arguments else "run"]()
    except (DemoError, ClusterError) as error:
        console.print(f"demo: {error}", style="red")
        return 1
    except psycopg.Error as error:
        console.print(f"demo: {error}", style="red", markup=False)
        console.print(f"The server's log: {demo_folder() / 'server.log'}")
        return 1
    except KeyboardInterrupt:
        console.print("\nInterrupted. The server and its jobs continue: make demo-stop stops them.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
