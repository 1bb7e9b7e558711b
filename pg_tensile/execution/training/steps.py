"""Implementations of `run_steps.Steps`: eagerly, as PyTorch does, or by an executor under a plan.

On the CPU both give the same results to the last bit, and the state of one can be loaded into the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pg_tensile.errors import OutOfDeviceMemoryError
from pg_tensile.execution.capture.eager import EagerStep
from pg_tensile.execution.capture.training_step import autocast
from pg_tensile.execution.data.batches import Batch
from pg_tensile.execution.data.preprocessing import Task
from pg_tensile.execution.distributed.all_reduce import begun
from pg_tensile.execution.runtime.allocator_limit import allocator_limit
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.executor import EvaluationResult, Executor
from pg_tensile.execution.runtime.executor import StepResult as Executed
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.execution.runtime.measure import Measurement
from pg_tensile.execution.runtime.memory_flow import Requests
from pg_tensile.execution.runtime.plan_change import follow
from pg_tensile.execution.runtime.state import TrainingState, counterparts
from pg_tensile.execution.training import checkpoint as ckpt
from pg_tensile.execution.training.eager_memory import backward_measured
from pg_tensile.execution.training.graphs import Graphs, micro_batched, rows_of, step_spec, taking_tensors
from pg_tensile.execution.training.observer import Memory
from pg_tensile.execution.training.run_steps import StepResult, StepsState
from pg_tensile.execution.training.settings import Settings
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.compression.sparsity import Statistics
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.memory_flow.groups import Group
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.allocator import device_bytes, plan_bytes
from pg_tensile.planning.plan.following import following_plan
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Trace


class EagerSteps:
    """Steps by autograd and torch.optim, with all tensors on the device.

    On an accelerator the process takes at most `budget_bytes` and a margin of it; None means no limit. `claim` is
    called before the second step, or an evaluation after the first one, with the bytes that the first one took beyond
    the model's and the optimizer's state; it may wait, and raise StopTraining."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        task: Task,
        device: torch.device,
        evaluation_rows: int,
        budget_bytes: int | None = None,
        claim: Callable[[int], None] | None = None,
    ) -> None:
        self._claim = claim
        self._taken_bytes: int | None = None  # by the first step, unless it is claimed already
        self._limit = None if device.type == "cpu" or budget_bytes is None else allocator_limit(device)
        if self._limit is not None:
            self._limit.set(id(self), budget_bytes)
        self.model = model.to(device)
        self.batch_device = self.device = device
        self.evaluation_rows = evaluation_rows
        self._spec = step_spec(settings, task)
        self._eager = EagerStep(model, self._spec, one_group=True)

    def train(self, batch: Batch, learning_rate: float | None = None) -> StepResult:
        if self._claim is not None and self._taken_bytes is None:
            with backward_measured(self._eager.optimizer, self.device, self._keep_taken):
                return self._train(batch, learning_rate)
        self._claim_taken()
        return self._train(batch, learning_rate)

    def _train(self, batch: Batch, learning_rate: float | None) -> StepResult:
        self._switch(True)
        self._eager.spec = micro_batched(self._spec, batch.rows)
        if self._eager.spec.accumulation == 1:
            loss, (outputs,) = self._eager.step([batch.features], batch.targets, learning_rate, batch.share)
            return StepResult(outputs.float(), loss.item())
        with taking_tensors(self.model):
            loss, parts = self._eager.step(batch.features.flat(), batch.targets, learning_rate, batch.share)
        return StepResult(torch.cat(parts).float(), loss.item())

    def _keep_taken(self, taken_bytes: int) -> None:
        self._taken_bytes = taken_bytes

    def _claim_taken(self) -> None:
        claim, self._claim = self._claim, None
        if claim is not None and self._taken_bytes is not None:
            claim(self._taken_bytes)

    def evaluate(self, batch: Batch) -> StepResult:
        self._claim_taken()
        self._switch(False)
        with torch.inference_mode(), autocast(self.model, self._spec):
            outputs = self.model(batch.features)
            return StepResult(outputs.float(), self._spec.loss(outputs, *batch.targets).item())

    def _switch(self, training: bool) -> None:
        if self.model.training != training:
            self.model.train(training)

    def state(self) -> StepsState:
        return StepsState(ckpt.model_tensors(self.model), ckpt.optimizer_tensors(self._eager.optimizer))

    def load(self, state: StepsState) -> None:
        ckpt.load_model(self.model, state.model)
        ckpt.load_optimizer(self._eager.optimizer, state.optimizer)

    def memory(self) -> Memory:
        if self.device.type == "cpu":
            return Memory()
        allocated = torch.accelerator.memory_allocated(self.device)
        return Memory(allocated, torch.accelerator.max_memory_allocated(self.device))

    def close(self) -> None:
        if self._limit is not None:
            self._limit.drop(id(self))


# ---- under a plan ----------------------------------------------------------------------------------------------------


class Grant(NamedTuple):
    """Resources granted to a job from some iteration on.

    `plan` is that of its training step, `granted_bytes` the device memory including workspaces, and `link_share` its
    share of the link in (0, 1]. With `groups` the memory flows: it is requested for each group of a step."""

    plan: Plan
    granted_bytes: int
    link_share: float = 1.0
    groups: tuple[Group, ...] = ()


class DeviceGraphs(NamedTuple):
    """Number of iterations that were replays of a device graph; `obstacle` is why the last ones were none, or None."""

    replays: int
    obstacle: str | None


class PlannedSteps:
    """Steps by one executor for all graphs of a job; it holds the model's weights until `close`.

    All graphs but the first follow the first one's plan; a graph that would exceed the grant in doing so has a plan of
    its own. `renegotiate` is called if a step does not fit because workspaces are larger than planned: it returns after
    another grant was passed to `take`, or raises. The step is then tried again, from the state after the last one.
    Raises InvalidPlanError, BudgetError, OutOfDeviceMemoryError, DeviceError, ExecutorError."""

    def __init__(
        self,
        model: nn.Module,
        graphs: Graphs,
        device: Device,
        grant: Grant,
        renegotiate: Callable[[OutOfDeviceMemoryError], None],
        device_graphs: bool = False,
        requests: Requests | None = None,
    ) -> None:
        """Create the executor on `device`, whose budget must be the granted bytes.

        With `device_graphs` it replays iterations where it can. `requests` are for memory that flows; without them no
        grant may have groups."""
        self.model = model
        self.device = device.torch_device
        self.batch_device = torch.device("cpu")  # the executor copies each batch to the device
        self.evaluation_rows = graphs.evaluation_rows or 1
        self.generation: int | None = None  # of the plan of the last training step
        self._device = device
        self._renegotiate = renegotiate
        self._names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._worker = ThreadPoolExecutor(1, "pg_tensile plans")
        self._executor = Executor(
            graphs.train,
            model,
            device,
            grant.plan,
            device_graphs=device_graphs,
            groups=grant.groups,
            requests=requests,
        )
        try:
            added = {name: self._executor.add(captured) for name, captured in graphs.named().items() if name != "train"}
            self._graphs: dict[str, Graph] = {"train": self._executor.graphs[0], **added}
            self._by_rows = {(graph.captured.trains, rows_of(graph.captured)): graph for graph in self._graphs.values()}
            self._own: set[str] = set()  # graphs that do not follow the first one's plan
            self.take(grant)
        except BaseException:
            self.close()
            raise

    # ---- steps ----

    def train(self, batch: Batch, learning_rate: float | None = None) -> StepResult:
        step = partial(self._executor.step, learning_rate=learning_rate, share=batch.share)
        result = self._execute(step, True, batch)
        self.generation = self._executor.plan.generation
        return result

    def evaluate(self, batch: Batch) -> StepResult:
        return self._execute(self._executor.evaluate, False, batch)

    def _execute(self, execute: Callable[..., Executed | EvaluationResult], trains: bool, batch: Batch) -> StepResult:
        inputs, targets = batch.features.flat(), batch.targets
        graph = self._by_rows[trains, batch.rows]
        while True:
            shortage: OutOfDeviceMemoryError | None = None
            collectives = begun()
            try:
                loss, outputs = execute(inputs, targets, graph=graph)
            except OutOfDeviceMemoryError as error:
                if error.budget is None or begun() != collectives:  # other ranks would not repeat what it has begun
                    raise
                shortage = error.with_traceback(None)  # the traceback's frames keep tensors alive
            if shortage is None:
                assert loss is not None
                whole = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
                return StepResult(whole.to(self.batch_device).float(), loss.item())
            self._renegotiate(shortage)

    # ---- plans ----

    def offer(self, grant: Grant) -> Future[None]:
        """Pass the grant to `take` in a worker thread; return its future at once."""
        return self._worker.submit(self.take, grant)

    def take(self, grant: Grant) -> None:
        """Compile a plan that is in force from the next training step on.

        To be called from one thread at a time. Raises InvalidPlanError, BudgetError, DeviceError; the plans then stay
        as they are."""
        own = self._own_plans(grant)
        order = ["train", *own]
        if (self._executor.budget_bytes or 0) > grant.granted_bytes:
            order.reverse()  # a step may run in between, and no plan in force may exceed the budget
        for name in order:
            if name != "train":
                self._executor.change_plan(own[name], self._graphs[name])
            elif grant.plan is not self._graphs["train"].plan:
                self._executor.change_plan(grant.plan, budget_bytes=grant.granted_bytes, groups=grant.groups)
        self._own = set(own)
        self._device.share_link(grant.link_share)

    def _own_plans(self, grant: Grant) -> dict[str, Plan]:
        """Return plans for the graphs that would exceed the grant by following the first one, or that once did."""
        own: dict[str, Plan] = {}
        traces = self.traces()
        sequence = AccessSequence(traces["train"], grant.plan)
        sequence.check()
        for name, trace in traces.items():
            plan = grant.plan if name == "train" else follow(self._graphs[name], sequence)
            if plan_bytes(trace, plan) > grant.granted_bytes:
                profile, share = self._device.profile, grant.link_share
                own[name] = JobPlanner(trace, profile, share).within(grant.granted_bytes).plan
            elif name in self._own:
                own[name] = plan
        return own

    # ---- measuring ----

    def device_graphs(self) -> DeviceGraphs:
        executor = self._executor
        host = None if executor.captures else "only accelerators capture iterations"
        return DeviceGraphs(executor.replays, host or executor.obstacle)

    def traces(self) -> dict[str, Trace]:
        """Return the graphs' traces, with sizes, latencies and workspaces as far as they have been measured."""
        return {name: graph.trace for name, graph in self._graphs.items()}

    def measure(self) -> None:
        """Measure latencies in the next training step and, at the first call, workspaces in the one after it."""
        self._executor.measure(again=True)

    def measure_step(self, rows: int) -> None:
        """Measure latencies in the next training step with `rows` rows, and workspaces in the one after it."""
        self._executor.measure(self._by_rows[True, rows])

    def measurement(self) -> Measurement:
        """Return the measurement of the training step."""
        return self._executor.measurement()

    def measure_sparsity(self) -> None:
        """Count zeros in the tensors that the next training step swaps out."""
        self._executor.measure_sparsity()

    def sparsity(self) -> Mapping[int, Statistics] | None:
        """Return the last statistics by tensor of the training step; None while a requested count is pending."""
        return None if self._executor.measures_sparsity else self._executor.statistics()

    def moved_bytes(self) -> Mapping[int, int]:
        """Return the bytes copied to the host in the last step, by tensor; empty unless it was a step of `train`."""
        return self._executor.moved_bytes()

    def memory(self) -> Memory:
        counters = self._executor.counters
        return Memory(
            self._executor.device_bytes,
            counters.device_peak_bytes,
            counters.bytes_out + counters.bytes_in,
            round(counters.stall_us + counters.memory_wait_us),
            counters.passive_swap_ins,
            counters.raw_bytes_out + counters.raw_bytes_in,
        )

    # ---- state ----

    def state(self) -> StepsState:
        state = self._executor.state_dict()
        optimizer = {
            f"{number}.{key}": tensor
            for number, name in enumerate(self._names)
            for key, tensor in state.optimizer.get(name, {}).items()
        }
        return StepsState(state.model, optimizer)

    def load(self, state: StepsState) -> None:
        optimizer: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.optimizer.items():
            number, _, key = name.partition(".")
            optimizer.setdefault(self._names[int(number)], {})[key] = tensor
        self._executor.load_state_dict(TrainingState(dict(state.model), optimizer))

    def close(self) -> None:
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._executor.close()


def needed_bytes(graphs: Graphs, plan: Plan) -> int:
    """Return the least device memory (bytes) for which every graph has a plan, the first one being `plan`.

    Raises InvalidPlanError."""
    train = graphs.train
    sequence = AccessSequence(train.trace, plan)
    sequence.check()
    needed = device_bytes(sequence)
    for graph in graphs.named().values():
        if graph is not train:
            following = following_plan(sequence, graph.trace, counterparts(train, graph))
            needed = max(needed, min(plan_bytes(graph.trace, following), least_bytes(graph.trace)))
    return needed
