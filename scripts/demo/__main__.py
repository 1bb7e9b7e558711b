"""The demo: two models train at once inside a PostgreSQL of its own, from real tables, and are used in queries.

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

from pg_tensile.tools.cli.main import main as pg_tensile
from scripts.cluster import REPOSITORY, Cluster, ClusterError
from scripts.demo.data import load
from scripts.demo.evaluation import evaluate
from scripts.demo.screen import DemoError, console, print_notice, show
from scripts.demo.server import DATABASE, ROLE, demo_folder, open_cluster, start_cluster
from scripts.demo.sql import DEPARTURES, DIGITS, ROUTES, SAMPLE, YEAR
from scripts.demo.training import cancel_leftovers, compare_weights, show_and_register, train_within


def report(cluster: Cluster, job: int) -> None:
    """Write a page about the job, its plan and its model."""
    arguments = ["report", str(job), *address(cluster), "--evaluate", SAMPLE, "-o", str(cluster.folder / "report.html")]
    console.print(f"\n.venv/bin/pg-tensile {shlex.join(arguments)}", soft_wrap=True, style="bold")
    if pg_tensile(arguments) != 0:
        raise DemoError("the report could not be made")
    console.print("Open it in a browser: memory and link over one iteration, latencies, learning curves, evaluation.")


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
    console.print("    SELECT model, ran_for, epochs, accuracy, f1 FROM tensile.job_history;")
    console.print("    SELECT predict_class('late_arrival', d), d.* FROM departures d LIMIT 5;")
    console.print("    SELECT * FROM tensile.predictions;")
    console.print("    \\df *predict*")
    console.print(f"  {sudo}{shlex.quote(str(REPOSITORY))}/.venv/bin/pg-tensile top {where}", soft_wrap=True)
    console.print(f"  stop the server:        {make} demo-stop", soft_wrap=True)
    console.print(f"  remove it and its data: {make} demo-remove", soft_wrap=True)


def run() -> None:
    """Run the demo from the first table to the last prediction."""
    started = time.monotonic()
    cluster = start_cluster()
    with cluster.connect(DATABASE, ROLE) as conn:
        conn.add_notice_handler(print_notice)
        load(conn)
        console.rule("A model's training data is a query: three tables joined")
        show(conn, DEPARTURES)
        console.rule("Two models train at once, inside the server, in less memory than they need")
        cancel_leftovers(conn)
        show_and_register(conn)
        jobs = train_within(cluster, conn)
        console.rule("How good is the model, by what does it predict, how sure may it be?")
        console.print("December was kept out of the training.")
        evaluate(conn)
        report(cluster, jobs[0])
        console.rule("The same two jobs without a plan")
        compare_weights(conn, jobs)
        console.rule("Both models are now functions")
        console.print("The ten routes that were late most often in December:")
        show(conn, ROUTES)
        show(conn, YEAR)
        console.print("\nThe last 297 images of digits were kept out, too:")
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
        console.print("\nInterrupted. The server and its jobs go on: make demo-stop stops them.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
