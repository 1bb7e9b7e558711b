"""The supervisor of the predictor: one child for all sessions, which talk to it directly over its Unix socket.

It starts the predictor, sends it model versions from the catalogue on request (LOAD), and starts it again, after a
growing pause, when it dies. Weights are read and sent chunk by chunk, so that no model is ever whole in a server
process: a version never changes, it can only be deleted, and if that happens in between, the predictor is sent the
error. The socket's file is removed when the predictor ends.

It also runs on a standby, where it writes no table: the list of loaded models is in shared memory, and no row is
counted for drift. Elsewhere it stores the counts that the predictor sends (DRIFT).

A model predicts on the CPU or, within a memory budget, on the device of jobs (pg_tensile.device), which the predictor
resolves on request (DEVICE). Its memory is reserved before it is sent (device_memory.py): the bytes of its weights, or
its memory budget.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from pg_tensile.memory_limit import memory_bytes
from pyworker.supervisors.child_environment import cores
from pyworker.supervisors.child_process import Child
from pyworker.supervisors.device_memory import DeviceMemory
from pyworker.supervisors.failures import ChildDied, Failure, Stopped, failure_of_frame
from pyworker.supervisors.server import Server
from pyworker.wire import Frame, FrameType

SOCKET_VARIABLE = "PG_TENSILE_SOCKET"
MODEL_CACHE_VARIABLE = "PG_TENSILE_MODEL_CACHE"  # bytes
MAX_PAUSE = 30.0  # seconds between two attempts to start a predictor
STABLE = 60.0  # seconds of life after which the next pause is short again
IDLE = 30.0
LACKING_QUERY = "SELECT * FROM tensile_internal._lacking_memory()"
SHOWN = ("version", "memory_budget", "device_bytes", "planned_bytes", "host_bytes")  # order of csrc/state/predictions.h
HOST = "cpu"  # device of models without a memory budget
VERSION_QUERY = (
    "SELECT architecture, preprocessing, reference, weight_bytes FROM tensile_internal.model_versions"
    " WHERE id = $1 AND weight_bytes IS NOT NULL"
)
BASE_QUERY = (
    "SELECT architecture, 'null' AS preprocessing, NULL AS reference, 0 AS weight_bytes FROM tensile_internal.models"
    " WHERE tensile_worker._base_number(id, architecture) = $1"
)
NOT_COMMITTED = ("55000", "this model is registered by an open transaction", "Commit it, then embed texts.")
DELETED = (
    "55000",
    "the version that this transaction sees does not exist any more",
    "Begin another transaction, which sees the deployed one.",
)


async def run(plpy: Any) -> None:
    """Run the inference process."""
    await Inference(Server(plpy)).run()


class Chosen(NamedTuple):
    """Device that pg_tensile.device stands for: its memory and its profile, as a dictionary."""

    memory: DeviceMemory
    profile: dict[str, Any]


class Inference:
    """Keeps one predictor alive."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._socket = Path(server.call("tensile_internal._predictor_socket()"))
        self._pause = 1.0
        self._requested: deque[tuple[int, int]] = deque()  # (version, memory budget or 0) to be loaded
        self._host = DeviceMemory(server, HOST, memory_bytes())
        self._memories = {HOST: self._host}  # by device
        self._chosen: dict[str, Chosen] = {}  # by value of pg_tensile.device
        self._described: dict[str, Any] | None = None  # header of the DEVICE frame that has come
        self._drift_rate = 0.0  # that the predictor knows
        self._lacking: dict[str, tuple[int, int]] = {}  # by device: the decision and the setting that it knows
        self._arriving: dict[tuple[int, int], tuple[DeviceMemory, int]] = {}  # device and bytes, while it is loaded

    async def run(self) -> None:
        await self._server.loop(self._run_predictor)

    async def _run_predictor(self) -> float:
        """Run one predictor from start to end; return the seconds to wait before the next."""
        server = self._server
        threads = server.number("pg_tensile.threads") or cores()
        cache = server.number("pg_tensile.model_cache") << 20
        environment = {MODEL_CACHE_VARIABLE: str(cache), SOCKET_VARIABLE: str(self._socket)}
        self._child = Child(server, "predictor", threads=threads, environment=environment, nice=0)
        born = time.monotonic()
        try:
            await self._child.start()
            await self._serve()
        except Stopped:
            pass
        except ChildDied as death:
            self._log_cause(death.reason, death.traceback)
        except Failure as failure:
            self._log_cause(failure.message, failure.hint)
        finally:
            await self._child.close()
            self._remove_socket()
            self._forget_models()
        for memory in self._memories.values():
            memory.return_unused()
        self._publish_loaded([])
        if time.monotonic() - born > STABLE:
            self._pause = 1.0
            server.log_again()
        pause, self._pause = self._pause, min(2 * self._pause, MAX_PAUSE)
        return pause

    async def _serve(self) -> None:
        self._drift_rate = 0.0
        while not self._server.stopping:
            self._send_drift_rate()
            self._send_lacking()
            frame = await self._child.receive(IDLE)
            if frame is not None:
                self._handle(frame)
            while self._requested:
                await self._load(*self._requested.popleft())
                await self._drain()

    async def _drain(self) -> None:
        async for frame in self._child.drain():
            self._handle(frame)

    def _handle(self, frame: Frame) -> None:
        if frame.type == FrameType.LOAD:
            self._requested.append((frame.job, int(frame.header.get("memory_budget", 0))))
        elif frame.type == FrameType.PROGRESS:
            self._forget_arriving(frame.job, int(frame.header["memory_budget"]))
            loaded, closed = frame.header["device_bytes"], frame.header["closed_bytes"]
            for memory in self._memories.values():
                memory.loaded_bytes = int(loaded.get(memory.device, 0))
                memory.closed_bytes = int(closed.get(memory.device, 0))
                memory.return_unused()
            self._publish_loaded(frame.header["models"])
        elif frame.type == FrameType.DEVICE:
            self._described = frame.header
        elif frame.type == FrameType.DRIFT:
            self._keep_drift(frame)
        elif frame.type == FrameType.ERROR:
            raise failure_of_frame(frame.header)
        else:
            raise Failure("08P01", f"the predictor sent an unexpected {frame.type.name} frame")

    def _send_drift_rate(self) -> None:
        """Tell the predictor which share of the rows counts, if that has changed."""
        rate = self._server.call("tensile_internal._drift_rate()")
        self._server.commit()
        if rate != self._drift_rate:
            self._drift_rate = rate
            self._child.queue(FrameType.DRIFT, header={"rate": rate})

    def _send_lacking(self) -> None:
        """Tell the predictor what jobs lack, of devices about which the scheduler has made another decision.

        A change of the setting is told as well."""
        rows = self._server.rows(LACKING_QUERY)
        idle_s = self._server.number("pg_tensile.model_idle")
        self._server.commit()
        for row in rows:
            device, decided = row["device"], (row["number"], idle_s)
            if self._lacking.get(device) == decided:
                continue
            self._lacking[device] = decided
            header = {
                "device": device,
                "waiting": row["bytes"],
                "running": row["slowed_bytes"],
                "idle_s": idle_s,
                "closed_bytes": self._memories[device].closed_bytes,
            }
            self._child.queue(FrameType.LACKING, header=header)

    def _keep_drift(self, frame: Frame) -> None:
        """Store counts of rows. Those that cannot be stored are lost: predictions continue."""
        try:
            counts = frame.buffers[0].cast("q").tolist()
            self._server.call(
                "tensile_internal._count_drift(int8,int8,int8[])", frame.job, frame.header["rows"], counts
            )
            self._server.commit()
        except self._server.plpy.SPIError as error:
            self._server.rollback()
            self._server.log_once(f"counts of predicted rows cannot be stored: {error}")

    def _forget_arriving(self, version: int, memory_budget: int) -> None:
        """Count a model as arriving no more, if it did: it has been loaded, or could not be."""
        arriving = self._arriving.pop((version, memory_budget), None)
        if arriving is not None:
            memory, size = arriving
            memory.arriving_bytes -= size

    async def _load(self, version: int, memory_budget: int) -> None:
        """Send a model version: MODEL, then its weights; or MODEL with the error."""
        server = self._server
        refuse = partial(self._refuse, version, memory_budget)
        try:
            rows = server.rows(VERSION_QUERY if version > 0 else BASE_QUERY, ["int8"], version)
            server.commit()
        except server.plpy.SPIError as error:
            server.rollback()
            refuse(*_unreadable_model(error))
            return
        if not rows:
            refuse(*(DELETED if version > 0 else NOT_COMMITTED))
            return
        weight_bytes = int(rows[0]["weight_bytes"])
        header = {key: json.loads(rows[0][key] or "null") for key in ("architecture", "preprocessing", "reference")}
        size = memory_budget or weight_bytes + self._folder_bytes(header)
        memory, profile = self._host, None
        if memory_budget:
            chosen = await self._choose_device()
            if not isinstance(chosen, Chosen):
                refuse(*chosen)
                return
            memory, profile = chosen
            limit = memory.limit()
            server.commit()
            if size > limit:
                message = f'a memory_budget of {size:,} bytes is more than the {limit:,} of device "{memory.device}"'
                hint = "Use a smaller memory_budget, or none; pg_tensile.device_memory is what there is."
                refuse("22023", message, hint)
                return
        keep_bytes = await memory.reserve(size)
        if keep_bytes is None:
            what = "memory_budget" if memory_budget else "this model"
            message = f"there is no device memory for the {size:,} bytes of {what}"
            refuse("53200", message, "Raise pg_tensile.device_memory, or wait until jobs have ended.")
            return
        header |= {"error": None, "device": memory.device, "keep_bytes": keep_bytes}
        header |= {"memory_budget": memory_budget, "profile": profile, "reserved_bytes": size}
        self._arriving[version, memory_budget] = memory, size
        self._child.queue(FrameType.MODEL, version, header=header)
        failure = await self._send_weights(version, weight_bytes)
        if failure is not None:
            self._forget_arriving(version, memory_budget)
            memory.return_unused()
            refuse(*failure)

    async def _choose_device(self) -> Chosen | tuple[str, str, str | None]:
        """Return the device of models with a memory budget; or the error, if the predictor cannot use it."""
        server = self._server
        name = server.setting("pg_tensile.device")
        if name in self._chosen:
            server.commit()
            return self._chosen[name]
        rows = server.rows("SELECT device, profile FROM tensile_internal.device_profiles")
        overheads = json.loads(server.call("tensile_internal._measured_overheads(int8)", None))
        server.commit()
        profiles = {row["device"]: json.loads(row["profile"]) for row in rows}
        self._described = None
        self._child.queue(FrameType.DEVICE, header={"name": name, "profiles": profiles, "overheads": overheads})
        while self._described is None:
            frame = await self._child.receive(IDLE)
            if frame is not None:
                self._handle(frame)
            if server.stopping:
                raise Stopped
        described = self._described
        if described["error"] is not None:
            failure = failure_of_frame(described["error"])
            return failure.sqlstate, failure.message, failure.hint
        device, profile = described["device"], described["profile"]
        memory = self._memories.setdefault(device, DeviceMemory(server, device, int(profile["memory_bytes"])))
        memory.overhead_bytes = int(described["overhead_bytes"])
        chosen = self._chosen[name] = Chosen(memory, profile)
        return chosen

    async def _send_weights(self, version: int, weight_bytes: int) -> tuple[str, str, str] | None:
        """Send the weights, each chunk when the one before has left; return the error, or None."""
        sent = seq = 0
        if not weight_bytes:  # a model without a version
            header = {"kind": "weights", "seq": 0, "last": True, "meta": None}
            self._child.queue(FrameType.STATE, version, header=header, buffers=[b""])
        while sent < weight_bytes:
            await self._drain()
            try:
                chunk = self._chunk(version, seq)
            except self._server.plpy.SPIError as error:
                self._server.rollback()
                return _unreadable_model(error)
            if chunk is None:
                return DELETED
            sent += len(chunk)
            header = {"kind": "weights", "seq": seq, "last": sent >= weight_bytes, "meta": None}
            self._child.queue(FrameType.STATE, version, header=header, buffers=[chunk])
            del chunk  # frees it before the next one is read
            seq += 1
        return None

    def _forget_models(self) -> None:
        """Forget the models and the devices of a predictor that has ended."""
        for memory in self._memories.values():
            memory.forget()
        self._chosen.clear()
        self._lacking.clear()
        self._arriving.clear()
        self._requested.clear()

    def _publish_loaded(self, models: list[dict[str, Any]]) -> None:
        """Publish the list of loaded models, for tensile.loaded_models."""
        numbers = [int(model[key] or 0) for model in models for key in SHOWN]
        devices = [str(model["device"]) for model in models]
        self._server.call("tensile_internal._report_loaded(int8[],text[])", numbers, devices)
        self._server.commit()

    def _chunk(self, version: int, seq: int) -> bytes | None:
        read = "SELECT data FROM tensile_internal.model_weights WHERE version = $1 AND seq = $2"
        rows = self._server.rows(read, ["int8", "int4"], version, seq)
        return rows[0]["data"] if rows else None

    def _folder_bytes(self, header: dict[str, Any]) -> int:
        """Return the bytes of weights that a model has from its folder (of pretrained models), 0 for other models."""
        if header["preprocessing"] is not None:
            return int((header["preprocessing"].get("text") or {}).get("weight_bytes", 0))
        setting = self._server.setting("pg_tensile.model_path")
        self._server.commit()
        try:
            root = Path(setting or "/nonexistent").resolve(strict=True)
            folder = (root / str(header["architecture"].get("path"))).resolve(strict=True)
            files = folder.glob("*.safetensors") if root in folder.parents else ()
            return sum(path.stat().st_size for path in files if path.is_file())
        except (OSError, RuntimeError, ValueError):
            return 0  # the predictor says what is wrong

    def _refuse(self, version: int, memory_budget: int, sqlstate: str, message: str, hint: str | None) -> None:
        error = {"sqlstate": sqlstate, "message": message, "hint": hint}
        header = {"architecture": None, "preprocessing": None, "error": error, "memory_budget": memory_budget}
        self._child.queue(FrameType.MODEL, version, header=header)

    def _log_cause(self, reason: str, more: str | None) -> None:
        lines = (more or "").splitlines()
        self._server.log_once(reason + (f" ({lines[-1]})" if lines else ""))

    def _remove_socket(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._socket.unlink()


def _unreadable_model(error: Exception) -> tuple[str, str, str]:
    return "58000", f"the model cannot be read: {error}", "The server's log may say more."
