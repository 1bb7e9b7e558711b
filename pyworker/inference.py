"""The supervisor of the predictor: one child for all sessions, which talk to it directly over its Unix socket.

It starts the predictor, hands it model versions from the catalogue when it asks for them (LOAD), and starts it again,
after a growing pause, when it dies. Each version is read in one transaction: a version never changes, it can only be
deleted. The socket's file goes when the predictor goes.

Models take memory of the device that they are kept on, so the ledger is asked before one is loaded: for the bytes of
its weights, or for the memory budget that it is executed within. Where there is no room, other models go, the least
recently used first; where that is not enough, jobs are planned into less memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

from pyworker.supervisor import Child, ChildDied, Failure, Server, Stopped, cores
from pyworker.wire import Frame, FrameType

SOCKET = Path("pg_tensile/predict.sock")  # in the data directory, every server process's working directory
MODEL_CACHE_VARIABLE = "PG_TENSILE_MODEL_CACHE"  # bytes
MAX_PAUSE = 30.0  # seconds between two attempts to start a predictor
DEVICE = "cpu"  # which the predictor computes on
ROOM_TIMEOUT = 10.0  # seconds that jobs may take to make room for a model
STABLE = 60.0  # seconds after which a death is an accident, not a habit
IDLE = 30.0


async def run(plpy: Any) -> None:
    """The inference process."""
    SOCKET.parent.mkdir(mode=0o700, exist_ok=True)
    await Inference(Server(plpy)).run()


class Inference:
    """Keeps one predictor alive."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._pause = 1.0
        self._kept_bytes = 0  # of the models that the predictor has
        self._coming: deque[int] = deque()  # bytes of those on their way to it

    async def run(self) -> None:
        try:
            await self._server.loop(self._life)
        finally:
            self._remove_socket()

    async def _life(self) -> float:
        """One predictor from start to end; seconds to wait before the next."""
        server = self._server
        threads = server.number("pg_tensile.threads") or cores()
        cache = server.number("pg_tensile.model_cache") << 20
        self._child = Child(server, "predictor", threads=threads, environment={MODEL_CACHE_VARIABLE: str(cache)})
        born = time.monotonic()
        try:
            await self._child.start()
            await self._serve()
        except Stopped:
            pass
        except ChildDied as death:
            self._complain(death.reason, death.traceback)
        except Failure as failure:
            self._complain(failure.message, failure.hint)
        finally:
            await self._child.close()
            self._remove_socket()
            self._kept_bytes = 0
            self._coming.clear()
        self._settle()
        self._show([])
        if time.monotonic() - born > STABLE:
            self._pause = 1.0
            server.log_again()
        pause, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE)
        return pause

    async def _serve(self) -> None:
        wanted: deque[tuple[int, int]] = deque()  # version, memory budget or 0
        while not self._server.stopping:
            frame = await self._child.receive(IDLE)
            if frame is not None:
                self._hear(frame, wanted)
            while wanted:
                await self._load(*wanted.popleft())
                async for frame in self._child.drain():
                    self._hear(frame, wanted)

    def _hear(self, frame: Frame, wanted: deque[tuple[int, int]]) -> None:
        if frame.type == FrameType.LOAD:
            wanted.append((frame.job, int(frame.header.get("memory_budget", 0))))
        elif frame.type == FrameType.PROGRESS:
            self._kept_bytes = int(frame.header["model_bytes"])
            self._coming.popleft()
            self._settle()
            self._show(frame.header["models"])
        else:
            raise Failure("08P01", f"the predictor sent an unexpected {frame.type.name} frame")

    async def _load(self, version: int, memory_budget: int) -> None:
        """Puts a model version in line: MODEL, then its weights; or MODEL with the error."""
        server = self._server
        refuse = partial(self._refuse, version, memory_budget)
        try:
            found = server.rows(
                "SELECT architecture, preprocessing FROM tensile.model_versions"
                " WHERE id = $1 AND weight_bytes IS NOT NULL",
                ["int8"],
                version,
            )
            chunks = self._chunks(version) if found else []
            profile = self._profile() if memory_budget else None
            limit = self._limit() if memory_budget else 0
            server.commit()
        except server.plpy.SPIError as error:
            server.rollback()
            refuse("58000", f"the model cannot be read: {error}", "The server's log may say more.")
            return
        if not chunks:
            refuse("42704", "this version of the model does not exist any more", "Deploy another one.")
            return
        size = memory_budget or sum(len(chunk) for chunk in chunks)
        if memory_budget > limit:
            message = f'a memory_budget of {size:,} bytes is more than the {limit:,} of device "{DEVICE}"'
            refuse("22023", message, "Use a smaller memory_budget, or none; pg_tensile.device_memory is what there is.")
            return
        granted = await self._reserve(size)
        if granted is None:
            self._settle()  # jobs need not make room any more
            what = "memory_budget" if memory_budget else "this model"
            message = f"there is no device memory for the {size:,} bytes of {what}"
            refuse("53200", message, "Raise pg_tensile.device_memory, or wait until jobs have ended.")
            return
        header = {key: json.loads(value) for key, value in found[0].items()}
        header |= {"error": None, "keep_bytes": granted - size - sum(self._coming)}
        header |= {"memory_budget": memory_budget, "profile": profile}
        self._coming.append(size)
        self._child.queue(FrameType.MODEL, version, header=header)
        for seq, chunk in enumerate(chunks):
            state = {"kind": "weights", "seq": seq, "last": seq == len(chunks) - 1, "meta": None}
            self._child.queue(FrameType.STATE, version, header=state, buffers=[chunk])

    async def _reserve(self, size: int) -> int | None:
        """Bytes of the device for another model of that size, and for those that are there already as far as there is
        room. None: jobs need all of it, and do not make room in time."""
        deadline = time.monotonic() + ROOM_TIMEOUT
        coming = sum(self._coming) + size
        while True:
            granted = self._memory(coming, self._kept_bytes + coming)
            if granted is not None or time.monotonic() > deadline:
                return granted
            await self._server.wait(-1, 0.05)

    def _settle(self) -> None:
        """What is not used is given back."""
        used = self._kept_bytes + sum(self._coming)
        self._memory(used, used)

    def _show(self, models: list[dict[str, Any]]) -> None:
        """What the predictor has, for tensile.loaded_models."""
        self._server.rows("DELETE FROM tensile._loaded_models")
        self._server.rows(
            "INSERT INTO tensile._loaded_models (version, memory_budget, device_bytes, planned_bytes, host_bytes)"
            " SELECT version, memory_budget, device_bytes, planned_bytes, host_bytes"
            " FROM pg_catalog.jsonb_populate_recordset(NULL::tensile._loaded_models, $1)",
            ["jsonb"],
            self._server.json(models),
        )
        self._server.commit()

    def _memory(self, least: int, wanted: int) -> int | None:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        granted: int | None = self._server.call(
            "tensile._inference_memory(text,int8,int8,int8)", DEVICE, total, least, wanted
        )
        self._server.commit()
        return granted

    def _chunks(self, version: int) -> list[bytes]:
        """The chunks one by one: a result set would hold all of them a second time."""
        read = "SELECT data FROM tensile.model_weights WHERE version = $1 AND seq = $2"
        chunks: list[bytes] = []
        while found := self._server.rows(read, ["int8", "int4"], version, len(chunks)):
            chunks.append(found[0]["data"])
        return chunks

    def _profile(self) -> Any:
        """The device's, if a job has measured it; a dictionary."""
        found = self._server.rows("SELECT profile FROM tensile.device_profiles WHERE device = $1", ["text"], DEVICE)
        return json.loads(found[0]["profile"]) if found else None

    def _limit(self) -> int:
        """What jobs and predictions may use of the device together."""
        used = self._kept_bytes + sum(self._coming)
        self._memory(used, used)  # enters the device if nobody has used it yet
        budget = "SELECT budget_bytes FROM tensile._devices() WHERE name = $1"
        return int(self._server.rows(budget, ["text"], DEVICE)[0]["budget_bytes"])

    def _refuse(self, version: int, memory_budget: int, sqlstate: str, message: str, hint: str) -> None:
        error = {"sqlstate": sqlstate, "message": message, "hint": hint}
        header = {"architecture": None, "preprocessing": None, "error": error, "memory_budget": memory_budget}
        self._child.queue(FrameType.MODEL, version, header=header)

    def _complain(self, reason: str, more: str | None) -> None:
        lines = (more or "").splitlines()
        self._server.log_once(reason + (f" ({lines[-1]})" if lines else ""))

    @staticmethod
    def _remove_socket() -> None:
        with contextlib.suppress(FileNotFoundError):
            SOCKET.unlink()
