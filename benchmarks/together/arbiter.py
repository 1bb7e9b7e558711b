"""Grants of memory that flows between processes, as the workers of the server make them together."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType

from pg_tensile.execution.runtime.memory_flow import REPLY, REQUEST, REST, WHOLE
from pg_tensile.planning.memory_flow.grants import Grants
from pg_tensile.planning.memory_flow.groups import Group


class Arbiter:
    """A thread that grants groups to processes at the other ends of `sockets`, by job, until the `with` block ends.

    `groups`: of each job. `most_bytes`: what all jobs have held together, at most."""

    def __init__(self, budget_bytes: int, sockets: Mapping[int, socket.socket], groups: Mapping[int, Sequence[Group]]):
        self.most_bytes = 0
        self._grants = Grants(budget_bytes)
        self._sockets = sockets
        self._tables = {
            job: {False: own, True: [Group(0, own[-1].last, max(g.most_bytes for g in own), own[-1].rest_bytes)]}
            for job, own in groups.items()
        }
        self._whole: dict[int, bool] = {}  # whether a job that has joined is in a whole iteration, or was last
        self._waiting: dict[int, tuple[int, int]] = {}  # generation and request, by job, first come first
        self._ending, self._end = socket.socketpair()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Arbiter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end.close()
        self._thread.join()
        self._ending.close()

    def _run(self) -> None:
        selector = selectors.DefaultSelector()
        for job, connection in self._sockets.items():
            selector.register(connection, selectors.EVENT_READ, job)
        selector.register(self._ending, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    selector.close()
                    return
                message = self._sockets[key.data].recv(REQUEST.size)
                if message:
                    self._receive(key.data, *REQUEST.unpack(message)[:2])
                else:
                    selector.unregister(key.fileobj)
                    self._forget(key.data)
            for job in list(self._waiting):
                self._try(job)

    def _receive(self, job: int, generation: int, request: int) -> None:
        if request > 0 or request == REST:
            self._grants.end(job)
        if request != REST:
            self._waiting[job] = generation, request

    def _forget(self, job: int) -> None:
        self._waiting.pop(job, None)
        if self._whole.pop(job, None) is not None:
            self._grants.leave(job)

    def _try(self, job: int) -> None:
        """Grant what a job waits for, if that is possible now."""
        generation, request = self._waiting[job]
        if request <= 0:
            whole = request == WHOLE
            table = self._tables[job][whole]
            if job not in self._whole and not self._grants.join(job, table):
                return
            if self._whole.get(job, whole) != whole:
                self._grants.change(job, table)
            self._whole[job] = whole
        if self._grants.begin(job):
            del self._waiting[job]
            self.most_bytes = max(self.most_bytes, self._grants.held_bytes())
            self._sockets[job].send(REPLY.pack(generation))
