"""The server as supervisors see it through PL/Python: prepared calls, commits, waiting. Standard library only."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from pyworker.supervisors.child_environment import PYTHON_FOLDER
from pyworker.supervisors.failures import CancelRequest, Failure, Gone
from pyworker.supervisors.supervisor import Request, Wait, suspend
from pyworker.version import VERSION

SETTINGS = (
    "SELECT pg_catalog.json_object_agg(name, setting) AS value FROM pg_catalog.pg_settings"
    " WHERE name LIKE 'pg\\_tensile.%'"
)


class Server:
    """The server through PL/Python: prepared calls, commits, waiting. One per process."""

    def __init__(self, plpy: Any) -> None:
        self.plpy = plpy
        self.stopping = False  # SIGTERM has come; never reset
        self.woken = False  # the latch was set: something may have changed; reset by the code that checks
        self.flow_fault = False  # the child's requests for memory are not served any more; reset as well
        self.resumed_at = time.monotonic()  # when the last wait ended
        self._plans: dict[str, Any] = {}
        self._logged: set[str] = set()
        self._settings: dict[str, str] = {}  # those of this extension
        self._loaded_at: Any = None
        row = plpy.execute(
            "SELECT pg_catalog.current_setting('server_encoding') AS encoding, tensile_worker._version() AS library,"
            " (SELECT oid FROM pg_catalog.pg_extension WHERE extname = 'pg_tensile') AS extension"
        )[0]
        self._utf8 = row["encoding"] in ("UTF8", "SQL_ASCII")
        self._storable: dict[str, bool] = {}  # by character that is not in ASCII, unless all are
        self._library = row["library"]
        self._extension = row["extension"]

    def check_version(self) -> None:
        """Raise Failure unless these files have the version of the library that the server has loaded."""
        if self._library != VERSION:
            message = f"the Python files of pg_tensile have version {VERSION}, the server's library has {self._library}"
            hint = f"They are in {PYTHON_FOLDER}. Install the library's version of them, then restart the server."
            raise Failure("55000", message, hint=hint)

    def rows(self, sql: str, types: Sequence[str] = (), *values: Any) -> list[dict[str, Any]]:
        """Return the rows of a query, which is prepared at its first use."""
        plan = self._plans.get(sql)
        if plan is None:
            plan = self._plans[sql] = self.plpy.prepare(sql, list(types))
        return list(self.plpy.execute(plan, list(values)))

    def call(self, signature: str, *values: Any) -> Any:
        """Return a function's value: `call("tensile_worker._job_metric(jsonb)", {...})`; jsonb is encoded here."""
        name, _, types = signature.rstrip(")").partition("(")
        names = [type for type in types.split(",") if type]
        parameters = ", ".join(f"${number}" for number in range(1, len(names) + 1))
        plain = [self.json(value) if type == "jsonb" else value for type, value in zip(names, values, strict=True)]
        return self.rows(f"SELECT {name}({parameters}) AS value", names, *plain)[0]["value"]

    def attempt(self, what: str, signature: str, *values: Any) -> Any:
        """Call a function in a transaction of its own and return its value. Log an error once, as "`what`: error", and
        return None, so that what follows is not kept from going on."""
        try:
            value = self.call(signature, *values)
            self.commit()
        except self.plpy.SPIError as error:
            self.rollback()
            if not self.installed():
                raise
            self.log_once(f"{what}: {error}")
            return None
        return value

    def setting(self, name: str) -> str:
        return str(self.call("pg_catalog.current_setting(text)", name))

    def number(self, name: str) -> int:
        """Return a numeric setting of pg_tensile in its base unit (pg_settings.unit: MB are MB, milliseconds are
        milliseconds).

        All are read at once, and again when this process has reloaded its settings: the view lists all settings of
        PostgreSQL, which takes a millisecond.
        """
        loaded_at = self.call("pg_catalog.pg_conf_load_time()")
        if loaded_at != self._loaded_at:
            self._settings = json.loads(self.rows(SETTINGS)[0]["value"])
            self._loaded_at = loaded_at
        return int(self._settings[name])

    def commit(self) -> None:
        self.plpy.commit()

    def rollback(self) -> None:
        self.plpy.rollback()

    def log_once(self, cause: str) -> None:
        """Write one line per cause to the server's log, until `log_again`."""
        if cause not in self._logged:
            self._logged.add(cause)
            self.plpy.log(f"pg_tensile: {cause}")

    def log_again(self) -> None:
        """Have `log_once` log all causes again: what was wrong is over, so a recurrence is news."""
        self._logged.clear()

    async def wait(self, fd: int, seconds: float, writable: bool = False) -> Wait:
        """End the transaction and wait until the socket is ready, the latch is set or `seconds` have passed.

        An `fd` of -1 means no socket. Raises Gone and CancelRequest.
        """
        bits = await self._suspend(fd, seconds, writable)
        if bits & Wait.GONE:
            raise Gone
        if bits & Wait.CANCEL:
            raise CancelRequest
        return bits

    async def sleep(self, seconds: float) -> None:
        """Let `seconds` pass, whatever happens meanwhile, or less if the supervisor is to stop. Raises Gone."""
        end = time.monotonic() + seconds
        while not self.stopping and (remaining := end - time.monotonic()) > 0:
            if await self._suspend(-1, remaining) & Wait.GONE:
                raise Gone

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Poll the condition until it is true or `seconds` have passed (one if the supervisor is to stop); return it.

        Cancellation and drops raise nothing here, because cleaning up must continue in spite of them.
        """
        start, pause = time.monotonic(), 0.005
        while not (true := condition()):
            if time.monotonic() - start > (min(1.0, seconds) if self.stopping else seconds):
                break
            await self._suspend(-1, pause)
            pause = min(2 * pause, 0.1)
        return true

    async def _suspend(self, fd: int, seconds: float, writable: bool = False) -> Wait:
        bits = await suspend(Request(fd, max(0, math.ceil(seconds * 1000)), writable))
        self.resumed_at = time.monotonic()
        self.stopping = self.stopping or bool(bits & Wait.STOP)
        self.woken = self.woken or bool(bits & Wait.LATCH)
        self.flow_fault = self.flow_fault or bool(bits & Wait.FLOW)
        return bits

    async def loop(self, turn: Callable[[], Awaitable[float]], socket: Callable[[], int] = lambda: -1) -> None:
        """Call `turn` until STOP or GONE, each time sleeping for the seconds that it returns, or until the latch is set
        or the socket is ready whose descriptor `socket` returns (-1: none).

        An SQL error is logged once per cause and ends only its turn; while errors last, the pause doubles up to 30 s.
        """
        try:
            self.check_version()
        except Failure as failure:
            self.plpy.error(failure.message, sqlstate=failure.sqlstate, hint=failure.hint)
        pause = 1.0
        while not self.stopping:
            try:
                seconds = await turn()
                await self.wait(socket(), seconds)
                pause = 1.0
            except Gone:
                return
            except (self.plpy.SPIError, CancelRequest) as error:
                self.rollback()
                if not self.installed():
                    return
                self.log_once(str(error))
                try:
                    await self.sleep(pause)
                except Gone:
                    return
                pause = min(2 * pause, 30.0)

    def installed(self) -> bool:
        """Return whether the extension still exists; one that was dropped and created again does not count.

        Called after a failure that DROP EXTENSION would explain.
        """
        sql = "SELECT 1 FROM pg_catalog.pg_extension WHERE extname = 'pg_tensile' AND oid = $1"
        return bool(self.rows(sql, ["oid"], self._extension))

    def text(self, value: str | None) -> str | None:
        """Return a child's text as the server can store it."""
        if value is None:
            return None
        clean = value.encode("utf-8", "replace").decode().replace("\0", "")
        if self._utf8 or clean.isascii():
            return clean
        return "".join(
            char if self._is_storable(char) else char.encode("ascii", "backslashreplace").decode() for char in clean
        )

    def _is_storable(self, char: str) -> bool:
        """Return whether the encoding of the database has the character."""
        if not char.isascii() and char not in self._storable:
            try:
                self.call("pg_catalog.length(text)", char)
                self._storable[char] = True
            except self.plpy.SPIError:
                self._storable[char] = False
        return char.isascii() or self._storable[char]

    def json(self, value: Any) -> str:
        """Return JSON that jsonb takes: strings without NUL and lone surrogates.

        A database without encoding (SQL_ASCII) cannot convert escapes; one with another than UTF-8 needs them."""

        def clean(item: Any) -> Any:
            if isinstance(item, str):
                return item.encode("utf-8", "replace").decode().replace("\0", "")
            if isinstance(item, dict):
                return {clean(key): clean(part) for key, part in item.items()}
            return [clean(part) for part in item] if isinstance(item, (list, tuple)) else item

        return json.dumps(clean(value), ensure_ascii=not self._utf8)
