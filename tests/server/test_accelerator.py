"""Jobs of the server on an accelerator: calibrated, explained, planned, shared, killed and failing.

tests/accelerator/target.py says on which one. Of the emulated one each child has one of its own, as if it alone used a
GPU: the ledger and the plans are what keeps jobs within the memory of one.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest

from pg_tensile.planning.allocator_rules import MARGIN_BYTES
from pg_tensile.planning.device.profile import A100_40GB, DeviceProfile
from scripts.demo import training
from scripts.demo.data import load
from scripts.demo.server import DATABASE
from tests.accelerator.target import DEVICE, TYPE
from tests.server.emulated_device import install_emulator
from tests.server.pressure import Lab, Watch
from tests.server.support import (
    FOREVER,
    Connection,
    Row,
    Wait,
    finish,
    python_model,
    submit,
    trainer_pid,
    value,
)

MEMORY = 8 << 30  # of the emulated device
CONTEXT = 256 << 20  # of a process on it, besides its tensors
OVERHEAD = CONTEXT + MARGIN_BYTES
PROFILE = replace(A100_40GB, kind="emulated", memory_bytes=MEMORY, process_bytes=CONTEXT)
TRAINED = (("mlp", 1), ("cnn", 1))
EPOCHS = 8
# Random numbers in each step: those of the device are part of a checkpoint.
DROPOUT = {"type": "mlp", "hidden": [128, 128, 128, 64], "dropout": 0.2}


@pytest.fixture(scope="module")
def settings(clusters_folder: Path) -> dict[str, object]:
    """Settings of a cluster whose children use the device, and know it if it is the emulated one."""
    if TYPE != "emulated":
        return {"pg_tensile.device": TYPE}
    return {"pg_tensile.python": install_emulator(clusters_folder / "emulator"), "pg_tensile.device": "emulated"}


def store_profile(conn: Connection) -> None:
    """Store the emulated device's profile, so that jobs need not measure it, which takes seconds."""
    if TYPE == "emulated":
        conn.execute(
            "INSERT INTO tensile_internal.device_profiles VALUES (%s, %s)", (DEVICE, json.dumps(asdict(PROFILE)))
        )


@pytest.fixture(scope="module")
def server(new_cluster: Callable[..., Any], settings: dict[str, object]) -> Iterator[Any]:
    cluster = new_cluster(settings)
    with cluster.connect() as conn:
        store_profile(conn)
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
    device = "SELECT name, jobs, granted_bytes, in_use_bytes FROM tensile.devices"
    free = [(DEVICE, 0, 0, 0)]
    module_lab.wait_until(lambda: module_lab.conn.execute(device).fetchall() == free, what=module_lab.told)


def submit_dropout(lab: Lab, model: str, options: dict[str, Any] | None = None, **arguments: Any) -> int:
    """Submit a job of a new model with dropout."""
    chosen: dict[str, Any] = {"batch_size": 256, "validation": 0.1, "epochs": EPOCHS, "policy": "joint"} | arguments
    return submit(
        *(lab.conn, model, DROPOUT),
        query="SELECT label, image FROM images",
        target="label",
        options={"task": "classification"} | (options or {}),
        **chosen,
    )


class Vanilla(NamedTuple):
    """A job with dropout without a plan: device memory in bytes, a digest of its weights, its process's overhead."""

    nbytes: int
    weights: str
    overhead: int


@pytest.fixture(scope="module")
def vanilla(module_lab: Lab) -> Vanilla:
    lab = module_lab
    job = submit_dropout(lab, "vanilla", policy="none")
    explained = json.loads(
        value(
            lab.conn,
            "SELECT explain_training('vanilla', 'SELECT label, image FROM images', 'label', batch_size => 256,"
            """ validation => 0.1, options => '{"task": "classification", "format": "json"}')""",
        )
    )
    assert explained["device"] == DEVICE
    if TYPE == "emulated":
        assert explained["overhead_bytes"] == OVERHEAD and "approximate" not in explained
    return Vanilla(explained["memory"]["vanilla_bytes"], lab.digest(job), explained["overhead_bytes"])


@pytest.mark.long
def test_a_plan_within_a_budget_changes_no_bit(emulated: Lab, vanilla: Vanilla) -> None:
    """Long: five jobs train, and two models are explained, all on the emulated device."""
    budgets = {"tensile": int(0.85 * vanilla.nbytes), "joint": int(0.6 * vanilla.nbytes)}
    jobs = {
        policy: submit_dropout(emulated, policy, policy=policy, memory_budget=f"{budget}B")
        for policy, budget in budgets.items()
    }
    for policy, job in jobs.items():
        assert emulated.digest(job) == vanilla.weights
        (planned, moved, repeated), *_ = emulated.conn.execute(
            "SELECT planned_bytes, in_bytes + out_bytes, recomputes FROM tensile.plans WHERE job = %s", (job,)
        ).fetchall()
        assert planned <= budgets[policy] and moved + repeated > 0
    assert emulated.log("note") == []  # such as that another policy had to make the plan
    ((overheads,),) = emulated.conn.execute(
        "SELECT array_agg(DISTINCT overhead_bytes) FROM tensile.traces WHERE overhead_measured AND device = %s",
        (DEVICE,),
    ).fetchall()
    assert overheads and (overheads == [vanilla.overhead] or TYPE != "emulated")


@pytest.mark.long
def test_iterations_are_replayed_as_device_graphs(emulated: Lab, vanilla: Vanilla) -> None:
    """With a plan that swaps, and without events; a job without a plan says that it has none.

    Long: four jobs train on the emulated device."""
    small: dict[str, Any] = {"batch_size": 8, "epochs": 2}  # many steps between two validations
    budget = f"{int(0.85 * vanilla.nbytes)}B"
    plans: dict[str, dict[str, Any]] = {
        "swaps": {"policy": "tensile", "memory_budget": budget}, "free": {}, "unplanned": {"policy": "none"}
    }  # fmt: skip
    plain = submit_dropout(emulated, "plain", **small)
    jobs = {
        name: submit_dropout(emulated, name, {"device_graphs": True}, **small, **plan) for name, plan in plans.items()
    }
    for name, job in jobs.items():
        assert emulated.digest(job) == emulated.digest(plain)
        ((replays, warnings),) = emulated.conn.execute(
            "SELECT (v.training->>'replays')::int, j.warnings FROM tensile.jobs j JOIN tensile.model_versions v"
            " ON v.job = j.job WHERE j.job = %s",
            (job,),
        ).fetchall()
        refused = [warning for warning in warnings or [] if "device graphs" in warning]
        assert (replays > 0, bool(refused)) == (name != "unplanned", name == "unplanned"), (name, replays, warnings)


@pytest.mark.long
def test_jobs_share_the_device_and_their_weights_are_those_without_plans(emulated: Lab, vanilla: Vanilla) -> None:
    processes = len(TRAINED) * vanilla.overhead
    budget = int(0.6 * emulated.vanilla([network for network, _ in TRAINED])) + processes
    emulated.set_memory(budget)
    conn = emulated.conn
    with emulated.watch() as watch:
        jobs = [emulated.submit(network, seed) for network, seed in TRAINED]
        emulated.bring_together(*jobs)
        device = "SELECT name, jobs, budget_bytes, granted_bytes > %s FROM tensile.devices"
        assert conn.execute(device, (processes,)).fetchall() == [(DEVICE, 2, budget >> 10 << 10, True)]
        assert value(conn, "SELECT count(DISTINCT job) FROM tensile.plan_events") > 0
        assert value(conn, "SELECT count(*) FROM tensile.progress WHERE device_peak_bytes > 0") == 2
        assert [emulated.digest(job) for job in jobs] == [emulated.weights[key] for key in TRAINED]
    assert watch.granted > processes and watch.in_use > 0


@pytest.fixture
def held(emulated: Lab) -> Iterator[Connection]:
    """A connection that holds up the worker of a job that has a checkpoint at the end of its next epoch."""
    with emulated.cluster.connect() as holder:
        holder.execute("SELECT pg_advisory_lock(4711)")
        emulated.conn.execute(
            """
            CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN
                IF EXISTS (SELECT FROM tensile_internal.checkpoints c WHERE c.job = NEW.job AND c.meta IS NOT NULL) THEN
                    PERFORM pg_advisory_xact_lock_shared(4711);
                END IF;
                RETURN NEW;
            END $$;
            CREATE TRIGGER hold BEFORE INSERT ON tensile_internal.metrics FOR EACH ROW EXECUTE FUNCTION hold();
            """
        )
        yield holder
    emulated.conn.execute("DROP TRIGGER hold ON tensile_internal.metrics; DROP FUNCTION hold()")


@pytest.mark.long
def test_a_killed_job_goes_on_from_its_checkpoint(
    emulated: Lab, vanilla: Vanilla, held: Connection, job_row: Row
) -> None:
    options = {"checkpoint_interval": 0}
    job = submit_dropout(emulated, "killed", memory_budget=f"{int(0.6 * vanilla.nbytes)}B", options=options)
    waiting = (
        "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'pg_tensile worker' AND wait_event = 'advisory'"
    )
    emulated.wait_until(lambda: value(emulated.conn, waiting) == 1, what=emulated.told)
    pid = trainer_pid(emulated.conn, job)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    held.execute("SELECT pg_advisory_unlock_all()")
    assert emulated.digest(job) == vanilla.weights
    assert job_row(emulated.conn, job)["attempts"] == 2


@pytest.mark.long
@pytest.mark.skipif(TYPE != "emulated", reason="only the emulated device fails when it is told to")
def test_what_fails_on_the_device_ends_one_process(emulated: Lab, job_row: Row) -> None:
    """A fault of the device is followed by another attempt, a lack of memory is an error; a neighbour trains on.

    Takes seconds: seven processes train."""
    conn = emulated.conn
    neighbour = emulated.submit("mlp", epochs=FOREVER)
    emulated.await_training(neighbour)
    jobs = {}
    for fault, policy in product(("fail_kernel(2000)", "fail_allocation(1000)"), ("none", "joint")):
        name = f"{fault} {policy}"
        jobs[fault, policy] = submit(conn, name, injected(emulated, name, fault), policy=policy, epochs=40)
    for (fault, _), job in jobs.items():
        if fault.startswith("fail_kernel"):
            emulated.wait_until(lambda job=job: job_row(conn, job)["retries"] == 1, what=emulated.told)
            finish(conn, job)
            row = job_row(conn, job)
            assert row["attempts"] == 2
            log = emulated.cluster.log()
            assert re.search(f'job {job} interrupted: .* reason="trainer has lost its device: ', log)
        else:
            with pytest.raises(psycopg.Error, match="memory") as error:
                finish(conn, job)
            assert error.value.sqlstate == "53200"
    emulated.await_steps(neighbour, 1)
    assert job_row(conn, neighbour)["attempts"] == 1


def injected(lab: Lab, name: str, fault: str) -> dict[str, str]:
    """Return an architecture that calls a control of the emulated device when it is built for the first time."""
    marker = str(lab.cluster.data / name)
    return python_model(on_build=f"from tests.emulated.emulated import control\nif once({marker!r}): control.{fault}")


@pytest.mark.long
def test_the_device_is_calibrated(server: Any, emulated: Lab) -> None:
    """Takes seconds: the device is measured, and operators on it, alone and beside others."""
    emulated.conn.execute("DELETE FROM tensile_internal.device_profiles")
    finish(emulated.conn, int(value(emulated.conn, "SELECT calibrate_device(1)")), "5 min")
    ((device, kinds, samples, measured),) = emulated.conn.execute(
        "SELECT device, kinds, samples, profile FROM tensile.latency_models JOIN tensile.device_profiles USING (device)"
    ).fetchall()
    assert device == DEVICE and samples >= kinds > 5
    profile = DeviceProfile.from_json(measured)
    assert profile.kind == TYPE
    if TYPE == "emulated":
        assert (profile.memory_bytes, profile.process_bytes) == (MEMORY, CONTEXT)


class PlanWatch(Watch):
    """A watch that also looks for plans that save memory, as a job's last plan may have all that it wants."""

    saves = False

    def _look(self) -> None:
        super()._look()
        plans = "SELECT FROM tensile.plans JOIN tensile.traces USING (job) WHERE planned_bytes < vanilla_bytes"
        self.saves = self.saves or bool(self._conn.execute(plans).fetchall())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_demo_trains_both_models_on_the_device(
    fresh_cluster: Callable[..., Any], settings: dict[str, object]
) -> None:
    """Its own functions: both jobs at once within little memory, and without plans.

    Long: it trains four models."""
    cluster = fresh_cluster(settings | {"pg_tensile.database": DATABASE}, extension=False)
    with cluster.connect() as conn:
        conn.execute(f"CREATE DATABASE {DATABASE}")
    with cluster.connect(DATABASE) as conn:
        conn.execute("CREATE EXTENSION pg_tensile CASCADE")
        store_profile(conn)
        load(conn)
        with PlanWatch(cluster.connect(DATABASE)) as watch:
            jobs = training.train_within(cluster, conn)
        sizes = conn.execute(
            "SELECT vanilla_bytes, overhead_bytes"
            " FROM tensile.plans JOIN tensile.traces USING (job) WHERE job = ANY(%s) ORDER BY job",
            (jobs,),
        ).fetchall()
        processes = sum(overhead for _, overhead in sizes)
        assert watch.saves
        assert processes < watch.granted < processes + 0.61 * sum(vanilla for vanilla, _ in sizes)
        training.compare_weights(cluster, conn, jobs)  # raises DemoError if they differ
