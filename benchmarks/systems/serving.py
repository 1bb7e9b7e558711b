"""Several ResNet-50 on one device, requests as a Poisson process: latency over rate (SwapAdvisor, figure 8).

Three ways of serving the same arrivals, all through SQL's `predict_class` in a private cluster:

- `within`: all models at once, each within its part of the budget; weights are swapped in while the model computes;
- `turns`: one model has the whole budget at a time; a request for another one first waits until its parameters have
  passed the link, the paper's time_shared. The weights stay in the predictor's host memory, and the wait is slept by
  the client in front of the server, so that nothing but the link's time is charged;
- `whole`: all models fully loaded, without a budget: the paper's not_shared with as many models.

The budget is one model's parameters and `MARGIN`. The link passes a model's parameters in `LINK_SHARE` times the time
of a prediction, as the paper's: 240 MB at 12 GB/s of its V100's link, beside 17 ms of a prediction (table 2). Arrivals
come at parts of the rate at which `whole` serves one request after the other, measured before in the same run; each
request is for a random model. Ways take turns in rounds, each with the same arrivals. Arrivals are open: a latency
counts from the planned arrival, whether or not a client is free. A way is saturated if its own service time, likewise
measured before, leaves less than a tenth of the time free.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from benchmarks.checks import Check
from benchmarks.command import Row
from benchmarks.server.cluster import fresh_cluster
from benchmarks.systems.inference import IMAGES, SOURCE
from pg_tensile.execution.training.checkpoint import from_bytes

Connection = psycopg.Connection[tuple[Any, ...]]
Serve = Callable[[Connection, int, int], None]  # connection, model, image
SECTION = "serving"
RATES = (0.2, 0.4, 0.6)  # of that of one request after the other without a budget
WAYS = ("within", "turns", "whole")
MARGIN = 1.1  # times the parameters: room for activations and workspaces
LINK_SHARE = 1.2
IMAGES_STORED = 8
CLIENTS = 8  # connections
ROUNDS = 4  # in which the ways take turns, so that all of them share what else the machine does
FEWEST = 100  # requests that have a 99th percentile
FREE = 0.1  # of the time, below which a way counts as saturated


# ---- the server -----------------------------------------------------------------------------------------------------


def set_up(conn: Connection, models: int, side: int, network: str) -> int:
    """Train the models for one step each, and return the bytes of one model's parameters."""
    conn.execute("CREATE EXTENSION pg_tensile CASCADE")
    conn.execute(IMAGES.format(bytes=3 * side * side))
    source = Jsonb({"type": "python", "source": SOURCE.replace("resnet152", network)})
    for model in range(models):
        conn.execute("SELECT register_model(%s, %s)", (name(model), source))
        train = """
            SELECT train_model(%s, 'SELECT image, kind FROM images', 'kind', epochs => 1, batch_size => 8,
                               learning_rate => 1e-4, validation => 0, policy => 'none', seed => %s)
        """
        conn.execute("SELECT wait_for_job(%s)", conn.execute(train, (name(model), model)).fetchone())
    read = """
        SELECT w.data FROM tensile_internal.model_weights w JOIN tensile.model_versions v ON v.version_id = w.version
        JOIN tensile.models m ON m.model_id = v.model_id WHERE m.model = %s ORDER BY w.seq
    """
    weights = from_bytes(b"".join(chunk for (chunk,) in conn.execute(read, (name(0),)).fetchall()))
    return sum(tensor.nbytes for tensor in weights.values())


def name(model: int) -> str:
    return f"network {model}"


def predict(conn: Connection, model: int, image: int, budget: str | None) -> Any:
    query = "SELECT predict_class(%s, i, %s) FROM images i WHERE id = %s"
    return conn.execute(query, (name(model), budget, image)).fetchone()


def same_bits(conn: Connection, models: int, budget: str) -> bool:
    """Return whether all models give all images the same labels and probabilities within the budget as without."""
    query = "SELECT label, probability FROM predict_rows(%s, 'SELECT image FROM images WHERE id = {}', %s)"
    return all(
        conn.execute(query.format(image).encode(), (name(model), budget)).fetchone()
        == conn.execute(query.format(image).encode(), (name(model), None)).fetchone()
        for model in range(models)
        for image in range(1, IMAGES_STORED + 1)
    )


def limit_link(conn: Connection, bytes_per_s: float) -> None:
    """Give the device that rate in both directions, for models that are loaded from now on."""
    rates = Jsonb({"in_bytes_per_s": bytes_per_s, "out_bytes_per_s": bytes_per_s})
    conn.execute("UPDATE tensile_internal.device_profiles SET profile = profile || %s WHERE device = 'cpu'", (rates,))


# ---- ways of serving ------------------------------------------------------------------------------------------------


class Turns:
    """The models take turns on the device: requests one after the other, behind the load of another model."""

    def __init__(self, load_s: float) -> None:
        self._load_s = load_s
        self._loaded: int | None = None
        self._device = threading.Lock()

    def __call__(self, conn: Connection, model: int, image: int) -> None:
        with self._device:
            if model != self._loaded:
                time.sleep(self._load_s)
                self._loaded = model
            predict(conn, model, image, None)


def requests(models: int, count: int, seed: int) -> list[tuple[float, int, int]]:
    """Return (arrival at rate 1, model, image) of each request, the same for all ways and rates."""
    chance = random.Random(seed)
    arrival, listed = 0.0, []
    for _ in range(count):
        arrival += chance.expovariate(1.0)
        listed.append((arrival, chance.randrange(models), chance.randint(1, IMAGES_STORED)))
    return listed


def one_after_the_other(conn: Connection, serve: Serve, asked: Sequence[tuple[float, int, int]]) -> float:
    """Return the mean seconds of a request."""
    started = time.perf_counter()
    for _, model, image in asked:
        serve(conn, model, image)
    return (time.perf_counter() - started) / len(asked)


def latencies(
    connect: Callable[[], Connection], serve: Serve, asked: Sequence[tuple[float, int, int]], rate: float
) -> list[float]:
    """Return the milliseconds from each planned arrival, at `rate` requests a second, to its answer."""
    local, opened = threading.local(), []

    def open_connection() -> None:
        local.conn = connect()
        opened.append(local.conn)

    def answer(due: float, model: int, image: int) -> float:
        serve(local.conn, model, image)
        return (time.perf_counter() - due) * 1e3

    try:
        with ThreadPoolExecutor(CLIENTS, initializer=open_connection) as clients:
            started = time.perf_counter()
            answers = []
            for arrival, model, image in asked:
                due = started + arrival / rate
                time.sleep(max(0.0, due - time.perf_counter()))
                answers.append(clients.submit(answer, due, model, image))
            return [future.result() for future in answers]
    finally:
        for conn in opened:
            conn.close()


# ---- rows and checks ------------------------------------------------------------------------------------------------


def rows(
    models: int = 4,
    count: int = 104,
    side: int = 32,
    network: str = "resnet50",
    rates: Sequence[float] = RATES,
    rounds: int = ROUNDS,
) -> Iterator[Row]:
    """Yield a row for each rate and way, of `count` requests; `side`: of an image, at most 147."""
    settings = {"pg_tensile.model_cache": "8GB", "pg_tensile.predict_timeout": "300s"}
    with fresh_cluster(settings) as cluster, cluster.connect() as conn:
        parameter_bytes = set_up(conn, models, side, network)
        total = int(MARGIN * parameter_bytes)
        part = f"{total // models} B"
        warm = [(0.0, model, image) for image in (1, 2) for model in range(models)]
        one_after_the_other(conn, lambda c, m, i: predict(c, m, i, None), warm)
        short = requests(models, 24, rounds)
        whole_s = one_after_the_other(conn, lambda c, m, i: predict(c, m, i, None), short)
        bytes_per_s = parameter_bytes / (LINK_SHARE * whole_s)
        limit_link(conn, bytes_per_s)
        same = same_bits(conn, models, part)
        planned = "SELECT sum(planned_bytes), count(*) FROM tensile.loaded_models WHERE memory_budget IS NOT NULL"
        planned_bytes, loaded = conn.execute(planned).fetchone() or (0, 0)
        ways: dict[str, Serve] = {
            "within": lambda c, m, i: predict(c, m, i, part),
            "turns": Turns(parameter_bytes / bytes_per_s),
            "whole": lambda c, m, i: predict(c, m, i, None),
        }
        service_s = {way: one_after_the_other(conn, ways[way], short) for way in WAYS}
        for rate in rates:
            found: dict[str, list[float]] = {way: [] for way in WAYS}
            for seed in range(rounds):
                asked = requests(models, count // rounds, seed)
                for way, measured in found.items():
                    measured += latencies(cluster.connect, ways[way], asked, rate / whole_s)
            for way, measured in found.items():
                measured.sort()
                yield {
                    "model": network,
                    "models": models,
                    "way": way,
                    "rate": rate,
                    "requests_per_s": rate / whole_s,
                    "requests": len(measured),
                    "p50_ms": statistics.median(measured),
                    "p99_ms": measured[len(measured) * 99 // 100],
                    "service_ms": service_s[way] * 1e3,
                    "saturated": rate / whole_s * service_s[way] > 1 - FREE,
                    "budget_bytes": None if way == "whole" else total,
                    "parameter_bytes": models * parameter_bytes,
                    "planned_bytes": int(planned_bytes) if way == "within" else None,
                    "loaded": loaded if way == "within" else models if way == "whole" else 1,
                    "link_bytes_per_s": bytes_per_s,
                    "identical": same if way == "within" else None,
                }


def checks(measured: Sequence[Row]) -> list[Check]:
    """Check results and memory, and that models within the budget are not behind turns while neither is saturated."""
    checked = []
    by_rate = {(row["rate"], row["way"]): row for row in measured}
    for row in measured:
        if row["way"] != "within":
            continue
        title = f"{row['models']} models, {row['rate']:.0%} of the rate"
        same = row["identical"]
        checked.append(Check(SECTION, f"{title}: results", "the same" if same else "others", "the same bits", same))
        fits = row["loaded"] == row["models"] and row["planned_bytes"] <= row["budget_bytes"] < row["parameter_bytes"]
        found = f"{row['loaded']} models in {row['planned_bytes']:,}"
        checked.append(Check(SECTION, f"{title}: memory", found, f"all in ≤ {row['budget_bytes']:,}", fits))
        turns = by_rate.get((row["rate"], "turns"))
        enough = row["requests"] >= FEWEST
        if turns is not None and enough and not row["saturated"] and not turns["saturated"]:
            what, asked = f"{title}: 99th percentile", f"≤ {turns['p99_ms']:,.0f} ms, of turns"
            not_behind = row["p99_ms"] <= turns["p99_ms"]
            checked.append(Check(SECTION, what, f"{row['p99_ms']:,.0f} ms", asked, not_behind))
    return checked
