"""A headless Chromium for tests of pages, driven by the DevTools protocol on two pipes.

It needs no driver, port or package, only the browser. A page stores the errors of its console and the addresses that it
requested.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = ("chromium", "chromium-headless-shell")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-renderer-backgrounding", "--disable-backgrounding-occluded-windows", "--hide-scrollbars"),
    *("--force-color-profile=srgb", "--remote-debugging-pipe"),
)
PATIENCE = 60.0  # seconds for an answer: the tests share their cores


class Browser:
    """A process of the browser; `folder` gets its profile and its log."""

    def __init__(self, folder: Path) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            pytest.fail("there is no Chromium: apt-get install chromium (scripts/setup.sh does it)")
        self._log = folder / "chromium.log"
        commands, self._commands = _pipe()
        self._answers, answers = _pipe()
        redirect = f'exec "$@" 3<&{commands} 4>&{answers} {commands}<&- {answers}>&-'
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", "-c", redirect, "bash", program, *FLAGS, f"--user-data-dir={folder / 'profile'}"],
                pass_fds=(commands, answers),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | {"HOME": str(folder)},
                start_new_session=True,
            )
        for end in (commands, answers):
            os.close(end)
        self._read = b""
        self._calls = 0
        self._pages: dict[str, Page] = {}

    def page(self, width: int = 1280, height: int = 900, scheme: str = "light") -> Page:
        """Open an empty page, a phone's if narrower than 600 pixels. `scheme`: preferred colours, light or dark."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Runtime", "Log", "Page", "Network"):
            page.call(f"{domain}.enable")
        is_phone = width < 600
        page.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": is_phone}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        page.prefer(scheme)
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._calls += 1
        command: dict[str, Any] = {"id": self._calls, "method": method, "params": parameters}
        if session is not None:
            command["sessionId"] = session
        data = json.dumps(command).encode() + b"\0"
        while data:
            data = data[os.write(self._commands, data) :]
        deadline = time.monotonic() + PATIENCE
        while True:
            message = self._receive(deadline)
            if message.get("id") == self._calls:
                assert "error" not in message, f"{method}: {message['error']}"
                answer: dict[str, Any] = message["result"]
                return answer
            page = self._pages.get(message.get("sessionId", ""))
            if page is not None and "method" in message:
                page.hear(message["method"], message["params"])

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            remaining = deadline - time.monotonic()
            ready = remaining > 0 and select.select([self._answers], [], [], remaining)[0]
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                log = self._log.read_text("utf-8", "replace")[-3000:]
                pytest.fail(f"Chromium {'has ended' if ready else f'has not answered for {PATIENCE:.0f} s'}:\n{log}")
            self._read += data
        text, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        for end in (self._commands, self._answers):
            os.close(end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)


def _pipe() -> tuple[int, int]:
    """Create a pipe; return its read and write ends, with numbers above those of redirections."""
    low = os.pipe()
    read, write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in low)
    for end in low:
        os.close(end)
    return read, write


class Page:
    """A tab. `complaints`: console errors, uncaught exceptions included; `requests`: addresses that it requested."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.complaints: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **parameters)

    def hear(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            values = (value.get("value", value.get("description")) for value in parameters["args"])
            self.complaints.append(" ".join(map(str, values)))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(parameters["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def prefer(self, scheme: str) -> None:
        """Set the preferred colours, "light" or "dark"."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def open(self, path: Path, until: str = "document.readyState === 'complete'") -> None:
        """Open a file and wait until the JavaScript condition holds."""
        answer = self.call("Page.navigate", url=path.resolve().as_uri())
        assert "errorText" not in answer, answer
        self.wait(f"location.protocol === 'file:' && ({until})")

    def wait(self, condition: str) -> None:
        deadline = time.monotonic() + PATIENCE
        why = ""
        while time.monotonic() < deadline:
            try:
                if self.evaluate(f"!!({condition})"):
                    return
            except AssertionError as error:  # no document while another one loads
                why = f"; {error}"
            time.sleep(0.02)
        pytest.fail(f"not within {PATIENCE:.0f} s: {condition}; the console says {self.complaints}{why}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, converted to JSON's types."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write the whole page to a PNG file."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))
