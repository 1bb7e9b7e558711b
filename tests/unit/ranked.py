"""Ranks for tests: processes that execute a function together, and what they execute there.

The processes stay, and are forked from one that has imported this module, because importing PyTorch takes seconds; each
call makes a process group of its own over a file. A collective that not all ranks take part in ends with an error of
gloo after DEADLOCK_S.
"""

from __future__ import annotations

import functools
import pickle
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from pg_tensile.execution.capture import Captured, OptimizerSpec, RankSpec, StepSpec, capture
from pg_tensile.execution.capture.eager import EagerStep, make_optimizer
from pg_tensile.execution.distributed.all_reduce import ALL_REDUCE
from pg_tensile.execution.distributed.group import check_alike, part_of
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.loaded_graph import Graph
from pg_tensile.execution.runtime.swapper import Swapper
from pg_tensile.execution.training.graphs import Graphs, check_collectives
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.latency.collectives import exchanges
from pg_tensile.planning.plan.plan import Event, EventKind, Plan
from pg_tensile.planning.policies import POLICIES
from pg_tensile.planning.trace.trace import Trace
from tests.documents import REPOSITORY, blocks

DEADLOCK_S = 60
ALL_REDUCE_NOW = dist.all_reduce
FAST = replace(RTX_A6000, kind="host", transfer_latency_us=0.0)


class Ranks:
    """Processes that are the ranks of a job, for one call after another; `close` ends them."""

    def __init__(self, most: int) -> None:
        server = get_context("forkserver")
        server.set_forkserver_preload(["tests.unit.ranked_preload"])
        pipes = [server.Pipe() for _ in range(most)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [server.Process(target=_serve, args=(theirs,), daemon=True) for _, theirs in pipes]
        for process, (_, theirs) in zip(self._processes, pipes, strict=True):
            process.start()
            theirs.close()

    def call(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return what `function(*arguments)` returns on each of `size` ranks; raise the error of the first with one."""
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder) / "group")
            for rank, connection in enumerate(self._connections[:size]):
                connection.send((path, rank, size, function, arguments))
            results = [connection.recv() for connection in self._connections[:size]]
        for error, _ in results:
            if error is not None:
                raise error
        return [value for _, value in results]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(connection: Connection) -> None:
    """Execute what comes, until the other side is closed; tensors are sent as bytes, not as shared memory."""
    torch.set_num_threads(1)
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        try:
            result: tuple[BaseException | None, Any] = None, in_group(*call)
        except Exception as error:
            traceback.print_exc()
            result = error, None
        connection.send_bytes(pickle.dumps(result))


def in_group(path: str, rank: int, size: int, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    patience = timedelta(seconds=DEADLOCK_S)
    store = dist.FileStore(path, size)
    store.set_timeout(patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)
    try:
        dist.barrier()  # one that leaves at once must not keep the others from joining
        return function(*arguments)
    finally:
        dist.destroy_process_group()


# ---- steps -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Convolution, batch norm if asked for, a frozen weight and one used twice, dropout, layers."""

    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6) if norm else nn.Identity()
        self.dropout, self.hidden, self.head = nn.Dropout(dropout), nn.Linear(54, 54), nn.Linear(54, 10)
        self.frozen = nn.Parameter(torch.ones(54), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x)), inplace=True), 2).flatten(1)
        x = torch.tanh(self.hidden(self.dropout(x)))
        return self.head(self.hidden(x) * self.frozen)


def net(dropout: float = 0.0, norm: bool = True) -> Net:
    torch.manual_seed(0)
    return Net(dropout, norm)


class Job(NamedTuple):
    """Steps of `net` on a batch each: `rows` of the batches, which all ranks divide."""

    optimizer: OptimizerSpec = OptimizerSpec("adamw", 1e-2)
    clip: float | None = None
    rows: tuple[int, ...] = (8, 8, 8, 8)
    bucket_bytes: int = 4 << 20
    accumulation: int = 1
    dropout: float = 0.0
    norm: bool = True

    def net(self) -> Net:
        return net(self.dropout, self.norm)

    def spec(self, ranks: int) -> StepSpec:
        """Return the specification of a step of `ranks` ranks."""
        ranked = RankSpec(ranks, self.bucket_bytes) if ranks > 1 else None
        return StepSpec(F.cross_entropy, self.optimizer, self.clip, accumulation=self.accumulation, ranks=ranked)

    def batches(self) -> Iterator[tuple[list[Tensor], list[Tensor], float]]:
        """Yield inputs, targets and share of this rank's part of each batch."""
        size, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        for number, rows in enumerate(self.rows):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(rows, 3, 8, 8, generator=generator)
            y = torch.randint(0, 10, (rows,), generator=generator)
            part = part_of(rows, rank, size)
            yield [x[part]], [y[part]], len(y[part]) / rows


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plan_of(policy: str, trace: Trace, part: float) -> Plan:
    """Return a plan; `joint` within a part of the memory between the least and what the trace takes without a plan."""
    if policy == "moving buckets":
        return moving_buckets(trace)
    if policy != "joint":
        return POLICIES[policy]({0: trace}, FAST, None)[0]
    planner = JobPlanner(trace, FAST)
    least = least_bytes(trace)
    return planner.within(int(least + part * (planner.vanilla.device_peak_bytes - least))).plan


def moving_buckets(trace: Trace) -> Plan:
    """Return a plan that copies each bucket out, frees it and copies it back in while it is exchanged."""
    events = []
    for begin, wait, tensor in exchanges(trace):
        if wait > begin + 2:
            events.append(Event(EventKind.SWAP_OUT, tensor, begin, begin + 1))
            events.append(Event(EventKind.SWAP_IN, tensor, begin + 1, wait))
    assert events
    return Plan.build(events)


class Late(NamedTuple):
    """A collective that exchanges nothing before it is waited for."""

    arguments: tuple[Any, ...]
    done: list[bool]

    def wait(self) -> None:
        if not self.done:
            ALL_REDUCE_NOW(*self.arguments)
            self.done.append(True)


@contextmanager
def late_exchanges() -> Iterator[list[int]]:
    """Have collectives that are asynchronous exchange nothing before they are waited for; yield how many buckets have
    been copied out. Raises AssertionError if one is copied out before."""
    begun: list[Late] = []
    copied: list[int] = []
    copy_out = Swapper.copy_out

    def all_reduce(*arguments: Any, async_op: bool) -> Late:
        begun.append(Late(arguments, []))
        return begun[-1]

    def watched(self: Swapper, tensor: int, *arguments: Any, **options: Any) -> None:
        storage = self.storage(tensor)._cdata
        exchanged = [late for late in begun if late.arguments[0].untyped_storage()._cdata == storage]
        assert all(late.done for late in exchanged), "a bucket is copied out that is exchanged"
        copied.append(len(exchanged))
        copy_out(self, tensor, *arguments, **options)

    dist.all_reduce, Swapper.copy_out = all_reduce, watched  # type: ignore[assignment, method-assign]
    try:
        yield copied
    finally:
        dist.all_reduce, Swapper.copy_out = ALL_REDUCE_NOW, copy_out  # type: ignore[method-assign]


@functools.cache
def captured_step(job: Job, rows: int, size: int) -> Captured:
    """Capture the step of one of `size` ranks on `rows` rows, once for all calls. No random numbers are drawn."""
    batch = {len(targets[0]): (inputs, targets) for inputs, targets, _ in job.batches()}[rows]
    with torch.random.fork_rng(devices=()):
        return capture(job.net(), *batch, job.spec(size), early_update=True)


def planned_late(job: Job, policies: Sequence[str]) -> dict[str, Tensor]:
    """Train as `planned`, on the slowest network that there can be."""
    with late_exchanges() as copied:
        result = planned(job, policies)
        assert any(copied) == (policies[dist.get_rank() % len(policies)] == "moving buckets")
        return result


def planned(job: Job, policies: Sequence[str] = ("none",), parts: Sequence[float] = (0.5,)) -> dict[str, Tensor]:
    """Train by an executor, rank r under policies[r mod n]; return the weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = job.net()
    graphs: dict[int, Graph] = {}
    with closing(HostDevice(FAST)) as device:
        executor: Executor | None = None
        torch.manual_seed(100 + rank)
        for inputs, targets, share in job.batches():
            rows = len(targets[0])
            if rows not in graphs:
                captured = captured_step(job, rows, size)
                plan = plan_of(policies[rank % len(policies)], captured.trace, parts[rank % len(parts)])
                if executor is None:
                    executor = Executor(captured, model, device, plan)
                    graphs[rows] = executor.graphs[0]
                else:
                    graphs[rows] = executor.add(captured)
            assert executor is not None
            executor.step(inputs, targets, graph=graphs[rows], share=share)
        assert executor is not None
        executor.close()
    return weights(model)


def eager(job: Job) -> dict[str, Tensor]:
    """Train by the policy none; return the weights. Outside a group: a single process on whole batches."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    model = job.net()
    step = EagerStep(model, job.spec(size))
    torch.manual_seed(100 + (dist.get_rank() if size > 1 else 0))
    for inputs, targets, share in job.batches():
        step.step(inputs, targets, share=share)
    return weights(model)


def eager_progress(job: Job) -> list[int]:
    """Train as `eager`, and return how many collectives have begun when the last gradient of each step arrives."""
    model, begun, found = job.net(), [0], []
    step = EagerStep(model, job.spec(dist.get_world_size()))

    def counted(*arguments: Any, **options: Any) -> Any:
        begun[0] += 1
        return ALL_REDUCE_NOW(*arguments, **options)

    model.conv.weight.register_hook(lambda gradient: found.append(begun[0]))
    dist.all_reduce = counted
    try:
        for inputs, targets, share in job.batches():
            begun[0] = 0
            step.step(inputs, targets, share=share)
    finally:
        dist.all_reduce = ALL_REDUCE_NOW
    return found


def parallel(job: Job, weighted: bool = False) -> dict[str, Tensor]:
    """Train by DistributedDataParallel; return the weights. `weighted`: by the ranks' rows, in a hook of buckets."""
    model = job.net()
    wrapped = DistributedDataParallel(model, bucket_cap_mb=job.bucket_bytes / (1 << 20))
    share = [1.0]
    if weighted:

        def hook(state, bucket):  # DistributedDataParallel takes no annotations that are strings
            work = dist.all_reduce(bucket.buffer().mul_(share[0]), async_op=True)
            return work.get_future().then(lambda future: future.value()[0])

        wrapped.register_comm_hook(None, hook)
    optimizer = make_optimizer(model, job.optimizer)
    first, *_ = job.batches()
    F.cross_entropy(wrapped(first[0][0]), first[1][0]).backward()  # after it, DistributedDataParallel makes its buckets
    torch.manual_seed(100 + dist.get_rank())
    for (x,), (y,), share[0] in job.batches():
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(wrapped(x), y).backward()
        if job.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip, foreach=False)
        optimizer.step()
    return weights(model)


def collectives(job: Job, policies: Sequence[str]) -> list[tuple[int, ...]]:
    """Train as `planned`, and return the shape of what every collective exchanges, in the order of execution."""
    seen = []
    original = dist.all_reduce

    def watched(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        seen.append(tuple(tensor.shape))
        return original(tensor, *arguments, **options)

    dist.all_reduce = watched
    try:
        planned(job, policies, (0.0, 0.7))
    finally:
        dist.all_reduce = original
    return seen


def step_of(ranks: int) -> None:
    """Take a step of so many ranks."""
    ALL_REDUCE(torch.ones(3), torch.zeros((), dtype=torch.int64), torch.tensor(0.5, dtype=torch.float64), ranks)


def different() -> None:
    check_alike("their numbers", str(dist.get_rank()))


def example(budgets: Sequence[int]) -> list[float]:
    """Execute the example of the documentation, rank r within budgets[r mod n]."""
    library = REPOSITORY / "docs" / "library.md"
    (block,) = (block for block in blocks(library, "python") if block.note == "two ranks")
    module: dict[str, Any] = {"__name__": "example"}
    exec(compile(block.text, library.name, "exec"), module)
    sums: list[float] = module["train"](budgets[dist.get_rank() % len(budgets)])
    return sums


def exchanging_others() -> None:
    """Take an eager step with buckets of another size on each rank."""
    eager(Job(bucket_bytes=1 + 100_000 * dist.get_rank()))


def planning_others() -> None:
    """Check captured steps with buckets of another size on each rank."""
    job = Job()
    inputs, targets, _ = next(job.batches())
    spec = replace(job.spec(2), ranks=RankSpec(2, 1 + 100_000 * dist.get_rank()))
    check_collectives(Graphs(capture(job.net(), inputs, targets, spec), None, None, None))


class Skipping(nn.ModuleList):
    """Layers of which the second one is left out after the first step."""

    def __init__(self) -> None:
        super().__init__([nn.Linear(3, 3), nn.Linear(3, 3)])
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return self[1](self[0](x)) if self.steps == 1 else self[0](x)


def skipping() -> None:
    step = EagerStep(Skipping(), StepSpec(torch.sum, ranks=RankSpec(2)))
    for _ in range(2):
        step.step([torch.ones(2, 3)], [])
