"""Jobs of the server on an accelerator, the emulated one: calibrated, explained, planned, shared, killed and failing.

Each child has a device of its own, as if it alone used a GPU: the ledger and the plans are what keeps jobs within the
memory of one.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pg_tensile.planning.device.profile import A100_40GB, DeviceProfile
from tests.server.emulated_device import install_emulator
from tests.server.pressure import Lab
from tests.server.support import (
    FOREVER,
    Connection,
    Row,
    Wait,
    executor_pid,
    finish,
    python_model,
    register,
    state,
    steps,
    submit,
    value,
)

DEVICE = "emulated:0"
MEMORY = 8 << 30  # of the device
CONTEXT = 256 << 20  # of a process on it, besides its tensors
PROFILE = replace(A100_40GB, kind="emulated", memory_bytes=MEMORY, process_bytes=CONTEXT)
TRAINED = (("mlp", 1), ("cnn", 1))
EPOCHS = 8
# Random numbers in each step: those of the device are part of a checkpoint.
DROPOUT = {"type": "mlp", "hidden": [128, 128, 128, 64], "dropout": 0.2}


@pytest.fixture(scope="module")
def server(new_cluster: Callable[..., Any], clusters_folder: Path) -> Iterator[Any]:
    """A cluster whose children know the emulated device and use it. It need not be measured."""
    python = install_emulator(clusters_folder / "emulator")
    cluster = new_cluster({"pg_tensile.python": str(python), "pg_tensile.device": "emulated"})
    with cluster.connect() as conn:
        conn.execute("INSERT INTO tensile.device_profiles VALUES (%s, %s)", (DEVICE, json.dumps(asdict(PROFILE))))
    yield cluster
    cluster.end()


@pytest.fixture(scope="module")
def module_lab(server: Any, wait_until: Wait) -> Iterator[Lab]:
    lab = Lab(server, wait_until, TRAINED, EPOCHS)
    yield lab
    lab.conn.close()


@pytest.fixture
def emulated(module_lab: Lab) -> Iterator[Lab]:
    """The server's lab; in the end no job holds memory of the device."""
    yield module_lab
    module_lab.reset()
    device = "SELECT name, total_bytes, jobs, granted_bytes, in_use_bytes FROM tensile.devices"
    left = lambda: module_lab.conn.execute(device).fetchall()  # noqa: E731
    module_lab.wait_until(lambda: left() == [(DEVICE, MEMORY, 0, 0, 0)], what=lambda: str(left()))


def submit_dropout(lab: Lab, model: str, **arguments: Any) -> int:
    register(lab.conn, model, DROPOUT)
    arguments = {"query": "SELECT label, image FROM images", "target": "label", "batch_size": 256, "validation": 0.1,
                 "epochs": EPOCHS} | arguments  # fmt: skip
    arguments["options"] = {"task": "classification"} | arguments.get("options", {})
    return submit(lab.conn, model, **arguments)


@pytest.fixture(scope="module")
def vanilla(module_lab: Lab) -> tuple[int, str]:
    """Device memory that a job with dropout needs without a plan, and a digest of its weights then."""
    lab = module_lab
    job = submit_dropout(lab, "vanilla", policy="none")
    explained = json.loads(
        value(
            lab.conn,
            "SELECT explain_training('vanilla', 'SELECT label, image FROM images', 'label', batch_size => 256,"
            """ validation => 0.1, options => '{"task": "classification", "format": "json"}')""",
        )
    )
    assert (explained["device"], explained["overhead_bytes"]) == (DEVICE, CONTEXT) and "approximate" not in explained
    return explained["memory"]["vanilla_bytes"], lab.digest(job)


def test_a_plan_within_a_budget_changes_no_bit(emulated: Lab, vanilla: tuple[int, str]) -> None:
    vanilla_bytes, weights = vanilla
    budget = int(0.6 * vanilla_bytes)
    jobs = [submit_dropout(emulated, policy, policy=policy, memory_budget=f"{budget}B") for policy in ("tensile", "joint")]
    for job in jobs:
        assert emulated.digest(job) == weights
        planned, moved, repeated = emulated.conn.execute(
            "SELECT planned_bytes, in_bytes + out_bytes, recomputes FROM tensile.footprints WHERE job = %s", (job,)
        ).fetchone()
        assert planned <= budget < vanilla_bytes and moved + repeated > 0


def test_jobs_share_the_device_and_their_weights_are_those_without_plans(emulated: Lab) -> None:
    budget = int(0.6 * emulated.vanilla([network for network, _ in TRAINED])) + len(TRAINED) * CONTEXT
    emulated.set_memory(budget)
    conn = emulated.conn
    with emulated.watch() as watch:
        jobs = [emulated.submit(network, seed) for network, seed in TRAINED]
        emulated.bring_together(*jobs)
        device = "SELECT name, jobs, total_bytes, budget_bytes, granted_bytes > 2 * %s FROM tensile.devices"
        assert conn.execute(device, (CONTEXT,)).fetchall() == [(DEVICE, 2, MEMORY, budget >> 10 << 10, True)]
        assert value(conn, "SELECT count(DISTINCT job) FROM tensile.plan") > 0
        assert value(conn, "SELECT count(*) FROM tensile.progress WHERE device_peak_bytes > 0") == 2
        assert [emulated.digest(job) for job in jobs] == [emulated.weights[key] for key in TRAINED]
    assert watch.granted > len(TRAINED) * CONTEXT and watch.in_use > 0


@pytest.fixture
def held(emulated: Lab) -> Iterator[Connection]:
    """A connection that holds up the worker of a job that has a checkpoint at the end of its next epoch."""
    with emulated.cluster.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(4711)")
        emulated.conn.execute(
            """
            CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF EXISTS (SELECT FROM tensile.checkpoints c WHERE c.job = NEW.job AND c.meta IS NOT NULL) THEN
                    PERFORM pg_advisory_xact_lock_shared(4711);
                END IF;
                RETURN NEW;
            END $$;
            CREATE TRIGGER hold BEFORE INSERT ON tensile.metrics FOR EACH ROW EXECUTE FUNCTION hold();
            """
        )
        yield holder
    emulated.conn.execute("DROP TRIGGER hold ON tensile.metrics; DROP FUNCTION hold()")


def test_a_killed_job_goes_on_from_its_checkpoint(
    emulated: Lab, vanilla: tuple[int, str], held: Connection, job_row: Row
) -> None:
    vanilla_bytes, weights = vanilla
    options = {"checkpoint_interval": 0}
    job = submit_dropout(emulated, "killed", memory_budget=f"{int(0.6 * vanilla_bytes)}B", options=options)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker' AND wait_event = 'advisory'"
    emulated.wait_until(lambda: value(emulated.conn, waiting) == 1, what=emulated.told)
    pid = executor_pid(emulated.conn, job)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    held.execute("SELECT pg_advisory_unlock_all()")
    assert emulated.digest(job) == weights
    row = job_row(emulated.conn, job)
    assert (row["attempts"], row["retries"]) == (2, 1)


@pytest.mark.parametrize("policy", ["none", "joint"])
def test_a_fault_of_the_device_ends_one_process_and_its_job_goes_on_in_another(
    emulated: Lab, job_row: Row, policy: str
) -> None:
    neighbour = emulated.submit("mlp", epochs=FOREVER)
    emulated.await_training(neighbour)
    faulty = injected(emulated, policy, "control.fail_kernel(2000)")
    job = submit(emulated.conn, f"faulty_{policy}", faulty, policy=policy, epochs=40)
    emulated.wait_until(lambda: state(emulated.conn, job) == "interrupted", what=emulated.told)
    row = job_row(emulated.conn, job)
    assert row["reason"].startswith("executor has lost its device: ") and "AcceleratorError" in row["traceback"]
    finish(emulated.conn, job)
    assert value(emulated.conn, "SELECT attempts FROM tensile.jobs WHERE id = %s", job) == 2
    emulated.await_steps(neighbour, 1)
    assert job_row(emulated.conn, neighbour)["attempts"] == 1


@pytest.mark.parametrize("policy", ["none", "joint"])
def test_a_job_that_finds_no_memory_on_the_device_fails_alone(emulated: Lab, job_row: Row, policy: str) -> None:
    neighbour = emulated.submit("mlp", epochs=FOREVER)
    emulated.await_training(neighbour)
    hungry = injected(emulated, policy, "control.fail_allocation(1000)")
    job = submit(emulated.conn, f"hungry_{policy}", hungry, policy=policy, epochs=40)
    with pytest.raises(psycopg.Error) as error:
        finish(emulated.conn, job)
    assert error.value.sqlstate == "53200", error.value
    print(error.value, error.value.diag.message_hint)
    emulated.await_steps(neighbour, 1)
    assert job_row(emulated.conn, neighbour)["attempts"] == 1


def injected(lab: Lab, name: str, code: str) -> dict[str, str]:
    """Return an architecture whose first build runs the code, with the controls of the emulated device."""
    marker = lab.cluster.data / f"{name} {code}"
    return python_model(on_build=f"from tests.emulated.emulated import control\nif once({str(marker)!r}): {code}")


def test_the_device_is_calibrated(server: Any, emulated: Lab) -> None:
    """Takes seconds: the device is measured, and operators on it, alone and beside others."""
    emulated.conn.execute("DELETE FROM tensile.device_profiles")
    finish(emulated.conn, int(value(emulated.conn, "SELECT tensile.calibrate(1)")), "5 min")
    device, kinds, samples, measured = emulated.conn.execute(
        "SELECT device, kinds, samples, profile FROM tensile.latency_models JOIN tensile.device_profiles USING (device)"
    ).fetchone()
    assert device == DEVICE and samples >= kinds > 5
    profile = DeviceProfile(**measured)
    assert (profile.kind, profile.memory_bytes, profile.process_bytes) == ("emulated", MEMORY, CONTEXT)
