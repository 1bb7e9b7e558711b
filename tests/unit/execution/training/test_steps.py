"""Runs under plans: the same numbers as without, whatever the plan, the budget, and where a run was interrupted."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from torch import nn

from pg_tensile.errors import BudgetError, InvalidPlanError, NotFiniteError, OutOfDeviceMemoryError
from pg_tensile.execution import models
from pg_tensile.execution.data.preprocessing import Task, TokenLimits
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.training import checkpoint, course
from pg_tensile.execution.training.checkpoint import Checkpoint
from pg_tensile.execution.training.graphs import (
    Graphs,
    Sizes,
    capture_graphs,
    evaluation_rows,
    micro_batched,
    rows_of,
    step_spec,
)
from pg_tensile.execution.training.run_steps import Steps
from pg_tensile.execution.training.settings import EarlyStopping, Settings
from pg_tensile.execution.training.steps import EagerSteps, Grant, PlannedSteps, needed_bytes
from pg_tensile.execution.training.trainer import Trainer
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS, Event, EventKind, Plan
from pyworker.children.job import Job
from pyworker.children.memory import MemoryClient
from pyworker.wire import Frame, FrameType
from tests.unit.execution.training.test_training import MLP, Recorder, weights
from tests.unit.rows import Prepared, Rows, every_type

CPU = torch.device("cpu")
PROFILE = replace(RTX_A6000, kind="host")


def images(count: int) -> Rows:
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (count, 64))
    return Rows(
        {
            "image": ("uint8[]", [row.tolist() for row in pixels]),
            "x": ("float8", rng.normal(size=count).tolist()),
            "y": ("text", ["ab c"[int(row.sum()) % 3] for row in pixels]),
        }
    )


def texts(count: int) -> Rows:
    rng = np.random.default_rng(2)
    tokens = [rng.integers(0, 30, rng.integers(1, 9)).tolist() for _ in range(count)]
    return Rows({"tokens": ("int4[]", tokens), "y": ("float8", [float(sum(row)) for row in tokens])})


CNN = {"type": "cnn", "channels": [4, 8], "hidden": [16], "norm": "batch", "dropout": 0.1}
TRANSFORMER = {"type": "transformer", "dim": 16, "heads": 2, "layers": 1, "dropout": 0.1}
SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "clip": 1.0}
ADAM: dict[str, Any] = {"optimizer": "adam", "momentum": 0.8, "weight_decay": 0.01}


_made: dict[tuple[Any, ...], tuple[Prepared, Any]] = {}  # by what `Case.once` is given


class Case(NamedTuple):
    """A job. What is captured and planned for equal jobs on the same rows is the same, and made once."""

    prepared: Prepared
    architecture: dict[str, Any]
    settings: Settings

    def model(self) -> nn.Module:
        checkpoint.seed_generators(self.settings.seed)
        preprocessing = self.prepared.fitted.preprocessing
        return models.build(models.parse(self.architecture), preprocessing.model_inputs, preprocessing.outputs)

    @property
    def parts(self) -> tuple[Any, ...]:
        preprocessing = self.prepared.fitted.preprocessing
        return self.settings, preprocessing.task, Sizes.of(self.prepared.dataset, preprocessing), CPU

    def once(self, what: Any, make: Callable[[], Any]) -> Any:
        """Return what `make` returns, or returned for an equal job on the same rows."""
        key = what, id(self.prepared), json.dumps(self.architecture), self.settings
        if key not in _made:
            _made[key] = self.prepared, make()  # whose address must not be used again
        return _made[key][1]

    def graphs(self, model: nn.Module) -> Graphs:
        return cast(Graphs, self.once("graphs", lambda: capture_graphs(model, *self.parts)))

    def eager(self) -> EagerSteps:
        model = self.model()
        rows = self.once("rows", lambda: evaluation_rows(self.model(), *self.parts))
        return EagerSteps(model, self.settings, self.parts[1], CPU, rows)

    def planned(self, part: float = 0.0, grant: Grant | None = None) -> PlannedSteps:
        """`part`: of the memory between the least and what there is without a plan."""
        model = self.model()
        graphs = self.graphs(model)
        grant = grant or self.once(part, lambda: plan_within(graphs, part))
        return PlannedSteps(model, graphs, HostDevice(PROFILE, grant.granted_bytes), grant, raise_it)

    def expected(self) -> tuple[Any, Recorder]:
        """Return the weights after a run without a plan, and its record."""

        def run() -> tuple[Any, Recorder]:
            eager = self.eager()
            recorder = self.run(eager)
            return weights(eager.model), recorder

        return cast(tuple[Any, Recorder], self.once("expected", run))

    def run(
        self, steps: Steps, resume: tuple[bytes, dict[str, Any]] | None = None, recorder: Recorder | None = None
    ) -> Recorder:
        recorder = recorder or Recorder()
        preprocessing = self.prepared.fitted.preprocessing
        self.model()  # the generators are as after building it
        trainer = Trainer(self.settings, steps, self.prepared.dataset, preprocessing, recorder, {"a": 1})
        if resume is not None:
            assert trainer.resume(Checkpoint.from_bytes(*resume)) is None
        trainer.run()
        return recorder


def plan_within(graphs: Graphs, part: float, generation: int = 1) -> Grant:
    least, vanilla = graphs.least_bytes, footprint(graphs.train.trace).device_peak_bytes
    budget = int(least + part * (vanilla - least))
    plan = JobPlanner(graphs.train.trace, PROFILE).within(budget).plan
    return Grant(Plan(plan.rows, generation), budget)


PLAIN = {"type": "mlp", "hidden": [16]}


def at_half(job: Case) -> tuple[PlannedSteps, float]:
    """Return steps under a plan of `joint` within half of the memory that the job takes without one, and the share that
    they take."""
    model = job.model()
    graphs = capture_graphs(model, *job.parts)
    vanilla = footprint(graphs.train.trace).device_peak_bytes
    least = graphs.least_bytes
    grant = plan_within(graphs, max(0.0, (vanilla / 2 - least) / (vanilla - least)))
    return job.planned(grant=grant), grant.granted_bytes / vanilla


def raise_it(error: OutOfDeviceMemoryError) -> None:
    raise error


def case(prepared: Prepared, architecture: dict[str, Any] = MLP, **settings: Any) -> Case:
    chosen = {"epochs": 2, "batch_size": 32, "seed": 5, "early_stopping": EarlyStopping(9), **settings}
    return Case(prepared, architecture, Settings(**chosen))


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return every_type(400).prepare()


def contents(recorder: Recorder) -> list[tuple[bytes, dict[str, Any]]]:
    return [(data, meta | {"seconds": 0, "trained_s": 0}) for data, meta in recorder.checkpoints]


def assert_same(job: Case, planned: PlannedSteps) -> None:
    actual, (wanted, expected) = job.run(planned), job.expected()
    assert weights(planned.model) == wanted
    assert actual.without_seconds() == expected.without_seconds()
    assert contents(actual) == contents(expected)


@pytest.mark.parametrize("part", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, SGD], ids=["adamw", "sgd"])
def test_a_learning_rate_that_falls_is_that_of_eager_steps(
    prepared: Prepared, options: dict[str, Any], part: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(course, "PLATEAU_EPOCHS", 0)  # after every epoch
    job = case(prepared, epochs=3, learning_rate_schedule="plateau", **options)
    steps = job.planned(part)
    assert_same(job, steps)
    assert weights(steps.model) != case(prepared, epochs=3, **options).expected()[0]


@pytest.mark.parametrize("part", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("options", [{}, SGD, ADAM], ids=["adamw", "sgd", "adam"])
def test_weights_losses_and_checkpoints_are_those_without_a_plan(
    prepared: Prepared, options: dict[str, Any], part: float
) -> None:
    job = case(prepared, **options)
    steps = job.planned(part)
    assert_same(job, steps)
    assert (steps.memory().bytes_swapped or 0) > 0 or part == 1.0


@pytest.mark.parametrize("part", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, SGD, {"keep": "last"}], ids=["adamw", "sgd", "last"])
def test_averaged_weights_are_those_without_a_plan(prepared: Prepared, options: dict[str, Any], part: float) -> None:
    job = case(prepared, PLAIN, average_weights=True, **options)
    steps = job.planned(part)
    assert_same(job, steps)
    assert weights(steps.model) != case(prepared, PLAIN, **options).expected()[0]


@pytest.mark.parametrize("part", [0.0, 1.0])
@pytest.mark.parametrize("options", [{}, SGD, {"average_weights": True}], ids=["adamw", "sgd", "averages"])
def test_the_training_on_all_rows_is_that_without_a_plan(
    prepared: Prepared, options: dict[str, Any], part: float
) -> None:
    job = case(prepared, PLAIN, refit=True, **options)
    steps = job.planned(part)
    assert_same(job, steps)
    assert weights(steps.model) != case(prepared, PLAIN, **options).expected()[0]


def test_a_batch_larger_than_the_training_rows_is_all_of_them() -> None:
    """More rows train again than there are graphs for: a batch is as large as in the first training."""
    job = case(every_type(70).prepare(), PLAIN, refit=True, batch_size=64)
    steps = job.planned()
    assert_same(job, steps)


@pytest.mark.parametrize(
    ("rows", "architecture", "tokens"),
    [(images(150), CNN, None), (texts(150), TRANSFORMER, TokenLimits(8, 40))],
    ids=["cnn", "transformer"],
)
def test_other_models_too(rows: Rows, architecture: dict[str, Any], tokens: TokenLimits | None) -> None:
    job = case(rows.prepare(tokens=tokens), architecture, batch_size=16)
    assert_same(job, job.planned(0.2))


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        (MLP, {"precision": "bfloat16"}),
        (MLP, {"accumulate": 4}),
        (MLP, {"precision": "bfloat16", "accumulate": 3}),
        pytest.param(TRANSFORMER, {"precision": "bfloat16", "accumulate": 3}, marks=pytest.mark.long),
    ],
    ids=["mlp-bfloat16", "mlp-parts", "mlp-both", "transformer-both"],
)
def test_with_less_precision_and_in_parts_as_well(architecture: dict[str, Any], options: dict[str, Any]) -> None:
    """The last batches have 13 rows, which cannot be cut, and 18. The last case is long: a transformer is captured."""
    rows = (
        texts(109).prepare(0.0, tokens=TokenLimits(8, 40))
        if architecture == TRANSFORMER
        else every_type(114).prepare(0.0)
    )
    job = case(rows, architecture, batch_size=24, early_stopping=None, **options)
    assert_same(job, job.planned(0.2))


def test_parts_of_a_batch_give_the_gradient_of_the_whole_within_less_memory(prepared: Prepared) -> None:
    whole = case(prepared, PLAIN, batch_size=64, optimizer="sgd", learning_rate=0.1)
    parts = case(prepared, PLAIN, batch_size=64, optimizer="sgd", learning_rate=0.1, accumulate=8)
    expected, actual = whole.eager(), parts.eager()
    whole.run(expected)
    parts.run(actual)
    for name, tensor in expected.model.state_dict().items():
        torch.testing.assert_close(actual.model.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
    activations = [
        footprint(job.graphs(job.model()).train.trace).device_peak_bytes
        for job in (case(prepared, accumulate=n, batch_size=256, optimizer="sgd") for n in (1, 8))
    ]
    assert activations[1] < 0.5 * activations[0]


@pytest.mark.parametrize(
    ("rows", "asked", "count"), [(24, 4, 4), (13, 4, 1), (18, 4, 3), (4, 4, 2), (1, 9, 1), (7, 7, 1)]
)
def test_a_batch_is_cut_into_equal_parts_of_two_rows_at_least(rows: int, asked: int, count: int) -> None:
    spec = step_spec(Settings(1, rows, accumulate=asked), Task.REGRESSION)
    assert micro_batched(spec, rows).accumulation == count


@pytest.mark.parametrize(("count", "batch_size"), [(97, 32), (64, 64), (65, 64), (50, 49)])
def test_whatever_the_last_batch_is(count: int, batch_size: int) -> None:
    job = case(every_type(count).prepare(validation=0.0), batch_size=batch_size, early_stopping=None)
    assert_same(job, job.planned(0.1))


@pytest.mark.parametrize("stop_after", [1, 5, 10, 12])
@pytest.mark.parametrize(("first", "second"), [("eager", "planned"), ("planned", "eager"), ("planned", "planned")])
def test_a_run_is_resumed_with_or_without_a_plan(prepared: Prepared, stop_after: int, first: str, second: str) -> None:
    job = case(prepared, **SGD)
    expected, record = job.expected()
    make: dict[str, Callable[[], Steps]] = {"eager": job.eager, "planned": job.planned}
    interrupted = job.run(make[first](), recorder=Recorder(stop_after))
    steps = make[second]()
    resumed = job.run(steps, interrupted.checkpoints[-1])
    assert weights(steps.model) == expected
    assert interrupted.without_seconds() + resumed.without_seconds() == record.without_seconds()


# ---- plans that change ----


class Changing(Recorder):
    """Gives the run another plan after each of its steps."""

    def __init__(self, steps: PlannedSteps, grants: list[Grant]) -> None:
        super().__init__()
        self.generations: list[int | None] = []
        self._planned, self._grants = steps, grants

    def poll(self) -> None:
        self.generations.append(self._planned.generation)
        if self._grants:
            self._planned.offer(self._grants.pop(0)).result()


@pytest.mark.long
def test_plans_change_between_steps_in_and_out_of_validation(prepared: Prepared) -> None:
    job = case(prepared, batch_size=16)
    eager, steps = job.eager(), job.planned(1.0)
    graphs = job.graphs(job.model())
    parts = [0.0, 1.0, 0.3, 0.0, 0.7] * 12
    grants = [plan_within(graphs, part, number + 2) for number, part in enumerate(parts)]
    expected = job.run(eager)
    recorder = Changing(steps, grants)
    job.run(steps, recorder=recorder)
    assert weights(steps.model) == weights(eager.model)
    assert recorder.without_seconds() == expected.without_seconds()
    used = [generation for generation in recorder.generations if generation is not None]
    assert used == sorted(used) and len(set(used)) > 20


def test_a_plan_that_is_not_valid_is_rejected_and_the_old_one_stays(prepared: Prepared) -> None:
    job = case(prepared)
    steps = job.planned(0.5)
    nonsense = Plan.build([Event(EventKind.SWAP_IN, 0, 1, 2)], 7)
    with pytest.raises(InvalidPlanError):
        steps.offer(Grant(nonsense, 1 << 30)).result()
    with pytest.raises(BudgetError):
        steps.offer(Grant(NO_EVENTS, 100)).result()
    assert_same(job, steps)
    assert steps.generation == 1


def test_a_graph_that_would_exceed_the_grant_gets_a_plan_of_its_own() -> None:
    prepared = every_type(97).prepare(validation=0.0)
    job = case(prepared, {"type": "mlp", "hidden": [4]}, batch_size=48, early_stopping=None)  # 48 and 49 rows
    model = job.model()
    graphs = job.graphs(model)
    assert graphs.train_last is not None
    vanilla = footprint(graphs.train.trace).device_peak_bytes
    assert footprint(graphs.train_last.trace).device_peak_bytes > vanilla >= needed_bytes(graphs, NO_EVENTS)
    steps = job.planned(grant=Grant(NO_EVENTS, vanilla))
    assert_same(job, steps)


def test_a_step_that_does_not_fit_is_tried_again_with_another_plan(prepared: Prepared) -> None:
    job = case(prepared)
    model = job.model()
    graphs = job.graphs(model)
    grants: list[Grant] = []
    shortages: list[OutOfDeviceMemoryError] = []

    def renegotiate(shortage: OutOfDeviceMemoryError) -> None:
        shortages.append(shortage)
        trace = steps.traces()["train"]
        planner = JobPlanner(trace, PROFILE)
        steps.take(Grant(planner.within(grants[0].granted_bytes + 4096).plan, grants[0].granted_bytes + 4096))

    grants.append(plan_within(graphs, 0.0))
    device = HostDevice(PROFILE, grants[0].granted_bytes)
    steps = PlannedSteps(model, graphs, device, grants[0], renegotiate)
    steps.measure()  # the workspaces show in the third step
    recorder = job.run(steps)
    wanted, expected = job.expected()
    assert shortages
    assert weights(steps.model) == wanted
    assert recorder.without_seconds() == expected.without_seconds()


class Scheduler:
    """The worker of a job that waits: answers with the plans that `plans` makes, one at a time."""

    def __init__(self, *plans: Callable[[], Grant]) -> None:
        self.spec: dict[str, Any] = {"policy": "joint", "network": None, "overheads": []}
        self.plans = list(plans)
        self.sent: list[FrameType] = []

    def send(self, kind: FrameType, header: dict[str, Any], buffers: Any = ()) -> None:
        self.sent.append(kind)

    def wait_for_frame(self, phase: str, wanted: set[FrameType]) -> Frame:
        grant = self.plans.pop(0)()
        header = {"generation": 9 - len(self.plans), **grant._asdict()}
        return Frame(FrameType.PLAN, 0, 0, header, _buffers(header.pop("plan")))


def test_a_plan_made_before_larger_workspaces_were_known_is_passed_over(prepared: Prepared) -> None:
    """One that was published while the trace with the new workspaces was on its way."""
    job = case(prepared)
    model = job.model()
    graphs = job.graphs(model)
    first = plan_within(graphs, 0.0)

    def with_workspaces() -> Grant:
        granted = first.granted_bytes + 4096
        return Grant(JobPlanner(client._sent["train"], PROFILE).within(granted).plan, granted)

    scheduler = Scheduler(lambda: first, with_workspaces)
    client = MemoryClient(cast(Any, scheduler), Job(model, *job.parts), PROFILE, cast(Any, None))
    client._rows = {name: rows_of(graph) for name, graph in graphs.named().items()}
    client._sent = graphs.traces()
    client._steps = steps = PlannedSteps(
        model, graphs, HostDevice(PROFILE, first.granted_bytes), first, client.renegotiate
    )
    steps.measure()  # the workspaces show in the third step
    job.run(steps)
    assert weights(steps.model) == job.expected()[0]
    assert not scheduler.plans and scheduler.sent.count(FrameType.TRACE) == 1


@pytest.mark.filterwarnings("ignore:overflow")
def test_a_loss_that_is_not_finite_stops_at_its_step_and_saves_nothing_of_it(prepared: Prepared) -> None:
    job = case(prepared, {"type": "mlp", "hidden": []}, learning_rate=1e38, optimizer="sgd", checkpoint_interval_s=1e-9)
    steps, recorder = job.planned(), Recorder(free=True)
    with pytest.raises(NotFiniteError, match="at step") as error:
        job.run(steps, recorder=recorder)
    eager = Recorder(free=True)
    with pytest.raises(NotFiniteError) as expected:
        job.run(job.eager(), recorder=eager)
    assert error.value.step == expected.value.step
    assert contents(recorder) == contents(eager)
    steps.close()


def test_closing_gives_the_model_back_and_ends_its_threads(prepared: Prepared) -> None:
    before = threading.active_count()
    job = case(prepared)
    steps = job.planned()
    job.run(steps)
    steps.close()
    assert all(torch.isfinite(parameter).all() for parameter in steps.model.parameters())
    del steps
    assert threading.active_count() <= before + 2


def _buffers(plan: Plan) -> list[memoryview]:
    return [memoryview(plan.rows.tobytes()), memoryview(plan.order_bytes), memoryview(b"")]
