"""Memory that flows: an executor asks before each group of an iteration (docs/memory-flow.md).

What is asked of whom is a `Requests`; `GroupSocket` asks the process at the other end of a socket, which grants groups
as `planning/memory_flow/grants.py` does. An iteration that is not cut into groups (another graph, the first iteration
under a plan) is asked for as a whole.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from pg_tensile.execution.runtime.program import Program
from pg_tensile.execution.runtime.registry import Registry

# Requests besides the number of a group
WHOLE = -1  # an iteration, or other work between two of them, that takes up to the granted bytes
REST = -2  # it has ended, or the last group has
CONSTANT = -3  # from now on the memory of the plan is a constant grant

REQUEST = struct.Struct("<qii")  # generation of the plan, request, 0
REPLY = struct.Struct("<q")  # generation
SIGN_OF_LIFE_S = 1.0


class Requests(Protocol):
    """Requests for the memory of groups."""

    flows: bool  # the last granted request was not CONSTANT

    def ask(self, generation: int, request: int) -> None:
        """Request a group, WHOLE or CONSTANT, and wait until it is granted; ends the running group, if any."""
        ...

    def rest(self, generation: int) -> None:
        """End the running group or whole iteration, so that the job is between two iterations."""
        ...


class GroupSocket:
    """`Requests` to the process at the other end of a SOCK_SEQPACKET socket.

    `alive` is called about once a second while a request waits. Raises EOFError when the other end is closed."""

    def __init__(self, connection: socket.socket, alive: Callable[[], None] = lambda: None) -> None:
        self.flows = False
        self._connection = connection
        self._alive = alive
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)

    def ask(self, generation: int, request: int) -> None:
        self._send(generation, request)
        while not self._poll.poll(SIGN_OF_LIFE_S * 1000):
            self._alive()
        if not self._connection.recv(REPLY.size):
            raise EOFError("the supervisor closed the connection")
        self.flows = request != CONSTANT

    def rest(self, generation: int) -> None:
        self._send(generation, REST)

    def _send(self, generation: int, request: int) -> None:
        try:
            self._connection.send(REQUEST.pack(generation, request, 0))
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError("the supervisor closed the connection") from None


@contextlib.contextmanager
def claimed(requests: Requests | None, generation: int, flows: bool) -> Iterator[None]:
    """Hold the memory of a plan for work outside of an executor's iterations.

    `flows`: whether the plan has groups. Without, its memory is a constant grant, which only a job that has flowed so
    far asks for."""
    if requests is None or not (flows or requests.flows):
        yield
        return
    requests.ask(generation, WHOLE if flows else CONSTANT)
    try:
        yield
    finally:
        if flows:
            requests.rest(generation)


class MemoryFlow:
    """Requests of one executor, as its plans have groups or not; without `requests` there are none.

    `waited_us`: how long the last iteration has waited for memory."""

    def __init__(self, registry: Registry, requests: Requests | None) -> None:
        self.waited_us = 0.0
        self._registry = registry
        self._requests = requests
        self._program: Program | None = None  # that runs in groups

    @contextlib.contextmanager
    def iteration(self, first: Program, runs_in_groups: bool) -> Iterator[None]:
        """Enter an iteration under the plan that `first` executes, the steady program of the executor's first graph.

        `runs_in_groups`: it is that program which runs, and calls `begin`."""
        requests, generation = self._requests, first.sequence.plan.generation
        self.waited_us = 0.0
        if requests is None or not (first.groups or requests.flows):
            yield
            return
        if not first.groups:
            self._ask(requests, generation, CONSTANT)
            yield
            return
        self._program = first if runs_in_groups else None
        try:
            self._ask(requests, generation, 0 if runs_in_groups else WHOLE)
            yield
        finally:
            self._program = None
            self._registry.release_limit()
            requests.rest(generation)

    def begin(self, number: int) -> None:
        """Begin a group; from here on the registry is held to the most that the group takes."""
        program = self._program
        if program is None:
            return
        if number:
            assert self._requests is not None
            self._ask(self._requests, program.sequence.plan.generation, number)
        self._registry.limit = program.groups[number].most_bytes

    def _ask(self, requests: Requests, generation: int, request: int) -> None:
        started = time.perf_counter()
        requests.ask(generation, request)
        self.waited_us += (time.perf_counter() - started) * 1e6
