"""The trainer's side of the frames: its trace, waiting for memory, plans while it trains, and refusals."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
import torch

from pg_tensile.execution.training import recipe
from pg_tensile.execution.training.checkpoint import from_bytes
from pg_tensile.planning.building_blocks.keep import relaxed_swap_all
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.latency import model_bytes, roofline
from pg_tensile.planning.latency.features import Sample
from pg_tensile.planning.latency.load import LoadMeter
from pg_tensile.planning.latency.mlp import LatencyModels, train
from pg_tensile.planning.trace.trace import Trace
from pyworker.child import error_header
from pyworker.children import latency_reports, trainer
from pyworker.connection import Connection
from pyworker.state_frames import send_state
from pyworker.wire import Frame, FrameType
from tests.unit.rows import Rows, every_type

PROFILE = replace(RTX_A6000, name="host", kind="host")
BUILD = """
import torch
class Model(torch.nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.layer = torch.nn.Linear(inputs, outputs)
    def forward(self, x):
        return self.layer(x * x.mean().item())
def build(inputs, outputs):
    return Model(inputs, outputs)
"""


class Child:
    """A trainer in a thread, and this side of its connection."""

    def __init__(self, rows: Rows, models: bytes | None = None, checkpoint: bytes | None = None, **spec: Any) -> None:
        ours, theirs = socket.socketpair()
        self.connection = Connection(ours)
        self.seen: list[Frame] = []
        self._start(theirs)
        self._send_job(rows, models, checkpoint, spec)

    def _start(self, theirs: socket.socket) -> None:
        self._theirs = Connection(theirs)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            trainer.run(self._theirs, {})
        except (EOFError, OSError):  # this side was closed
            pass
        except Exception as error:
            self._theirs.send(FrameType.ERROR, header=error_header(error))

    def _send_job(self, rows: Rows, models: bytes | None, checkpoint: bytes | None, changes: dict[str, Any]) -> None:
        spec = {
            "kind": "train",
            "architecture": {"type": "mlp", "hidden": [32, 16], "dropout": 0.1},
            "target": "y",
            "epochs": 2,
            "batch_size": 32,
            "optimizer": "adamw",
            "learning_rate": 1e-3,
            "validation": 0.2,
            "seed": 3,
            "policy": "joint",
            "memory_budget": None,
            "role_memory": None,
            "options": {"keep": "last"},
            "split_by": None,
            "validation_query": False,
            "max_time_s": None,
            "device": "cpu",
            "threads": 1,
            "dataset_cache_bytes": 1 << 30,
            "spool_directory": "/tmp",
            "checkpoint_interval_s": 0,
            "most_threads": 1,
            "has_version": False,
            "resume": None,
            "profiles": {"cpu": asdict(PROFILE)},
            "overheads": [],
            "latency_models": [] if models is None else ["cpu"],
            "latency_weight": 0.2,
            "ranks": None,
            "ray": None,
            **changes,
        }
        self.send(FrameType.JOB, spec, [] if models is None else [models])
        if checkpoint is not None:
            send_state(self.connection, 1, 0, "checkpoint", checkpoint)
        columns = [{"name": column.name, "type": column.type, "target": column.target} for column in rows.header]
        self.send(FrameType.COLUMNS, {"columns": columns})
        for count, buffers in rows.frames():
            self.send(FrameType.ROWS, {"rows": count}, buffers)
        end = {"rows": rows.count, "fingerprint": f"{rows.count}:0"}
        self.send(FrameType.ROWS_END, end, rows.dictionary_buffers())

    def send(self, type: FrameType, header: dict[str, Any], buffers: list[bytes] | None = None) -> None:
        self.connection.send(type, 1, header=header, buffers=buffers or [])

    def until(self, *types: FrameType, where: Callable[[dict[str, Any]], bool] = lambda header: True) -> Frame:
        """The next frame of one of these types; everything goes to `seen`."""
        while True:
            frame = self.connection.recv(60)
            assert frame is not None, "the trainer is silent"
            self.seen.append(frame)
            if frame.type in types and where(frame.header):
                return frame
            assert frame.type != FrameType.ERROR, frame.header

    def until_error(self) -> dict[str, Any]:
        return self.until(FrameType.ERROR).header

    def headers(self, type: FrameType) -> list[dict[str, Any]]:
        return [frame.header for frame in self.seen if frame.type == type]

    def weights(self) -> bytes:
        """At the end."""
        frames = [frame for frame in self.seen if frame.type == FrameType.STATE and frame.header["kind"] == "weights"]
        return b"".join(frame.buffers[0] for frame in frames)

    def close(self) -> None:
        self.connection.close()
        self._thread.join(60)
        assert not self._thread.is_alive()
        self._theirs.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def begin(rows: Rows | None = None, **options: Any) -> Child:
        children.append(Child(rows or every_type(300), **options))
        return children[-1]

    yield begin
    for child in children:
        child.close()


def traces_of(frame: Frame) -> list[Trace]:
    return [Trace.from_bytes(bytes(buffer)) for buffer in frame.buffers[: len(frame.header["graphs"])]]


def grant(frame: Frame, generation: int, part: float, spare: int = 1 << 16) -> tuple[dict[str, Any], list[bytes]]:
    """A plan for a TRACE frame: with this part of the memory between the least and what a run without plan takes.

    `spare`: bytes granted beyond that; without any, the plan keeps tensors on the device wherever they fit."""
    header, first = frame.header, traces_of(frame)[0]
    budget = int(header["least_bytes"] + part * (header["vanilla_bytes"] - header["least_bytes"]))
    planner = JobPlanner(first, DeviceProfile.from_json(header["profile"]))
    kept = None if spare else relaxed_swap_all(first, budget)
    candidate = planner.within(budget) if kept is None else planner.relaxed(kept, budget)
    granted = {"planned_bytes": candidate.device_peak_bytes, "granted_bytes": budget + spare, "link_share": 1.0}
    return {"generation": generation, **granted}, [candidate.plan.rows.tobytes(), candidate.plan.order_bytes, b""]


def finish(child: Child) -> dict[str, Any]:
    done: dict[str, Any] = child.until(FrameType.DONE).header
    return done


def grant_claim(child: Child, generation: int) -> int:
    """Grant what a job of the policy none claims, and return the bytes."""
    trace = child.until(FrameType.TRACE).header
    assert (trace["graphs"], trace["vanilla_bytes"], trace["policy"]) == ([], None, "none")
    claimed = int(trace["least_bytes"])
    plan = {"generation": generation, "planned_bytes": 0, "granted_bytes": claimed, "link_share": 1.0}
    child.send(FrameType.PLAN, plan, [b"", b"", b""])
    return claimed


def eager_run(start: Callable[..., Child], **spec: Any) -> Child:
    child = start(**{**spec, "policy": "none"})
    state = grant_claim(child, 1)
    assert grant_claim(child, 2) > state  # with what the first step has taken
    assert not finish(child)["stopped"]
    return child


def test_a_planned_job_trains_to_the_bits_of_an_unplanned_one(start: Callable[..., Child]) -> None:
    eager = eager_run(start)
    child = start()
    trace = child.until(FrameType.TRACE)
    child.send(FrameType.PLAN, *grant(trace, 4, 0.3))
    finish(child)
    assert child.weights() == eager.weights()
    assert child.headers(FrameType.VERSION) == eager.headers(FrameType.VERSION)
    last = child.headers(FrameType.PROGRESS)[-1]
    assert last["plan_generation"] == 4 and last["bytes_swapped"] > 0 and last["device_peak_bytes"] > 0
    phases = [header.get("phase") for header in child.headers(FrameType.PROGRESS)]
    assert phases.index("waiting") < phases.index("training")


def test_the_first_weights_are_those_of_the_seed(start: Callable[..., Child]) -> None:
    """The learning rate is too small to change them."""
    runs = [eager_run(start, seed=seed, optimizer="sgd", learning_rate=1e-30, epochs=1) for seed in (3, 4)]
    first, other = (max(from_bytes(run.weights()).values(), key=torch.Tensor.numel) for run in runs)
    assert not torch.equal(first, other)


def test_what_a_job_leaves_open_is_chosen_and_reported(start: Callable[..., Child]) -> None:
    child = eager_run(start, batch_size=None, learning_rate=None, options={}, epochs=3)
    (settings,) = child.headers(FrameType.SETTINGS)
    rows = child.headers(FrameType.VERSION)[0]["preprocessing"]["rows"]["training"]
    assert settings == {"batch_size": recipe.batch_size_for(rows), "learning_rate": recipe.LEARNING_RATES["mlp"]}
    chosen = {"learning_rate_schedule": recipe.SCHEDULES["mlp"], "average_weights": False}
    course = {"epochs": 3, "stopped": "epochs", "keep": "best", "refitted_rows": None} | chosen
    training = child.headers(FrameType.VERSION)[0]["training"]
    assert training == settings | course | {name: training[name] for name in ("split", "calibration")}
    assert training["split"]["by"] == "random" and training["split"]["training_rows"] == rows
    given = eager_run(start, **settings, options={}, epochs=3)
    assert given.weights() == child.weights() and given.headers(FrameType.SETTINGS) == [settings]


def test_a_model_is_trained_again_on_all_rows_where_that_is_asked_for(start: Callable[..., Child]) -> None:
    def version(**options: Any) -> tuple[Any, Any, bytes]:
        child = eager_run(start, options=options, epochs=3)
        header = child.headers(FrameType.VERSION)[0]
        rows = header["preprocessing"]["rows"]
        return header["training"]["refitted_rows"], rows["training"] + rows["validation"], child.weights()

    none, _, first = version()
    refitted, rows, again = version(refit=True)
    assert none is None and refitted == rows > 0 and again != first
    assert version(refit=True, keep="last")[0] is None


def test_early_stopping_is_on_where_the_best_epoch_is_kept(start: Callable[..., Child]) -> None:
    def stopped(**options: Any) -> tuple[str, int]:
        child = eager_run(start, epochs=40, learning_rate=0.3, options=options)
        training = child.headers(FrameType.VERSION)[0]["training"]
        return training["stopped"], training["epochs"]

    patience, epochs = {"early_stopping": {"patience": 2}}, ("epochs", 40)
    reason, count = stopped(**patience)
    assert reason == "early_stopping" and count < 40
    assert stopped(**patience, keep="last") == (reason, count)
    assert stopped(early_stopping={"patience": 0}) == epochs
    assert stopped(keep="last") == epochs
    assert stopped()[1] >= count


def test_a_resumed_job_keeps_its_recipe(start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    """A later version may choose other values."""
    spec = {"batch_size": None, "learning_rate": None, "epochs": 6, "policy": "none"}
    expected = eager_run(start, **spec)
    child = start(**spec, checkpoint_interval_s=1e-9)
    grant_claim(child, 1)
    state = child.until(FrameType.STATE)
    child.send(FrameType.SAVED, {"at": time.monotonic()})  # while it waits for the second grant
    grant_claim(child, 2)
    child.send(FrameType.STOP, {"checkpoint": False})
    assert finish(child)["stopped"]
    monkeypatch.setattr(recipe, "LEARNING_RATES", {"mlp": 0.5})
    monkeypatch.setattr(recipe, "BATCH_SIZES", (16, 16))
    checkpoint = bytes(state.buffers[0])
    resumed = eager_run(start, **spec, checkpoint=checkpoint, resume=state.header["meta"])
    assert resumed.headers(FrameType.DONE) == expected.headers(FrameType.DONE)  # no other warnings
    assert resumed.weights() == expected.weights()
    assert resumed.headers(FrameType.SETTINGS) == expected.headers(FrameType.SETTINGS)


def test_the_trace_describes_every_graph_and_the_first_one_for_people(start: Callable[..., Child]) -> None:
    child = start()
    frame = child.until(FrameType.TRACE)
    header, first = frame.header, traces_of(frame)[0]
    names = {graph["name"]: graph["rows"] for graph in header["graphs"]}
    assert list(names) == ["train", "train_last", "evaluate", "evaluate_last"] and names["train"] == 32
    assert len(frame.buffers) == 5 and header["revision"] == 1 and header["fingerprint"] == first.fingerprint
    assert (first.latency_us > 0).all()
    assert header["persistent_bytes"] == first.tensor_bytes[first.persistent].sum()
    assert header["least_bytes"] < header["vanilla_bytes"] and header["overhead_bytes"] == 0
    tables = json.loads(bytes(frame.buffers[4]))
    assert [row["target"] for row in tables["operators"]] == [operator.target for operator in first.operators]
    assert sum(row["bytes"] for row in tables["tensors"]) == first.tensor_bytes.sum()
    weight = next(row for row in tables["tensors"] if row["name"] == "dense.0.weight")
    assert weight["kind"] == "parameter" and weight["shape"][0] == 32
    assert header["operator"] in {first.operator_label(number) for number in range(first.operator_count)}


def test_latencies_are_the_calibrated_models(start: Callable[..., Child]) -> None:
    models = LatencyModels(PROFILE.flops_per_s / 1000, PROFILE.bytes_per_s / 1000, PROFILE.launch_us, {})
    with_models = traces_of(start(models=model_bytes.encode(models)).until(FrameType.TRACE))[0]
    without = traces_of(start().until(FrameType.TRACE))[0]
    np.testing.assert_array_equal(with_models.latency_us, models.predict(without, PROFILE))


def test_latencies_are_those_under_the_load_at_admission(
    start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models that have seen each operator take three times as long on a busy device: the plan is made for that."""
    without = traces_of(start().until(FrameType.TRACE))[0]
    usual = list(zip(without.operators, roofline.estimate(without, PROFILE), strict=True))[1:-1]
    samples = [
        Sample(operator.target, operator.signature, operator.flops, operator.bytes, load, us * (1 + 2 * load))
        for load in (0.0, 0.5, 1.0)
        for operator, us in usual
    ]
    models = train(samples, PROFILE)
    monkeypatch.setattr(LoadMeter, "read", lambda meter: 0.8)
    predicted = traces_of(start(models=model_bytes.encode(models)).until(FrameType.TRACE))[0]
    np.testing.assert_allclose(predicted.latency_us, models.predict(without, PROFILE, 0.8), rtol=1e-6)
    assert predicted.latency_us.sum() > 1.3 * models.predict(without, PROFILE, 0.0).sum()


def test_a_grant_too_small_for_the_workspaces_is_asked_for_again(start: Callable[..., Child]) -> None:
    child = start()
    first = child.until(FrameType.TRACE)
    child.send(FrameType.PLAN, *grant(first, 1, 0.0, spare=0))
    second = child.until(FrameType.TRACE)
    assert second.header["revision"] == 2 and len(second.buffers) == 4
    assert second.header["least_bytes"] >= first.header["least_bytes"]
    assert not traces_of(first)[0].workspace_bytes.any() and traces_of(second)[0].workspace_bytes.any()
    child.send(FrameType.PLAN, *grant(second, 2, 0.0, spare=0))
    assert not finish(child)["stopped"]
    assert child.headers(FrameType.PROGRESS)[-1]["plan_generation"] == 2


def test_of_plans_that_come_before_training_the_newest_counts(start: Callable[..., Child]) -> None:
    """As when another job comes while workspaces are looked at; or just afterwards, on a slow machine."""
    eager = eager_run(start, epochs=60)
    child = start(epochs=60)
    trace = child.until(FrameType.TRACE)
    child.send(FrameType.PLAN, *grant(trace, 1, 0.9))
    child.send(FrameType.PLAN, *grant(trace, 2, 0.4))
    assert not finish(child)["stopped"]
    assert child.headers(FrameType.PROGRESS)[-1]["plan_generation"] == 2
    assert child.weights() == eager.weights()


def test_plans_are_taken_up_while_it_trains(start: Callable[..., Child]) -> None:
    eager = eager_run(start, epochs=60)
    child = start(epochs=60)
    trace = child.until(FrameType.TRACE)
    child.send(FrameType.PLAN, *grant(trace, 3, 0.9))
    child.until(FrameType.METRICS)
    child.send(FrameType.PLAN, *grant(trace, 5, 0.2))
    child.send(FrameType.PLAN, *grant(trace, 4, 0.9))  # late
    child.until(FrameType.PROGRESS, where=lambda header: header.get("plan_generation") == 5)
    header, _ = grant(trace, 6, 0.9)
    child.send(FrameType.PLAN, header, [b"\1" * 64, b"", b""])  # events that mean nothing
    rejected = child.until(FrameType.PROGRESS, where=lambda header: "plan_rejected" in header).header["plan_rejected"]
    assert rejected["generation"] == 6 and rejected["reason"]
    assert not finish(child)["stopped"]
    used = [header["plan_generation"] for header in child.headers(FrameType.PROGRESS) if "plan_generation" in header]
    assert {generation for generation in used if generation is not None} == {3, 5} and used[-1] == 5
    assert child.weights() == eager.weights()


def test_latencies_are_measured_and_averaged(start: Callable[..., Child], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_reports, "MEASURE_INTERVAL_S", 0.0)
    monkeypatch.setattr(LoadMeter, "read", lambda meter: 0.0)  # on a busy machine less would be reported
    child = start()
    trace = child.until(FrameType.TRACE)
    child.send(FrameType.PLAN, *grant(trace, 1, 0.5))
    frame = child.until(FrameType.LATENCY)
    predicted, measured, average = (np.frombuffer(buffer, "<f4") for buffer in frame.buffers)
    first = traces_of(trace)[0]
    np.testing.assert_allclose(predicted, first.latency_us, rtol=1e-6)
    assert (measured[1:-1] > 0).all() and len(average) == first.operator_count
    assert frame.header["total_us"] == pytest.approx(average.sum(), rel=1e-5) and frame.header["samples"] == 1
    finish(child)
    assert child.headers(FrameType.LATENCY)[-1]["samples"] > 1


def checkpoint_steps(child: Child) -> list[tuple[int, int]]:
    """Epoch and step of each checkpoint that came whole."""
    metas = [header["meta"] for header in child.headers(FrameType.STATE) if header["kind"] == "checkpoint"]
    return [(meta["epoch"], meta["step"]) for meta in metas if meta]


def test_the_next_checkpoint_waits_until_the_one_before_is_stored(start: Callable[..., Child]) -> None:
    child = start(epochs=40, checkpoint_interval_s=1e-9)
    child.send(FrameType.PLAN, *grant(child.until(FrameType.TRACE), 1, 0.9))
    child.until(FrameType.STATE)
    child.until(FrameType.METRICS, where=lambda header: header["epoch"] == 3)
    assert checkpoint_steps(child) == [(0, 1)]
    child.send(FrameType.SAVED, {"at": 0.0})
    child.until(FrameType.STATE)
    finish(child)
    first, second = checkpoint_steps(child)
    assert first == (0, 1) and second[0] >= 2


def test_what_a_checkpoint_cost_is_heard_from_the_supervisor(start: Callable[..., Child]) -> None:
    """An hour, by its clock: the next one is a day away."""
    child = start(epochs=40, checkpoint_interval_s=1e-9)
    child.send(FrameType.PLAN, *grant(child.until(FrameType.TRACE), 1, 0.9))
    child.until(FrameType.STATE)
    child.send(FrameType.SAVED, {"at": time.monotonic() + 3600})
    finish(child)
    assert checkpoint_steps(child) == [(0, 1)]


@pytest.mark.parametrize("policy", ["joint", "none"])
def test_stop_ends_the_waiting(start: Callable[..., Child], policy: str) -> None:
    child = start(policy=policy)
    child.until(FrameType.TRACE)
    child.send(FrameType.STOP, {"checkpoint": True})
    assert finish(child)["stopped"]
    assert not child.headers(FrameType.STATE)


def refused(child: Child, budget: int) -> tuple[Frame, dict[str, Any]]:
    trace = child.until(FrameType.TRACE)
    refusal = {"budget_bytes": budget, "least_bytes": trace.header["least_bytes"], "operator": trace.header["operator"]}
    child.send(FrameType.REFUSE, refusal)
    return trace, child.until(FrameType.ERROR).header


def test_a_refusal_names_the_batch_size_that_fits(start: Callable[..., Child]) -> None:
    architecture = {"type": "mlp", "hidden": [8]}
    small = start(batch_size=8, architecture=architecture).until(FrameType.TRACE).header["least_bytes"]
    trace, error = refused(start(batch_size=200, architecture=architecture, validation=0.0), small)
    assert error["sqlstate"] == "53200"
    assert f"{trace.header['least_bytes']:,}" in error["message"] and f"{small:,}" in error["message"]
    assert trace.header["operator"] in error["detail"]
    fitting = int(error["hint"].partition("batch_size => ")[2].partition(",")[0])
    assert fitting >= 8
    at, above = (
        start(batch_size=size, architecture=architecture, validation=0.0).until(FrameType.TRACE).header["least_bytes"]
        for size in (fitting, fitting + 1)
    )
    assert at <= small < above


def test_a_refusal_says_if_no_batch_size_fits(start: Callable[..., Child]) -> None:
    _, error = refused(start(), 100)
    assert error["sqlstate"] == "53200" and "No batch size would fit" in error["hint"]


def test_a_model_that_cannot_be_captured_is_told_how_to_train(start: Callable[..., Child]) -> None:
    architecture = {"type": "python", "source": BUILD}
    error = start(architecture=architecture).until(FrameType.ERROR).header
    assert error["sqlstate"] == "0A000" and "reads the value of a tensor" in error["message"]
    assert "policy => 'none'" in error["hint"]
    eager_run(start, architecture=architecture)
