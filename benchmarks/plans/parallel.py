"""One job on two ranks with a core each, beside the same job on one core and PyTorch's own way.

The ranks are processes that exchange gradients by gloo: on one machine, or in two network namespaces, as on two
machines with a link of LINK_RATE between them. All take steps with the same global batch, in turns: an executor and
eager PyTorch on one rank, while the other waits; DistributedDataParallel; executors of both ranks, without a plan, with
plans of `joint` within half of the memory that a plan can save, and with collectives that are waited for where they
begin, so that nothing hides them.

Needs two idle cores; namespaces need root and the commands `ip` and `tc`.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.experiments.networks import GPT2, SMALL_RESNET, VIT, Network
from benchmarks.results import Results
from benchmarks.runner import Run, Section
from benchmarks.tables import table
from pg_tensile.execution.capture import RankSpec, StepSpec, capture
from pg_tensile.execution.capture.eager import EagerStep, make_optimizer
from pg_tensile.execution.distributed.group import part_of
from pg_tensile.execution.measuring.device import measure
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.building_blocks.keep import least_bytes
from pg_tensile.planning.job_planner.planner import JobPlanner
from pg_tensile.planning.latency import roofline
from pg_tensile.tools.bench.workload import Batch, Workload, build_model, prepare
from pg_tensile.tools.cli.bench import parse

NETWORKS = (
    SMALL_RESNET._replace(batch=64),
    VIT._replace(batch=4),
    GPT2._replace(title="GPT-2, width 256", batch=8, kwargs='{"layers": 6, "width": 256}'),
)
LINK_RATE = "1gbit"
LINKS = {"one machine": None, "two machines, 1 Gbit/s": LINK_RATE}
RANKS, ROUNDS, STEPS, WARMUP = 2, 5, 4, 2
PORT = 29511
SPACES = ("pgt-rank-0", "pgt-rank-1")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
METHODS = ("one", "eager", "ddp", "ranks", "planned", "waiting")

Step = Callable[[Batch], object]


# ---- a rank ----------------------------------------------------------------------------------------------------------


class Done(NamedTuple):
    """A collective that has ended where it has begun."""

    def wait(self) -> None: ...


@contextmanager
def waiting_at_once() -> Iterator[None]:
    original: Any = dist.all_reduce

    def now(tensor: torch.Tensor, **options: Any) -> Done:
        original(tensor)
        return Done()

    dist.all_reduce = now  # type: ignore[assignment]
    try:
        yield
    finally:
        dist.all_reduce = original


class Contender(NamedTuple):
    """A way to train; `alone`: on rank 0 with the whole batch."""

    step: Step
    alone: bool = False
    late: bool = False


def contenders(workload: Workload, held: ExitStack) -> dict[str, Contender]:
    """Return all ways to train; what they hold ends with `held`."""
    profile = replace(measure(torch.device("cpu")), transfer_latency_us=0.0)
    spec, share = workload.spec, 1 / RANKS

    def executor(spec: StepSpec, batch: Batch, part: float = 1.0) -> Executor:
        captured = capture(workload.fresh_model(), batch.inputs, batch.targets, spec, early_update=True)
        trace = roofline.timed(captured.trace, profile)
        planner = JobPlanner(trace, profile)
        least = least_bytes(trace)
        plan = planner.within(int(least + part * (planner.vanilla.device_peak_bytes - least))).plan
        device = held.enter_context(_closing(HostDevice(profile)))
        made = Executor(replace(captured, trace=trace), workload.fresh_model(), device, plan)
        held.callback(made.close)
        return made

    (whole,) = workload.batches(1)
    here = part_of_batch(whole)
    ranked = replace(spec, ranks=RankSpec(RANKS))
    alone, ranks, planned = executor(spec, whole), executor(ranked, here), executor(ranked, here, 0.5)
    eager = EagerStep(workload.fresh_model(), spec)
    model = workload.fresh_model()
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(model, spec.optimizer, one_group=True)

    def ddp(batch: Batch) -> None:
        optimizer.zero_grad(set_to_none=True)
        spec.loss(spec.pick(parallel(*batch.inputs)), *batch.targets).backward()
        optimizer.step()

    def with_share(made: Executor) -> Step:
        return lambda batch: made.step(batch.inputs, batch.targets, share=share)

    return {
        "one": Contender(lambda batch: alone.step(batch.inputs, batch.targets), alone=True),
        "eager": Contender(lambda batch: eager.step(batch.inputs, batch.targets), alone=True),
        "ddp": Contender(ddp),
        "ranks": Contender(with_share(ranks)),
        "planned": Contender(with_share(planned)),
        "waiting": Contender(with_share(ranks), late=True),
    }


@contextmanager
def _closing(device: HostDevice) -> Iterator[HostDevice]:
    try:
        yield device
    finally:
        device.close()


def part_of_batch(batch: Batch) -> Batch:
    rows = part_of(len(batch.inputs[0]), dist.get_rank(), RANKS)
    return Batch(tuple(x[rows] for x in batch.inputs), tuple(y[rows] for y in batch.targets))


def take_part(rank: int, network: Network, address: str) -> None:
    """Take all turns as one of the ranks; rank 0 prints the ms of a step by method and round."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:{PORT}", rank=rank, world_size=RANKS)
    options = parse(["bench", *network.arguments(), "--device", "host", "--threads", "1", "--optimizer", "adamw"])
    workload = prepare(options, build_model(options), torch.device("cpu"))
    times: dict[str, list[float]] = {name: [] for name in METHODS}
    with ExitStack() as held:
        ways = contenders(workload, held)
        for round_ in range(ROUNDS + 1):  # the first one warms up
            for name, way in ways.items():
                ms = turn(workload, way, WARMUP if not round_ else STEPS)
                times[name] += [ms] if round_ else []
    if rank == 0:
        print(json.dumps(times))
    dist.destroy_process_group()


def turn(workload: Workload, way: Contender, steps: int) -> float:
    """Take steps, and return the ms of one on average."""
    dist.barrier()
    begin = time.perf_counter()
    if not way.alone or dist.get_rank() == 0:
        batches = workload.batches(steps)
        begin = time.perf_counter()
        with waiting_at_once() if way.late else ExitStack():
            for batch in batches:
                way.step(batch if way.alone else part_of_batch(batch))
    dist.barrier()
    return (time.perf_counter() - begin) / steps * 1e3


# ---- all of them -----------------------------------------------------------------------------------------------------


@contextmanager
def namespaces(rate: str) -> Iterator[list[list[str]]]:
    """Yield the commands that execute others in two networks with a link of this rate between them."""

    def run(command: str) -> None:
        subprocess.run(command.split(), check=True)

    first, second = SPACES
    try:
        for space in SPACES:
            run(f"ip netns add {space}")
        run(f"ip link add veth0 netns {first} type veth peer name veth0 netns {second}")
        for space, address in zip(SPACES, ADDRESSES, strict=True):
            run(f"ip -n {space} addr add {address}/24 dev veth0")
            for device in ("lo", "veth0"):
                run(f"ip -n {space} link set {device} up")
            run(f"tc -n {space} qdisc add dev veth0 root tbf rate {rate} burst 256kb latency 50ms")
        yield [["ip", "netns", "exec", space] for space in SPACES]
    finally:
        for space in SPACES:
            subprocess.run(["ip", "netns", "del", space], check=False)


def measured(number: int, rate: str | None) -> dict[str, list[float]]:
    """Return the ms of steps of a network by method and round."""
    with ExitStack() as stack:
        prefixes = [[], []] if rate is None else stack.enter_context(namespaces(rate))
        address, interface = ("127.0.0.1", "lo") if rate is None else (ADDRESSES[0], "veth0")
        ranks = [
            subprocess.Popen(
                [
                    *(*prefix, "env", f"GLOO_SOCKET_IFNAME={interface}"),
                    *(sys.executable, "-m", "benchmarks.plans.parallel", str(rank), str(number), address),
                ],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, prefix in enumerate(prefixes)
        ]
        (output, _), _ = (rank.communicate() for rank in ranks)
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank has failed")
    times: dict[str, list[float]] = json.loads(output.splitlines()[-1])
    return times


def row_of(network: Network, link: str, times: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return the medians, and those of the ratios of each round."""

    def ratio(first: str, second: str) -> float:
        return round(statistics.median(a / b for a, b in zip(times[first], times[second], strict=True)), 3)

    return {
        "network": network.title,
        "batch": network.batch,
        "link": link,
        "ms": {name: round(statistics.median(found), 1) for name, found in times.items()},
        "speedup": ratio("one", "ranks"),
        "ddp_speedup": ratio("eager", "ddp"),
        "over_ddp": ratio("ddp", "ranks"),
        "over_waiting": ratio("waiting", "ranks"),
        "planned_over_ddp": ratio("ddp", "planned"),
    }


def rows(run: Run) -> Iterator[dict[str, Any]]:
    """Measure all networks over both links; `quick`: one on this machine."""
    cases = {f"{network.title}, {link}": (number, link) for link in LINKS for number, network in enumerate(NETWORKS)}
    for name in run.scenarios([*cases][: 1 if run.quick else None]):
        number, link = cases[name]
        yield row_of(NETWORKS[number], link, measured(number, LINKS[link]))


def tables(results: Results) -> list[str]:
    headings = (
        *("network", "link", "one rank", "eager", "DDP", "two ranks", "planned", "waiting"),
        *("speed-up", "of DDP", "over DDP", "over waiting"),
    )
    shown = [
        (
            *(row["network"], row["link"], *(f"{row['ms'][name]:,.0f}" for name in METHODS)),
            *(f"{row[name]:.2f}" for name in ("speedup", "ddp_speedup", "over_ddp", "over_waiting")),
        )
        for row in results.rows()
    ]
    return table(headings, shown)


BENCHMARK = Section("Two ranks", rows, tables)

if __name__ == "__main__":
    take_part(int(sys.argv[1]), NETWORKS[int(sys.argv[2])], sys.argv[3])
