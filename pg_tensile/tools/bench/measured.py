"""Measurement of eager PyTorch, vanilla, every policy and every peer on the host device or an accelerator.

First vanilla runs alone: the policies plan with its operators' latencies, pooled over twins, and its workspaces; on the
host its step time sets the link. The rounds follow, in each of which every contender takes a turn, from the same
weights and with the same data; every other round reverses the order, because a machine's speed drifts during a
benchmark. For the same reason every program's operators are measured again in every round, and the simulator's
prediction uses these latencies. Memory and conditions are recorded around the steps that count (conditions.py), and
no contender has the memory that another one left cached. The allocator's own record of memory comes last, because it
slows a step down. (`--light` uses the first round's latencies, omits the allocator's record, and skips later rounds of
a contender that is slower than CLOSE × vanilla.)

The rows are given to `keep` before the first round and after each one, so that a run that is stopped leaves them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from pg_tensile.errors import DeviceError, OptionError, OutOfDeviceMemoryError
from pg_tensile.execution.backends import outside_bytes
from pg_tensile.execution.capture import Captured
from pg_tensile.execution.device_choice import choose_device
from pg_tensile.execution.measuring import device as devices
from pg_tensile.execution.runtime.accelerator import make_deterministic
from pg_tensile.execution.runtime.allocator_limit import allocator_caution
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.measure import allocator_peak
from pg_tensile.execution.runtime.open_device import open_device
from pg_tensile.planning.device.profile import GB, RTX_A6000
from pg_tensile.planning.device_types import ACCELERATORS
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import NO_EVENTS
from pg_tensile.tools.bench.compression import Sparsity, measure_sparsity
from pg_tensile.tools.bench.conditions import TurnWatch, release_cached_memory
from pg_tensile.tools.bench.contender import NO_ROUND, Contender, measured_row
from pg_tensile.tools.bench.contenders import EagerStepper, PlanStepper, Stepper, Turn, difference, take_turn
from pg_tensile.tools.bench.options import VANILLA, BenchOptions, PolicyChoice
from pg_tensile.tools.bench.peers import gradient_difference, measure_peaks, start_peer
from pg_tensile.tools.bench.planned import PlannedPolicy, distance, empty_row, plan_policies, planned_row
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.report import Report, links, message_of, title_of
from pg_tensile.tools.bench.row import Row
from pg_tensile.tools.bench.scatter import scatter_notes
from pg_tensile.tools.bench.workload import build_model, prepare, seed_everything

CODEC_SECONDS = 20.0  # for measuring the codecs
CALIBRATION_STEPS = 3  # of vanilla, timed before the rounds
CLOSE = 1.15  # times vanilla's step: `--light` skips later rounds of slower contenders
OBSERVED_STEPS = 3  # whose operators are timed; one step is too noisy for operators without twins


def rounds_within(rounds: int, limit_s: float | None, clock: Callable[[], float]) -> Iterator[int]:
    """Yield the numbers of the rounds, each when it is to begin.

    After the first, one begins only if it would end within `limit_s` of the first one's beginning although it takes as
    long as the longest before it. None means no limit.
    """
    began_s, longest_s = clock(), 0.0
    for number in range(rounds):
        started_s = clock()
        if number and limit_s is not None and started_s + longest_s - began_s > limit_s:
            return
        yield number
        longest_s = max(longest_s, clock() - started_s)


def chosen_device(options: BenchOptions) -> torch.device:
    try:
        return choose_device("cpu" if options.device.kind == "host" else str(options.device))
    except DeviceError as error:
        hint = "Install a PyTorch built for CUDA and check nvidia-smi, or use --device host."
        raise OptionError(f"--device: {error.message}", hint) from None


class MeasuredBench:
    """One benchmark on one device.

    `keep` receives the rows as they are before the first round and after each one; `clock` tells seconds for --seconds.
    """

    def __init__(
        self,
        options: BenchOptions,
        progress: Progress,
        keep: Callable[[Sequence[Row]], None] = lambda rows: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if options.device.kind in ACCELERATORS and options.link_gbps is not None:
            raise OptionError("--link cannot be chosen for an accelerator", "Its link is measured; leave --link out.")
        self.options = options
        self.progress = progress
        self.keep = keep
        self.clock = clock
        self.torch_device = chosen_device(options)
        self.strict = True  # until an operator turns out to have no deterministic algorithm
        model = build_model(options)
        if self.torch_device.type != "cpu":
            make_deterministic(self.torch_device.type, self.strict)  # before anything is captured or executed
        progress.say("measuring the device")
        self.profile = devices.measure(self.torch_device)
        progress.say("capturing the training step")
        self.workload = prepare(options, model, self.torch_device, self.profile.allocator)
        self.free = self.open_device(None)
        self.notes: list[str] = []
        if self.torch_device.type != "cpu" and (caution := allocator_caution(self.profile.allocator)):
            self.notes.append(caution)
        self.distances: dict[PolicyChoice, Row] = {}  # with the bounds, which take seconds and rounds do not change

    def open_device(self, budget_bytes: int | None) -> Device:
        return open_device(self.torch_device, self.profile, budget_bytes, self.strict)

    def run(self) -> Report:
        try:
            vanilla_ms = self.calibrate()
        except RuntimeError as error:
            if "deterministic implementation" not in str(error):
                raise
            self.allow_other_bits(error)
            vanilla_ms = self.calibrate()
        sparsity = self.sparsity()
        self.set_link(vanilla_ms)
        self.free = self.open_device(None)  # with the link
        self.policies = plan_policies(self.workload, self.profile, self.progress, sparsity)
        self.line_up()
        self.take_rounds()
        if not self.options.light:
            self.witness()
        rows = self.rows()
        return Report(rows, title_of(self.options), [*self.notes, *self.findings(), *scatter_notes(rows)])

    # ---- before the rounds ----

    def calibrate(self) -> float | None:
        """Measure the latencies and workspaces of the captured graphs; return the milliseconds of a vanilla step.

        If the memory is not enough for vanilla, the latencies are the roofline's and the result is None.
        """
        self.check_memory()
        vanilla, ms = self.measured(self.workload.vanilla)
        early = vanilla
        if self.workload.early is not self.workload.vanilla:
            early, _ = self.measured(self.workload.early)
        self.workload = replace(self.workload, vanilla=vanilla, early=early)
        return ms

    def allow_other_bits(self, error: RuntimeError) -> None:
        """Go on without deterministic algorithms where an operator has none, as jobs do."""
        self.notes.append(f"results may differ in their last bits: {str(error).partition(', but')[0]}")
        self.strict = False
        make_deterministic(self.torch_device.type, self.strict)
        self.free = self.open_device(None)

    def sparsity(self) -> Sparsity | None:
        """Measure sparsity and codecs over the machine's own link, which is free; None without compression."""
        if self.options.compression == "none":
            return None
        self.progress.say("measuring sparsity and codecs")
        sparsity = measure_sparsity(self.workload, self.workload.vanilla, self.free, CODEC_SECONDS)
        self.notes.append(f"codecs: their times are predicted with a relative absolute error of {sparsity.error:.1%}")
        return sparsity

    def check_memory(self) -> None:
        needed = footprint(self.workload.vanilla.trace).peak_bytes
        if self.options.device.kind == "host" and needed > self.profile.memory_bytes:
            hint = "Choose a smaller --batch, or --device sim:RTX_A6000, which executes nothing."
            detail = f"needed {needed:,} bytes, available {self.profile.memory_bytes:,}"
            raise DeviceError("the step needs more memory than this machine has", hint, detail)

    def measured(self, captured: Captured) -> tuple[Captured, float | None]:
        self.progress.say("measuring the operators")
        try:
            stepper = PlanStepper(self.workload, captured, self.free, NO_EVENTS)
            try:
                batches = self.workload.batches(1) * (CALIBRATION_STEPS + 1)
                times = take_turn(stepper, batches, 1, self.options.seed).without_state()
                (batch,) = self.workload.batches(1)
                for number in range(OBSERVED_STEPS):
                    stepper.executor.measure(again=number > 0)
                    stepper.step(batch)
                    if number == 0:
                        stepper.step(batch)  # for the workspaces
                return replace(captured, trace=stepper.executor.trace), statistics.median(times.step_ms)
            finally:
                stepper.close()
        except OutOfDeviceMemoryError:
            trace = captured.trace
            return replace(captured, trace=trace.with_latencies(roofline.estimate(trace, self.profile))), None

    def set_link(self, vanilla_ms: float | None) -> None:
        """Set the host's link to the requested one, or to an RTX A6000's balance between computing and moving.

        An accelerator keeps its measured link. Raises DeviceError if there is neither a requested link nor a step time.
        """
        if self.options.device.kind in ACCELERATORS:
            self.notes.append(f"link: {links(self.profile)}, measured")
        elif self.options.link_gbps is not None:
            self.profile = self.profile.with_link(self.options.link_gbps * GB)
            self.notes.append(f"link: {links(self.profile)}, as asked for")
        elif vanilla_ms is not None:
            roof_us = roofline.total_us(self.workload.vanilla.trace, RTX_A6000)
            self.profile = self.profile.scaled_link(roof_us, vanilla_ms * 1e3)
            balance = f"an RTX A6000's balance (25 GB/s × {roof_us / 1e3:.3g} / {vanilla_ms:.4g} ms)"
            self.notes.append(f"link: {links(self.profile)}, {balance}")
        else:
            raise DeviceError(
                "this machine has not enough memory for vanilla", "Choose a smaller --batch, or a --link."
            )
        self.progress.say(self.notes[-1])

    def line_up(self) -> None:
        """Create the contenders: eager PyTorch, vanilla, and every policy and peer without an error."""
        workload, free = self.workload, self.free
        self.eager = Contender("eager", lambda: EagerStepper(workload, self.torch_device))
        self.vanilla = Contender(VANILLA, lambda: PlanStepper(workload, workload.vanilla, free, NO_EVENTS))
        self.contenders = [self.eager, self.vanilla]
        planned = [policy for policy in self.policies if policy.error is None]
        self.devices: dict[int | None, Device] = {None: self.free}
        for budget in {policy.budget_bytes for policy in planned} - {None}:
            self.devices[budget] = self.open_device(budget)
        self.of_policy = {policy.choice: self.contender_of(policy) for policy in planned}
        self.contenders += [contender for contender in self.of_policy.values() if contender is not self.vanilla]

    def contender_of(self, policy: PlannedPolicy) -> Contender:
        choice, budget = policy.choice, policy.budget_bytes
        if choice.is_peer:
            return Contender(str(choice), lambda: start_peer(choice, self.workload, self.free), is_peer=True)
        fits = budget is None or footprint(policy.captured.trace, policy.plan).device_peak_bytes <= budget
        if choice.name == VANILLA and fits:
            return self.vanilla
        device = self.devices[budget]
        graphs = choice.device_graphs
        return Contender(str(choice), lambda: PlanStepper(self.workload, policy.captured, device, policy.plan, graphs))

    # ---- the rounds ----

    def take_rounds(self) -> None:
        asked, taken = self.options.rounds, 0
        self.keep(self.rows())
        for number in rounds_within(asked, self.options.seconds, self.clock):
            self.progress.say(f"round {number + 1} of {asked}")
            for contender in reversed(self.contenders) if number % 2 else self.contenders:
                self.round(contender)
            taken += 1
            self.keep(self.rows())
        if taken < asked:
            self.notes.append(f"--seconds {self.options.seconds:g}: enough for {taken} of {asked} rounds")

    def round(self, contender: Contender) -> None:
        """Let a contender take one turn; if it fails, record its error and exclude it."""
        if contender.error is not None or self.is_settled(contender):
            return
        options = self.options
        batches = self.workload.batches(options.warmup + options.iterations)
        try:
            release_cached_memory(self.torch_device)
            watch = TurnWatch(self.torch_device)
            stepper = contender.start()
            try:
                gradients = self.wants_gradients(contender)
                turn = take_turn(stepper, batches, options.warmup, options.seed, gradients, watch=watch)
                contender.context_bytes = outside_bytes(self.torch_device)
                self.compare(contender, turn)
                del turn  # its copy of the state would take the memory that the steps so far have used
                if isinstance(stepper, PlanStepper):
                    self.look_closer(contender, stepper)
                elif contender.is_peer and contender.peaks is None:
                    assert isinstance(stepper, EagerStepper)
                    contender.peaks = measure_peaks(stepper, batches[0], self.free)
            finally:
                stepper.close()
        except Exception as error:
            contender.error = message_of(error)
            contender.turns.clear()

    def is_settled(self, contender: Contender) -> bool:
        """Return whether further rounds of this contender can be skipped (`--light`)."""
        vanilla_ms, ms = self.vanilla.step_ms(), contender.step_ms()
        return bool(self.options.light and ms and vanilla_ms and ms > CLOSE * vanilla_ms)

    def wants_gradients(self, contender: Contender) -> bool:
        """Return whether to keep the gradients: in the first round of peers, and of eager PyTorch, their reference."""
        peers = any(entrant.is_peer for entrant in self.contenders)
        return peers and not contender.turns and (contender.is_peer or contender is self.eager)

    def look_closer(self, contender: Contender, stepper: PlanStepper) -> None:
        """Execute one more step, which measures the operators' latencies, and the first time the device's memory.

        Nothing may occupy memory that the timed steps had: a copy of the weights and the optimizer's state made the
        host fault fresh pages in, which takes as long as half of a step if the weights are large.
        """
        if self.options.light and contender.latency_us:
            return
        executor, (batch,) = stepper.executor, self.workload.batches(1)
        executor.recording = contender.record is None
        executor.measure()
        stepper.step(batch)
        contender.latency_us.append(executor.measurement().latency_us)
        if executor.recording:
            assert executor.record is not None
            contender.record = executor.record
            contender.stall_us = executor.record.stall_us if self.torch_device.type != "cpu" else None

    def compare(self, contender: Contender, turn: Turn) -> None:
        """Compare a turn with eager PyTorch's first one, and keep it; only that first one keeps its state."""
        if contender is self.eager and not self.eager.turns:
            self.eager.turns.append(turn)
            return
        if self.eager.turns:
            contender.difference = contender.difference or difference(self.eager.turns[0], turn)
            if turn.gradients:
                contender.gradient_difference = gradient_difference(turn.gradients, self.eager.turns[0].gradients)
        contender.turns.append(turn.without_state())

    def witness(self) -> None:
        """Record the allocator's peak over a step for each contender."""
        for contender in self.contenders:
            if contender.error is None:
                self.progress.say(f"watching the allocator: {contender.name}")
                try:
                    contender.allocator_peak_bytes = self.allocator_peak(contender)
                except Exception as error:
                    self.notes.append(f"the allocator could not be watched with {contender.name}: {message_of(error)}")

    def allocator_peak(self, contender: Contender) -> int:
        (batch,) = self.workload.batches(1)
        started: list[Stepper] = []

        def ready() -> Callable[[], object]:
            stepper = contender.start()
            started.append(stepper)
            seed_everything(self.options.seed)
            return lambda: stepper.step(batch)

        try:
            return allocator_peak(ready, self.torch_device)
        finally:
            for stepper in started:
                stepper.close()

    # ---- the result ----

    def findings(self) -> list[str]:
        """Return lines about contenders that failed or differ from eager PyTorch."""
        lines = []
        for contender in self.contenders:
            if contender.error is not None and contender not in self.of_policy.values():
                lines.append(f"{contender.name} failed: {contender.error}")
            if contender.difference is not None:
                lines.append(f"{contender.name} differs from eager PyTorch in: {contender.difference}")
                if contender.gradient_difference is not None:
                    relative = f"differ by {contender.gradient_difference:.2g} of the largest element"
                    finding = relative if contender.gradient_difference else "are equal"
                    lines[-1] += f"; the gradients of its first step {finding}"
        return lines

    def rows(self) -> list[Row]:
        """Return the rows as they are after the turns taken so far."""
        return [self.row(policy) for policy in self.policies]

    def row(self, policy: PlannedPolicy) -> Row:
        empty = empty_row(self.options, policy.choice, self.torch_device)
        row = planned_row(empty, self.workload, self.timed(policy), self.profile).with_values(
            vanilla_step_ms_median=self.vanilla.step_ms(),
            vanilla_first_step_ms=self.vanilla.first_step_ms(),
            eager_step_ms_median=self.eager.step_ms(),
            eager_peak_bytes=self.eager.allocator_peak_bytes,
        )
        contender = self.of_policy.get(policy.choice)
        if contender is None:
            return row
        if contender.error or not contender.turns:
            return row.with_values(error=contender.error or NO_ROUND)
        is_identical = contender.difference is None if self.eager.turns else None
        row = measured_row(row, contender, self.vanilla.step_ms(), is_identical)
        bounded = self.distances.get(policy.choice)
        if bounded is None or bounded.device_peak_bytes != row.device_peak_bytes:
            bounded = self.distances[policy.choice] = distance(row, self.workload, policy, self.profile)
        return row.with_values(least_eor=bounded.least_eor, timeline=bounded.timeline)

    def timed(self, policy: PlannedPolicy) -> PlannedPolicy:
        """Return the policy with the median latencies of its own rounds, for the simulator.

        They are the policy's own because operators are slower on tensors just swapped in, which no cache holds.
        """
        contender = self.of_policy.get(policy.choice)
        if contender is None or not contender.latency_us:
            return policy
        trace = policy.captured.trace.with_latencies(np.median(contender.latency_us, axis=0))
        return replace(policy, captured=replace(policy.captured, trace=trace))
