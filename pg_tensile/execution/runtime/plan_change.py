"""Changes of plan and budget: prepared in the thread that requests them, applied between two iterations.

The slow work is done when a change is requested, in any thread, while iterations go on: compiling the plan's program,
making the plans of the graphs that follow it, compiling the first iteration from the state that the current iteration
ends in, and taking host memory. Taking over only installs the results. It compiles after all if the state is another
one by then (a failure, a turn of another graph), or if the first execution has corrected the trace.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pg_tensile.errors import DeviceError
from pg_tensile.execution.runtime.host_memory import HostMemory, Reserved
from pg_tensile.execution.runtime.loaded_graph import Compiled, Graph
from pg_tensile.execution.runtime.registry import Registry
from pg_tensile.planning.plan.execution import AccessSequence
from pg_tensile.planning.plan.following import following_plan
from pg_tensile.planning.plan.plan import Plan


class Change(NamedTuple):
    """A prepared change, taken over as a whole. `budget_bytes` None means that the budget does not change."""

    compiled: dict[Graph, Compiled]
    memory: Reserved
    budget_bytes: int | None


class Changes:
    """Changes of one executor with these graphs. At most one is pending: a later change includes the earlier one."""

    def __init__(self, graphs: Sequence[Graph], host: HostMemory, registry: Registry) -> None:
        self.asked: Change | None = None
        self._graphs = graphs
        self._host = host
        self._registry = registry
        self._past: list[Compiled] = []  # replaced; freeing a large plan takes milliseconds, left to the next `ask`
        self._asking = threading.Lock()  # held while compiling: one thread at a time
        self._handing = threading.Lock()  # guards `asked`; never held for long

    # ---- any thread ----

    def ask(self, graph: Graph, plan: Plan, budget_bytes: int | None, current: Graph) -> None:
        """Prepare a change; `current` is the graph of the iteration in progress, or of the last one.

        Raises InvalidPlanError, and DeviceError if host memory does not suffice; nothing has changed then."""
        with self._asking:
            self._past.clear()
            earlier = self.asked
            latest = {each: each.compiled for each in self._graphs} | (earlier.compiled if earlier else {})
            made = {graph: graph.compile(plan)}
            if graph is self._graphs[0]:
                followers = [each for each, compiled in latest.items() if compiled.follows]
                made |= {each: each.compile(follow(each, made[graph].program.sequence), True) for each in followers}
            for each, compiled in made.items():
                compiled.program.look_up()
                for resident in self._states_before(each, made, current):
                    each.prepare(compiled, resident)
            programs = [each.program for each in (latest | made).values()]
            memory = self._host.reserve(programs, earlier.memory if earlier else None)
            if earlier is not None:
                made = {**earlier.compiled, **made}
                budget_bytes = earlier.budget_bytes if budget_bytes is None else budget_bytes
            with self._handing:
                self.asked = Change(made, memory, budget_bytes)

    def _states_before(self, graph: Graph, made: Mapping[Graph, Compiled], current: Graph) -> Iterator[frozenset[int]]:
        """Yield the possible sets of resident persistent tensors (keys) before the graph's first iteration under the
        new plan: after the current iteration, or after one of another graph that changes with it."""
        others = frozenset(self._registry.resident).difference(current.numbers)
        there = others | current.program.device
        yield there
        for other, compiled in made.items():
            if other is not graph:
                yield there.difference(other.numbers) | compiled.program.device

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

    def take_over(self) -> None:
        """Apply the pending change, if any. After an interrupt, the next call continues.

        Raises DeviceError if host memory does not suffice after all; the change is dropped then."""
        change = self.asked
        if change is None:
            return
        made, memory = dict(change.compiled), change.memory
        outdated = [each for each, one in made.items() if one.captured is not each.captured]
        try:
            made |= {each: each.compile(made[each].plan, made[each].follows) for each in outdated}
            programs = [made.get(each, each.compiled).program for each in self._graphs]
            if outdated:
                memory = self._host.reserve(programs, memory)
            self._host.provide(programs, memory)
        except DeviceError:
            self.drop(change)
            raise
        for graph, compiled in made.items():
            self._past.append(graph.compiled)
            graph.compiled = compiled
        if change.budget_bytes is not None:
            self._registry.change_budget(change.budget_bytes)
        self.drop(change)


def follow(graph: Graph, sequence: AccessSequence) -> Plan:
    """Return the plan of `graph` that follows the executor's first graph, whose tensors have their numbers as keys;
    `sequence` is the first graph under its plan."""
    counterparts = {each.tensor: graph.keys[each.tensor] for each in graph.captured.persistents}
    return following_plan(sequence, graph.captured.trace, counterparts)
