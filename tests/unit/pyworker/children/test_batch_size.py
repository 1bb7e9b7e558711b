"""A job whose batch size is chosen: what it tries, what it says, and what it trains (batch_size.py)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from pg_tensile.execution.training import checkpoint
from pg_tensile.execution.training.run_steps import Steps
from pg_tensile.execution.training.settings import Settings
from pg_tensile.execution.training.trainer import Trainer
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.plan.plan import NO_EVENTS
from pyworker.children.batch_size import LEAD_PART, LEAD_STEPS, Terms, lead_of
from pyworker.wire import Frame, FrameType
from tests.unit.execution.training.test_steps import CNN, Case, images
from tests.unit.execution.training.test_training import MLP, Recorder
from tests.unit.pyworker.children.test_trainer import BUILD, Child, start, traces_of  # noqa: F401
from tests.unit.rows import Rows, every_type

Start = Callable[..., Child]
ROWS = 1000


class Granting:
    """The supervisor of a child: grants each trace a plan within `budget` bytes, or refuses it; keeps what it sees."""

    def __init__(self, child: Child, budget: int = 1 << 40) -> None:
        self.child = child
        self.budget = budget
        self.traces: list[Frame] = []
        self.choices: list[dict[str, Any]] = []

    def until(self, *types: FrameType) -> Frame:
        while True:
            frame = self.child.until(FrameType.TRACE, FrameType.CHOICE, FrameType.ERROR, FrameType.STATE, *types)
            if frame.type == FrameType.CHOICE:
                self.choices.append(frame.header)
            if frame.type == FrameType.TRACE:
                self._answer(frame)
            if frame.type == FrameType.STATE and frame.header["kind"] == "checkpoint" and frame.header["last"]:
                self.child.send(FrameType.SAVED, {"at": 0.0})  # long ago: the next one may come
            if frame.type in (FrameType.ERROR, *types):
                return frame

    def _answer(self, frame: Frame) -> None:
        self.traces.append(frame)
        header, generation = frame.header, len(self.traces)
        if header["least_bytes"] > self.budget:
            refusal = {"budget_bytes": self.budget, "least_bytes": header["least_bytes"], "operator": "the largest"}
            self.child.send(FrameType.REFUSE, refusal)
            return
        first, budget = traces_of(frame)[0], min(header["vanilla_bytes"], self.budget)
        plan = NO_EVENTS
        if budget < header["vanilla_bytes"]:
            plan = JobPlanner(first, DeviceProfile.from_json(header["profile"])).within(budget).plan
        granted = {"planned_bytes": budget, "granted_bytes": budget + (1 << 16), "link_share": 1.0}
        self.child.send(
            FrameType.PLAN, {"generation": generation, **granted}, [plan.rows.tobytes(), plan.order_bytes, b""]
        )

    def graphs(self) -> list[dict[str, int]]:
        """Names and rows of each trace."""
        return [{graph["name"]: graph["rows"] for graph in frame.header["graphs"]} for frame in self.traces]


def begin(start: Start, rows: Rows | None = None, **spec: Any) -> Child:  # noqa: F811
    given = {
        "batch_size": 0,
        "memory_budget": None,
        "role_memory": None,
        "device_memory_bytes": 0,
        "plan_events": 65536,
    }
    return start(rows or every_type(ROWS), **(given | spec))


def test_it_trains_a_lead_then_with_the_size_that_it_chose(start: Start) -> None:  # noqa: F811
    server = Granting(begin(start))
    done = server.until(FrameType.DONE).header
    assert not done["stopped"]
    (choice,) = server.choices
    (version,) = server.child.headers(FrameType.VERSION)
    rows = version["preprocessing"]["rows"]["training"]
    chosen, lead = choice["batch_size"], choice["lead"]
    assert 0 < sum(lead) <= rows * LEAD_PART and len(lead) % LEAD_STEPS == 0
    graphs = server.graphs()
    assert set(graphs[0].values()) == set(lead)
    assert graphs[-1]["train"] == chosen
    first, *others = choice["candidates"]
    assert first["batch_size"] == chosen and first["feasible"] and len(others) >= 2
    speeds = [candidate["samples_per_s"] for candidate in others if candidate["feasible"]]
    assert speeds == sorted(speeds, reverse=True)
    measured = {candidate["batch_size"] for candidate in choice["candidates"] if candidate["measured_us"]}
    assert measured and measured <= set(lead)
    assert version["metrics"]["epoch"] == 2
    epoch = [header for header in server.child.headers(FrameType.METRICS) if header["split"] == "training"]
    assert [header["samples"] for header in epoch] == [rows, rows]
    assert choice["learning_rate"] > 0 and str(chosen) in choice["reason"]


@pytest.mark.parametrize(("law", "rate"), [("linear", 0.5), ("none", 0.001), ("accudnn", None)])
def test_the_learning_rate_follows_the_law(start: Start, law: str, rate: float | None) -> None:  # noqa: F811
    options = {"batch_size_range": [32, 32], "learning_rate_scaling": law}
    server = Granting(begin(start, options=options, learning_rate=1e-3, epochs=1))
    server.until(FrameType.DONE)
    (choice,) = server.choices
    assert choice["batch_size"] == 32 and choice["law"] == law
    expected = {"linear": 0.5e-3, "none": 1e-3, "accudnn": 1 - (1 - 1e-3) ** 0.5}[law]
    assert choice["learning_rate"] == pytest.approx(expected)


def checkpoints(child: Child) -> list[tuple[bytes, dict[str, Any]]]:
    """Those that came whole."""
    weights, parts = [], []
    for frame in child.seen:
        if frame.type == FrameType.STATE and frame.header["kind"] == "checkpoint":
            parts.append(bytes(frame.buffers[0]))
            if frame.header["last"]:
                weights.append((b"".join(parts), frame.header["meta"]))
                parts = []
    return weights


def test_a_resumed_job_keeps_its_choice_and_ends_with_the_same_bits(start: Start) -> None:  # noqa: F811
    whole = Granting(begin(start, checkpoint_interval_s=1e-9))
    whole.until(FrameType.DONE)
    saved = checkpoints(whole.child)
    assert saved[0][1]["epoch"] == 0 and saved[0][1]["step"] == len(whole.choices[0]["lead"]) + 1
    for data, meta in (saved[0], saved[-1]):
        server = Granting(begin(start, resume=meta, checkpoint=data))
        server.until(FrameType.DONE)
        assert not server.choices
        assert server.graphs()[0]["train"] == whole.choices[0]["batch_size"]
        assert server.child.weights() == whole.child.weights()


def test_the_bits_are_those_of_the_same_batches_without_a_plan(start: Start) -> None:  # noqa: F811
    """The lead with the job's learning rate, what follows with the scaled one; the optimizer's state goes on."""
    spec: dict[str, Any] = {"batch_size_range": [16, 20], "learning_rate_scaling": "linear"}
    server = Granting(begin(start, options=spec, architecture=MLP))
    server.until(FrameType.DONE)
    (choice,) = server.choices
    prepared = every_type(ROWS).prepare(seed=3)
    settings = Settings(2, choice["batch_size"], seed=3, lead=tuple(choice["lead"]))
    assert settings.lead
    job = Case(prepared, MLP, settings)
    steps = job.eager()
    first = trainer(job, steps)
    assert first.run_lead()
    state = first.state()
    job = job._replace(settings=replace(settings, learning_rate=choice["learning_rate"]))
    steps = job.eager()
    second = trainer(job, steps)
    assert second.resume(state) is None
    second.run()
    weights = safetensors.torch.load(server.child.weights())
    expected = checkpoint.model_tensors(steps.model)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def trainer(job: Case, steps: Steps) -> Trainer:
    job.model()  # the generators are as after building it
    return Trainer(job.settings, steps, job.prepared.dataset, job.prepared.fitted.preprocessing, Recorder())


@pytest.mark.long
def test_less_memory_makes_a_smaller_batch(start: Start) -> None:  # noqa: F811
    """A network is captured with batches of many sizes, twice."""
    case: dict[str, Any] = {"rows": images(ROWS), "architecture": CNN, "epochs": 1}
    free = Granting(begin(start, **case))
    free.until(FrameType.DONE)
    budget = int(0.3 * free.choices[0]["candidates"][0]["device_bytes"])
    tight = Granting(begin(start, **case, memory_budget=budget), budget)
    assert tight.until(FrameType.DONE).type == FrameType.DONE
    assert tight.choices[-1]["batch_size"] < free.choices[0]["batch_size"]
    assert tight.choices[-1]["candidates"][0]["device_bytes"] <= budget
    refused = [candidate for candidate in tight.choices[-1]["candidates"] if not candidate["feasible"]]
    assert refused and all(candidate["device_bytes"] > budget and candidate["reason"] for candidate in refused)


def test_what_is_refused_is_not_tried_again(start: Start) -> None:  # noqa: F811
    """As when the device has less than was thought: here the supervisor knows of a limit that the job does not."""
    case: dict[str, Any] = {"rows": images(ROWS), "architecture": CNN, "epochs": 1}
    free = begin(start, **case).until(FrameType.TRACE).header["least_bytes"]
    server = Granting(begin(start, **case), int(0.6 * free))
    assert server.until(FrameType.DONE).type == FrameType.DONE
    first, *_, last = server.traces
    assert last.header["least_bytes"] <= 0.6 * free < first.header["least_bytes"]
    assert len(server.traces) < 8 and server.choices[-1]["candidates"][0]["device_bytes"] <= 0.6 * free


def test_nothing_fits(start: Start) -> None:  # noqa: F811
    server = Granting(begin(start, memory_budget=1000))
    error = server.child.until_error()
    assert error["sqlstate"] == "53200" and "no batch size fits" in error["message"] and error["hint"]
    assert not server.traces and "1,000" in error["message"]


def test_a_model_that_cannot_be_captured_needs_a_batch_size(start: Start) -> None:  # noqa: F811
    error = begin(start, architecture={"type": "python", "source": BUILD}).until_error()
    assert error["sqlstate"] == "0A000" and "policy => 'none' and a batch_size" in error["hint"]


def test_a_range_beyond_the_rows_is_refused(start: Start) -> None:  # noqa: F811
    error = begin(start, options={"batch_size_range": [5000, 6000]}).until_error()
    assert error["sqlstate"] == "22000" and "batch_size is 5000, but there are only" in error["message"]


def test_stop_while_it_chooses_loses_nothing(start: Start) -> None:  # noqa: F811
    child = begin(start)
    child.until(FrameType.TRACE)
    child.send(FrameType.STOP, {"checkpoint": True})
    assert child.until(FrameType.DONE).header["stopped"]
    assert not child.headers(FrameType.STATE)


@given(st.integers(1, 5000), st.integers(1, 100), st.integers(1, 100_000))
def test_a_lead_leaves_most_of_the_epoch(largest: int, least: int, rows: int) -> None:
    lead = lead_of(largest, least, rows)
    assert sum(lead) <= rows * LEAD_PART and list(lead) == sorted(lead)
    assert all(max(least, 2) <= size <= largest for size in lead)
    assert all(len(list(group)) == LEAD_STEPS for _, group in itertools.groupby(lead))


def test_terms_of_a_spec() -> None:
    spec: dict[str, Any] = {"options": {}, "learning_rate": 0.1}
    assert Terms.of(spec) == (None, None, 0.1, "accudnn")
    spec["options"] = {"batch_size_range": [8, 16], "learning_rate_scaling": "none"}
    assert Terms.of(spec) == (8, 16, 0.1, "none")
