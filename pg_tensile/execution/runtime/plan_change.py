"""Changes of plan and budget, and the transitions between two iterations that they make necessary.

Changes are prepared in the thread that requests them, and applied between two iterations. The slow work is done when a
change is requested, in any thread, while iterations continue: compiling the plan's program, making the plans of the
graphs that follow it, compiling the first iteration from the state that the current iteration ends in, and taking host
memory. Taking over only installs the results. It compiles after all if the state is another one by then (a failure, a
turn of another graph), or if the first execution has corrected the trace.

Tensors are given by key.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from pg_tensile.errors import DeviceError
from pg_tensile.execution.runtime.host_memory import HostMemory, Reserved
from pg_tensile.execution.runtime.loaded_graph import Compiled, Graph
from pg_tensile.execution.runtime.program import Program
from pg_tensile.execution.runtime.recovery import Recovery
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.execution.runtime.state import State
from pg_tensile.execution.runtime.swapper import Swapper
from pg_tensile.planning.memory_flow.groups import Group
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.following import following_plan
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Int64s


class Change(NamedTuple):
    """A prepared change, taken over as a whole. `budget_bytes` None means that the budget does not change."""

    compiled: dict[Graph, Compiled]
    memory: Reserved
    budget_bytes: int | None


class Changes:
    """Changes of one executor with these graphs. At most one is pending: a later change includes the earlier one."""

    def __init__(self, graphs: Sequence[Graph], host: HostMemory, registry: Registry, state: State) -> None:
        self.asked: Change | None = None
        self._graphs = graphs
        self._host = host
        self._registry = registry
        self._state = state
        self._replaced: list[Compiled] = []  # freeing a large plan takes milliseconds, left to the next `ask`
        self._asking = threading.Lock()  # held while compiling: one thread at a time
        self._handing = threading.Lock()  # guards `asked`; never held for long

    # ---- any thread ----

    def ask(
        self, graph: Graph, plan: Plan, budget_bytes: int | None, current: Graph, groups: Sequence[Group] = ()
    ) -> None:
        """Prepare a change; `current` is the graph of the iteration in progress, or of the last one.

        Raises InvalidPlanError, and DeviceError if host memory does not suffice; nothing has changed then."""
        with self._asking:
            self._replaced.clear()
            earlier = self.asked
            latest = {other: other.compiled for other in self._graphs} | (earlier.compiled if earlier else {})
            changed = {graph: graph.compile(plan, groups=groups)}
            if graph is self._graphs[0]:
                followers = [other for other, compiled in latest.items() if compiled.follows]
                changed |= {
                    other: other.compile(follow(other, changed[graph].program.sequence), True) for other in followers
                }
            for changing, compiled in changed.items():
                compiled.program.sequence.footprint  # noqa: B018 - kept there; computed here, not between iterations
                for resident in self._states_before(changing, changed, current):
                    changing.prepare(compiled, resident)
            programs = [compiled.program for compiled in (latest | changed).values()]
            memory = self._host.reserve(programs, earlier.memory if earlier else None)
            if earlier is not None:
                changed = {**earlier.compiled, **changed}
                budget_bytes = earlier.budget_bytes if budget_bytes is None else budget_bytes
            with self._handing:
                self.asked = Change(changed, memory, budget_bytes)

    def _states_before(
        self, graph: Graph, changed: Mapping[Graph, Compiled], current: Graph
    ) -> Iterator[frozenset[int]]:
        """Yield the possible sets of resident persistent tensors before the graph's first iteration under the new plan:
        after the current iteration, or after one of another graph that changes with it."""
        unused = frozenset(self._registry.resident).difference(current.numbers)
        resident = unused | current.program.device
        yield resident
        for other, compiled in changed.items():
            if other is not graph:
                yield resident.difference(other.numbers) | compiled.program.device

    @contextlib.contextmanager
    def none_asked(self) -> Iterator[None]:
        """Make requests of other threads wait until the end of the `with` block."""
        with self._asking:
            yield

    def drop(self, change: Change | None = None) -> None:
        """Drop the pending change, if it is `change`; None drops any."""
        with self._handing:
            if change is None or self.asked is change:
                self.asked = None

    # ---- the thread that executes, between two iterations ----

    def activate(self, graph: Graph, plan: Plan, follows: bool = False, groups: Sequence[Group] = ()) -> None:
        """Compile a plan and take its host memory. Raises InvalidPlanError or DeviceError; the old plan then stays."""
        compiled = graph.compile(plan, follows, groups)
        self._host.provide([compiled.program, *(other.program for other in self._graphs if other is not graph)])
        graph.compiled = compiled

    def take_over(self) -> None:
        """Apply the pending change, if any. After an interrupt, the next call continues.

        Raises DeviceError if host memory does not suffice after all; the change is dropped then."""
        change = self.asked
        if change is None:
            return
        self._state.settled_for = None  # until the transition is done
        changed, memory = dict(change.compiled), change.memory
        outdated = [graph for graph, compiled in changed.items() if compiled.captured is not graph.captured]
        try:
            changed |= {graph: graph.compile_again(changed[graph]) for graph in outdated}
            programs = [changed.get(graph, graph.compiled).program for graph in self._graphs]
            if outdated:
                memory = self._host.reserve(programs, memory)
            self._host.provide(programs, memory)
        except DeviceError:
            self.drop(change)
            raise
        for graph, compiled in changed.items():
            self._replaced.append(graph.compiled)
            graph.compiled = compiled
        if change.budget_bytes is not None:
            self._registry.change_budget(change.budget_bytes)
        self.drop(change)


class Transitions:
    """Moves of one executor between two iterations: into the state that the next one starts from, and to make room."""

    def __init__(
        self, swapper: Swapper, registry: Registry, host: HostMemory, state: State, recovery: Recovery
    ) -> None:
        self._swapper = swapper
        self._registry = registry
        self._host = host
        self._state = state
        self._recovery = recovery
        self._fits: tuple[Program, Int64s, int] | None = None  # last found to fit; the int is the budget

    def next_program(self, graph: Graph) -> Program:
        """Approach the boundary state of the graph's plan, and return the program of its next iteration: a transition
        unless it is the steady one."""
        steady = graph.program
        if self._state.settled_for is graph:
            return steady
        self._state.settled_for = None
        with self._recovery.guard(graph):
            self._approach(steady)
        resident = steady.device.intersection(self._registry.resident)
        if len(resident) == len(steady.device):  # additional host copies do no harm
            return steady
        return graph.compile_from(resident)

    def _approach(self, program: Program) -> None:
        """Copy out the tensors that the plan expects on the host between two iterations, and free those that it expects
        off the device; nothing is swapped in."""
        missing = sorted(program.host - self._swapper.copies.keys())
        self._copy_out({tensor: self._host.homes[tensor] for tensor in missing})
        for tensor in sorted(self._registry.resident.keys() & program.away):
            self._swapper.empty(tensor)

    def make_room(self, graph: Graph) -> None:
        """Swap out persistent tensors that the graph does not use, as far as the budget requires it.

        Raises OutOfDeviceMemoryError if that is not enough. Only the steady-state program is checked, because an
        iteration of the plan from another state never takes more memory."""
        registry, program, workspace = self._registry, graph.program, graph.meters.workspace_bytes
        budget, fits = registry.wanted_bytes, self._fits
        if budget is None:
            return
        if fits is not None and fits[0] is program and fits[1] is workspace and fits[2] == budget:
            return
        program.check_budget(budget, workspace)
        unused = {key: size for key, size in registry.resident.items() if key not in graph.numbers}
        excess = sum(unused.values()) + program.device_peak_bytes(workspace) - budget
        if excess > 0:
            with self._recovery.guard(graph):
                self._send_away(unused, excess)
        self._fits = program, workspace, budget

    def _send_away(self, sizes: Mapping[int, int], excess: int) -> None:
        """Swap out tensors (key → bytes) until `excess` bytes are free: first those that need no copy, then the
        largest."""
        copies, going = self._swapper.copies, []
        for tensor in sorted(sizes, key=lambda tensor: (tensor not in copies, -sizes[tensor])):
            if excess <= 0:
                break
            going.append(tensor)
            excess -= sizes[tensor]
        self._copy_out(self._host.block({tensor: sizes[tensor] for tensor in going if tensor not in copies}))
        for tensor in going:
            self._swapper.empty(tensor)

    def _copy_out(self, targets: Mapping[int, torch.Tensor]) -> None:
        for tensor, target in targets.items():
            self._swapper.copy_out(tensor, target)
        for tensor in targets:
            self._swapper.wait_out(tensor)

    def settle(self, graph: Graph, program: Program) -> None:
        """Drop, at the end of an iteration, the empty storages that are not filled again and the host copies that are
        stale or no longer needed."""
        swapper, homes = self._swapper, self._host.homes
        swapper.shells = {key: shell for key, shell in swapper.shells.items() if self._state.knows(key)}
        swapper.copies = {
            key: copy
            for key, copy in swapper.copies.items()
            if (key in program.host or key not in graph.changed) and (key in homes or key in swapper.shells)
        }
        self._state.settled_for = graph


def follow(graph: Graph, sequence: AccessSequence) -> Plan:
    """Return the plan of `graph` that follows the executor's first graph, whose tensors have their numbers as keys;
    `sequence` is the first graph under its plan."""
    counterparts = {persistent.tensor: graph.keys[persistent.tensor] for persistent in graph.captured.persistents}
    return following_plan(sequence, graph.captured.trace, counterparts)
