"""The image as its users meet it: started by an engine, used by psql from outside, killed, stopped, given variables.

Servers that live long are fixtures: `server` has learnt the demo's digits and trains a second model without an end;
`survivor` is the same server after it was killed and a new container took its volume.
"""

from __future__ import annotations

import gzip
import json
import re
import shlex
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from docker.tests.engine import IMAGE, Server, call, run_once, temporary, wait_for
from scripts.demo.data import digit_rows
from scripts.demo.sql import TABLES
from scripts.demo.training import command

pytestmark = pytest.mark.timeout(300)

DOCKER = Path(__file__).resolve().parents[1]
CNN = """'{"type": "cnn", "shape": [8, 8]}'"""
# Long epochs, so that checkpoints are made within them: every image twenty times.
TRAIN_ENDLESS = """
    SELECT train_model('endless', 'SELECT label, image FROM digits, generate_series(1, 20)', 'label',
                       epochs => 1000000, options => '{"task": "classification", "keep": "last"}')
"""
PREDICTIONS = "SELECT id, predict_class('digit', d), predict('digit', d) FROM digits d WHERE id > 1500 ORDER BY id"
READ = "SELECT avg((predict_class('digit', d)::int = label)::int) FROM digits d WHERE id > 1500"
LAST_EPOCH = "SELECT coalesce(max(epoch), 0) FROM tensile.epoch_metrics WHERE job = 2"
ATTEMPTS = "SELECT attempts FROM tensile.jobs WHERE job = 2"
CHECKPOINT = "SELECT coalesce(max((meta->>'epoch')::int), 0) FROM tensile_internal.checkpoints WHERE job = 2"


def setting(value: str) -> tuple[str, ...]:
    """The container's command line with one setting."""
    return ("postgres", "-c", value)


def history(server: Server, epochs: int) -> str:
    """Return the rows of the second job's first epochs, with the times at which they were written."""
    return server.psql(f"SELECT * FROM tensile.epoch_metrics WHERE job = 2 AND epoch <= {epochs} ORDER BY epoch, split")


# -- the image itself -------------------------------------------------------------------------------------------------


def test_image_is_at_most_1750_mb():
    size = int(call("image", "inspect", "--format", "{{.Size}}", IMAGE))
    version = run_once(command=["/opt/pg_tensile/bin/python", "-c", "import torch; print(torch.__version__)"]).stdout
    assert size <= 1_750_000_000, f"with torch {version.strip()}: TORCH_INDEX=… names an index that has it for the CPU"


def test_image_carries_nothing_of_the_build():
    environment = json.loads(call("image", "inspect", "--format", "{{json .Config.Env}}", IMAGE))
    names = {variable.split("=")[0] for variable in environment}
    assert names == {"LANG", "PATH", "PGDATA", "PG_MAJOR"}
    unwanted = (
        "command -v gcc make; ls /etc/ssl/private/ssl-cert-snakeoil.key; cat /etc/pip.conf; find /mnt /build -type f"
    )
    done = run_once(command=["bash", "-c", f"{{ {unwanted}; }} 2>/dev/null; true"])
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_other_commands_run_as_postgres_and_need_no_database():
    assert run_once(command=["id", "-un"]).stdout == "postgres\n"
    assert run_once(command=["postgres", "--version"]).stdout.startswith("postgres (PostgreSQL)")
    assert "bench" in run_once(command=["pg-tensile", "--help"]).stdout


# -- life of a server -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with temporary(Server("server")) as made:
        made.start(command=setting("pg_tensile.checkpoint_interval=1s"))
        assert made.psql("SHOW pg_tensile.checkpoint_interval") == "1s"
        made.psql(stdin=TABLES)
        lines = (f"{number}\t{label}\t{image}" for number, label, image in digit_rows())
        arrays = "\n".join(lines).translate(str.maketrans("[]", "{}", " "))
        made.psql("COPY digits FROM STDIN", stdin=arrays + "\n")
        made.psql(f"SELECT register_model('digit', {CNN})", command("train_model", "digit"))
        assert made.psql("SELECT wait_for_job(1)") == "finished"
        assert float(made.psql(READ)) > 0.85
        made.psql(f"SELECT register_model('endless', {CNN})", TRAIN_ENDLESS)
        yield made


class Before(NamedTuple):
    """State of the database before the server was killed."""

    predictions: str
    checkpoint: int  # epochs that the second job's checkpoint had
    history: str  # of these epochs
    last_epoch: int
    attempts: int


@pytest.fixture(scope="module")
def survivor(server: Server) -> tuple[Server, Before]:
    """Killed in the middle of the second job. From now on that makes checkpoints at the end of epochs only."""
    wait_for(lambda: int(server.psql(CHECKPOINT)) >= 2, 120, server.log)
    checkpoint = int(server.psql(CHECKPOINT))
    before = Before(
        server.psql(PREDICTIONS),
        checkpoint,
        history(server, checkpoint),
        int(server.psql(LAST_EPOCH)),
        int(server.psql(ATTEMPTS)),
    )
    server.kill()
    server.start(command=setting("pg_tensile.checkpoint_interval=0"))
    return server, before


def test_no_process_is_root(server):
    users = server.execute("bash", "-c", "stat --format=%U /proc/[0-9]* 2>/dev/null; true").split()
    assert len(users) > 5
    assert set(users) == {"postgres"}


def test_a_health_check_writes_no_errors_into_the_log(server):
    before = server.log().count("FATAL")
    assert server.healthy()
    assert server.log().count("FATAL") == before


def test_tcp_needs_the_password_inside_as_well(server):
    outside = Server("outside")
    outside.name, outside.port, outside.password = server.name, server.port, "guessed"
    with pytest.raises(AssertionError, match="password authentication failed"):
        outside.psql("SELECT 1")
    inside = f"psql -w -h 127.0.0.1 -p {server.port} -U postgres -c 'SELECT 1' 2>&1; true"
    assert "no password supplied" in server.execute("bash", "-c", inside)


def test_a_second_container_on_the_volume_is_refused(server):
    done = run_once(server.volume, "--env=PGPORT=1")
    assert done.returncode == 1
    assert "another container uses the data directory" in done.stderr and "hint: Stop that one" in done.stderr
    assert server.psql("SELECT 1") == "1"


def test_the_password_is_not_in_the_servers_environment(server):
    environment = "cat /proc/$(head -n 1 $PGDATA/postmaster.pid)/environ"
    found = server.execute("bash", "-c", environment)
    assert "PGDATA=" in found
    assert server.password not in found


def test_a_model_survives_a_kill(survivor):
    server, before = survivor
    assert server.psql(PREDICTIONS) == before.predictions
    assert before.predictions.count("\n") == 296


def test_a_job_goes_on_from_its_checkpoint_after_a_kill(survivor):
    server, before = survivor
    wait_for(lambda: int(server.psql(LAST_EPOCH)) > before.last_epoch, 120, server.log)
    assert history(server, before.checkpoint) == before.history, "epochs were trained again"
    assert int(server.psql(ATTEMPTS)) > before.attempts


def test_stop_is_a_fast_shutdown_and_jobs_write_checkpoints(survivor):
    server, _ = survivor
    in_an_epoch = "SELECT count(*) FROM tensile.progress WHERE job = 2 AND phase = 'training' AND step > 0"
    wait_for(lambda: server.psql(in_an_epoch) == "1", 60, server.log)
    asked = server.psql("SELECT clock_timestamp()")
    started = time.monotonic()
    call("stop", "-t", "30", server.name)
    assert time.monotonic() - started < 25
    assert server.inspect("State.ExitCode") == "0"
    assert "received fast shutdown request" in server.log()
    assert server.log().rstrip().endswith("database system is shut down")
    server.start(command=setting("pg_tensile.database="))  # nobody goes on with the job
    row = server.psql(
        f"SELECT j.state, j.reason, c.created_at > '{asked}' FROM tensile.jobs j"
        " JOIN tensile_internal.checkpoints c ON c.job = j.job AND c.meta IS NOT NULL WHERE j.job = 2"
    )
    server.start()
    assert row == "interrupted|the server was stopped|t"


# -- the first start --------------------------------------------------------------------------------------------------


def test_a_password_must_be_given_once():
    none = run_once()
    assert none.returncode == 1
    assert "POSTGRES_PASSWORD is not set" in none.stderr and "hint: Set POSTGRES_PASSWORD" in none.stderr
    both = run_once("--env=POSTGRES_PASSWORD=a", "--env=POSTGRES_PASSWORD_FILE=/etc/hostname")
    assert both.returncode == 1
    assert "both POSTGRES_PASSWORD and POSTGRES_PASSWORD_FILE are set" in both.stderr


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "precious").touch()
    done = run_once("--env=POSTGRES_PASSWORD=a", f"--volume={tmp_path}/data:/var/lib/postgresql/data")
    assert done.returncode == 1
    assert "is not empty" in done.stderr and "hint: Mount an empty folder" in done.stderr
    assert (tmp_path / "data" / "precious").exists()


def script_folder(folder: Path, **scripts: str) -> str:
    """The option that mounts these scripts for the first start, in the order of their names."""
    folder.mkdir()
    for name, text in scripts.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return f"--volume={folder}:/docker-entrypoint-initdb.d:ro"


def test_variables_and_scripts_of_the_official_image(tmp_path):
    with temporary(Server("variables", user="alice", database="my\"'db")) as server:
        scripts = script_folder(
            tmp_path / "scripts",
            a_sql="CREATE TABLE seen (what text); INSERT INTO seen VALUES ('plain')",
            c_sh="""psql -U "$POSTGRES_USER" -d "$POSTGRES_DB" -c "INSERT INTO seen VALUES ('executed')" """,
            d_sh="""docker_process_sql -c "INSERT INTO seen VALUES ('sourced$undefined')" """,
            e_txt="no script",
        )
        folder = tmp_path / "scripts"
        (folder / "c.sh").write_text("#!/bin/bash -e\n" + (folder / "c.sh").read_text())
        (folder / "c.sh").chmod(0o755)
        (folder / "b.sql.gz").write_bytes(gzip.compress(b"INSERT INTO seen VALUES ('compressed')"))
        (tmp_path / "password").write_text(server.password + "\n")
        server.start(
            scripts,
            f"--volume={tmp_path}/password:/etc/password:ro",
            "--env=POSTGRES_PASSWORD_FILE=/etc/password",
            f"--env=POSTGRES_USER={server.user}",
            f"--env=POSTGRES_DB={server.database}",
            "--env=POSTGRES_INITDB_ARGS=--data-checksums --locale='C'",
            password=False,
        )
        assert (
            server.psql("SELECT string_agg(what, ' ' ORDER BY what) FROM seen") == "compressed executed plain sourced"
        )
        assert "ignored" in server.log()
        assert server.psql("SHOW pg_tensile.database") == server.database
        collation = "SELECT datcollate FROM pg_database WHERE datname = current_database()"
        assert server.psql("SHOW data_checksums", collation) == "on\nC"
        assert server.psql("SELECT rolsuper FROM pg_roles WHERE rolname = current_user") == "t"
        assert server.psql("SELECT tensile_worker._version()") != ""


def test_an_interrupted_first_start_is_begun_anew(tmp_path):
    slow = script_folder(tmp_path / "slow", a_sql="CREATE TABLE first ()", b_sh="sleep 600")
    quick = script_folder(tmp_path / "quick", a_sql="CREATE TABLE second ()")
    with temporary(Server("interrupted")) as server:
        server.launch(slow)
        wait_for(lambda: "b.sh" in server.log(), 60, server.log)
        assert not server.healthy()
        server.kill()
        server.start(quick)
        assert "beginning anew" in server.log()
        assert server.psql("SELECT to_regclass('first'), to_regclass('second')") == "|second"
        assert server.execute("bash", "-c", "ls -A $PGDATA | grep -c unfinished || true") == "0\n"


def test_a_script_that_fails_ends_the_first_start(tmp_path):
    wrong = script_folder(tmp_path / "wrong", a_sql="SELECT 1 / 0")
    done = run_once(wrong, "--env=POSTGRES_PASSWORD=a", "--env=PGPORT=1")
    assert done.returncode not in (0, 130)
    assert "division by zero" in done.stderr and "the next start begins anew" in done.stderr


# -- any user, and what the documents say -----------------------------------------------------------------------------


def readme_command() -> str:
    """The psql line of the README's section about Docker."""
    readme = (DOCKER.parent / "README.md").read_text()
    block = re.search(r"^## Docker$.*?^```\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert block is not None
    return block[1][block[1].index("\npsql ") :]


def test_any_user_and_the_line_of_the_readme():
    with temporary(Server("user")) as server:
        server.start("--user=12345:12345")
        assert server.owner() == "12345"
        environment = server.environment() | {"PGPORT": str(server.port)}
        done = subprocess.run(
            ["bash", "-ec", readme_command()], env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr + server.log()
        assert "finished" in done.stdout
        server.start()  # as root, which makes the files those of postgres
        assert server.owner() != "12345"
        assert server.psql("SELECT state FROM tensile.jobs") == "finished"


def test_compose_file_fits_the_image(server):
    compose = yaml.safe_load((DOCKER / "compose.yaml").read_text())
    services = compose["services"]
    arguments = set(re.findall(r"^ARG ([A-Z_]+)=", (DOCKER / "Dockerfile").read_text(), re.MULTILINE))
    assert set(services) == {"postgres", "postgres-gpu"}
    assert set(services["postgres"]["build"]["args"]) == arguments
    for service in services.values():
        assert {"BASE", "PG_MAJOR", "TORCH_INDEX"} <= set(service["build"]["args"]) <= arguments
        test = service["healthcheck"]["test"]
        assert test[0] == "CMD"
        assert call("exec", server.name, *test[1:]).count("|") == 1
        assert shlex.split(service["command"]) == ["postgres"]
        (volume,) = service["volumes"]
        assert volume.split(":")[0] in compose["volumes"]
        assert server.execute("bash", "-c", "echo $PGDATA").startswith(volume.split(":")[1] + "/")
        assert service["environment"]["POSTGRES_PASSWORD"].startswith("${POSTGRES_PASSWORD:?")
    (device,) = services["postgres-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert "profiles" not in services["postgres"] and services["postgres-gpu"]["profiles"] == ["gpu"]
