"""ResNet-152, one image a prediction, within parts of its parameters' bytes (SwapAdvisor, section 6.3).

Two ways: `Served` in this process, on the host device (its link as measured, and one that keeps an RTX A6000's balance
of link and arithmetic) or on CUDA; and SQL's `predict(…, memory_budget => …)` in a private cluster, whose model is
trained for one step before, because speed does not depend on the weights. Each row (a plain dictionary, printed as a
line of JSON) has the budget, its share of the parameters, the peak of the executor's registry and workspaces (None in
SQL, where the session cannot observe it), the median latency within the budget and, in turns with it, of the model in
one piece, the median of the rounds' ratios of both (`slowdown`), and whether the outputs are the same to the bit.
`link_ms` is the link's time to swap in the bytes that cannot stay: no plan is faster. The row also has the values by
which the link was scaled, so that a check can detect a link that was not limited.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
import torch
from psycopg.types.json import Jsonb
from torch import nn

from benchmarks.checks import Check
from benchmarks.command import Row
from benchmarks.server.cluster import fresh_cluster
from pg_tensile.execution.backends import use_deterministic_algorithms
from pg_tensile.execution.device_choice import choose_device
from pg_tensile.execution.measuring.device import measure
from pg_tensile.execution.runtime.device import Device
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.execution.runtime.open_device import open_device
from pg_tensile.execution.training.prediction import Served
from pg_tensile.planning.device.profile import RTX_A6000, DeviceProfile
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.trace.trace import Trace

Connection = psycopg.Connection[tuple[Any, ...]]
SECTION = "inference"
SHARES = (0.12, 0.24, 0.5, 1.1)  # of the parameters' bytes
SQL_SHARES = (0.12, 0.24)
REFERENCE = RTX_A6000  # whose balance of link and arithmetic the scaled link has
LINK_FIDELITY = 0.95  # a latency below this part of the link's own time was measured with another link
SLOWEST = 1.15  # times the larger of the link's time and that in one piece
SOURCE = """
import torch
from pytorchcv.models.resnet import resnet152

class Images(torch.nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.network = resnet152(num_classes=classes)
        self.network.features.final_pool = torch.nn.AdaptiveAvgPool2d(1)

    def forward(self, x):
        side = round((x.shape[1] / 3) ** 0.5)
        return self.network(x.view(-1, 3, side, side))

def build(n_inputs, n_outputs):
    return Images(n_outputs)
"""
IMAGES = """
    CREATE TABLE images AS
    SELECT i AS id, 'kind ' || mod(i, 4) AS kind,
           decode(string_agg(md5((i * 10000 + j)::text), '' ORDER BY j), 'hex') AS image
    FROM generate_series(1, 8) i, generate_series(1, {bytes} / 16) j GROUP BY i
"""


# ---- in this process ------------------------------------------------------------------------------------------------


def network(classes: int = 1000) -> nn.Module:
    """Return the network in eval mode, with the same weights each time."""
    namespace: dict[str, Any] = {}
    exec(SOURCE, namespace)
    torch.manual_seed(0)
    model: nn.Module = namespace["build"](0, classes).eval()
    return model


def library_rows(side: int, rounds: int, device_name: str, shares: Iterable[float] = SHARES) -> Iterator[Row]:
    """Yield a row for each link and share."""
    torch_device = choose_device(device_name)
    use_deterministic_algorithms()
    image = torch.randn(1, 3 * side * side, generator=torch.Generator().manual_seed(1))
    whole = network().to(torch_device)
    parameter_bytes = sum(parameter.nbytes for parameter in whole.parameters())
    profile = measure(torch_device)

    @torch.no_grad()
    def in_one_piece() -> torch.Tensor:
        return whole(image.to(torch_device)).cpu()

    expected = in_one_piece()
    step_us = statistics.median(timed(in_one_piece)[0] for _ in range(9)) * 1e3
    for link, linked, reference_us in links(profile, network(), image, step_us):
        for share in shares:
            budget = int(share * parameter_bytes)
            with closing(make_device(linked, budget)) as device:
                opened, served = timed(partial(Served, network(), [image], device))
                with closing(served):
                    same = all(torch.equal(served.predict([image]), expected) for _ in range(2))
                    times = in_turns([partial(served.predict, [image]), in_one_piece], rounds)
                    yield {
                        **described("library", share, budget, parameter_bytes, times),
                        "device": str(torch_device),
                        "link": link,
                        "link_bytes_per_s": round(linked.in_bytes_per_s),
                        "reference_us": reference_us,
                        "step_us": step_us,
                        "peak_bytes": served.peak_bytes,
                        "host_bytes": served.host_bytes,
                        "bytes_in": served.candidates[1].in_bytes,
                        "simulated_ms": served.candidates[1].us / 1e3,
                        "link_ms": bytes_to_bring(served.trace(), budget) / linked.in_bytes_per_s * 1e3,
                        "load_ms": opened,
                        "identical": same,
                    }


def links(
    profile: DeviceProfile, model: nn.Module, image: torch.Tensor, step_us: float
) -> Iterator[tuple[str, DeviceProfile, float | None]]:
    """Yield the device's own link and, on the host, the one that keeps the reference's balance.

    The latter comes with the µs that the reference would compute for; None for the former.
    """
    yield "measured", profile, None
    if profile.kind == "host":
        with closing(HostDevice(profile)) as device, closing(Served(model, [image], device)) as served:
            reference_us = roofline.total_us(served.trace(), REFERENCE)
        yield "balanced", profile.scaled_link(reference_us, step_us, REFERENCE), reference_us


def make_device(profile: DeviceProfile, budget: int) -> Device:
    return open_device(torch.device("cpu" if profile.kind == "host" else profile.kind), profile, budget)


def bytes_to_bring(trace: Trace, budget: int) -> int:
    """Return the bytes that cannot stay on the device from one prediction to the next."""
    return max(0, int(trace.tensor_bytes[trace.persistent].sum()) - budget)


# ---- in the server --------------------------------------------------------------------------------------------------


def server_rows(side: int = 128, rounds: int = 20, shares: Iterable[float] = SQL_SHARES) -> Iterator[Row]:
    """Yield a row for each share, by `predict_class` of one row; SQL takes images of a side of at most 147."""
    with fresh_cluster() as cluster, cluster.connect() as conn:
        parameter_bytes = set_up(conn, side)
        for share in shares:
            yield server_row(conn, share, int(share * parameter_bytes), parameter_bytes, rounds)


def set_up(conn: Connection, side: int) -> int:
    """Train the model for one step, and return the bytes of its parameters."""
    conn.execute("CREATE EXTENSION pg_tensile CASCADE")
    conn.execute("SET pg_tensile.predict_timeout = '300 s'")
    conn.execute(IMAGES.format(bytes=3 * side * side))
    conn.execute("SELECT register_model('resnet152', %s)", (Jsonb({"type": "python", "source": SOURCE}),))
    train = """
        SELECT train_model('resnet152', 'SELECT image, kind FROM images', 'kind', epochs => 1, batch_size => 8,
                           validation => 0, policy => 'none')
    """
    conn.execute("SELECT wait_for_job(%s)", conn.execute(train).fetchone())
    return sum(parameter.nbytes for parameter in network(4).parameters())


def server_row(conn: Connection, share: float, budget: int, parameter_bytes: int, rounds: int) -> Row:
    def ask(memory_budget: str | None) -> Any:
        # the label alone could be the same by chance
        query = "SELECT label, probability FROM predict_rows('resnet152', 'SELECT image FROM images WHERE id = 1', %s)"
        return conn.execute(query, (memory_budget,)).fetchone()

    def predict(memory_budget: str | None) -> Callable[[], Any]:
        query = "SELECT predict_class('resnet152', i, %s) FROM images i WHERE id = 1"
        return lambda: conn.execute(query, (memory_budget,)).fetchone()

    within = f"{budget} B"
    load_ms, first = timed(lambda: ask(within))
    same = first == ask(within) == ask(None)
    row = described("sql", share, budget, parameter_bytes, in_turns([predict(within), predict(None)], rounds))
    return {**row, "device": "cpu", "link": "measured", "peak_bytes": None, "load_ms": load_ms, "identical": same}


# ---- common parts ---------------------------------------------------------------------------------------------------


def described(where: str, share: float, budget: int, parameter_bytes: int, times: Sequence[Sequence[float]]) -> Row:
    """Return the common part of a row. `times`: milliseconds of each round, within the budget and in one piece."""
    within_ms, whole_ms = times
    return {
        "where": where,
        "model": "ResNet-152",
        "batch": 1,
        "share": share,
        "budget_bytes": budget,
        "parameter_bytes": parameter_bytes,
        "latency_ms": statistics.median(within_ms),
        "whole_ms": statistics.median(whole_ms),
        "slowdown": statistics.median(within / whole for within, whole in zip(within_ms, whole_ms, strict=True)),
        "rounds": len(whole_ms),
    }


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the milliseconds of the call, and its result."""
    started = time.perf_counter()
    result = call()
    return (time.perf_counter() - started) * 1e3, result


def in_turns(calls: list[Callable[[], Any]], rounds: int) -> list[list[float]]:
    """Return the milliseconds of each call in every round, called in turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, own_times in zip(calls, times, strict=True):
            own_times.append(timed(call)[0])
    return times


def checks(rows: Sequence[Row]) -> list[Check]:
    """Check results, memory and speed.

    The bits have to be the same everywhere, the executor within the budget, and in SQL within less than a quarter of
    the parameters. The speed has to be the link's: not slower, and not faster either, which would mean another link.
    """
    checked = []
    for row in rows:
        title = f"{row['where']}, {row['link']} link, {row['share']:.0%} of the parameters"
        same = row["identical"]
        checked.append(Check(SECTION, f"{title}: results", "the same" if same else "others", "the same bits", same))
        if row["peak_bytes"] is not None:
            peak, budget = row["peak_bytes"], row["budget_bytes"]
            checked.append(Check(SECTION, f"{title}: peak", f"{peak:,}", f"≤ {budget:,}", peak <= budget))
        if row.get("link_ms") is not None:
            checked += speed_checks(title, row)
    small = [row["share"] for row in rows if row["where"] == "sql"]
    if small:
        checked.append(
            Check(SECTION, "SQL: least budget", f"{min(small):.0%} of the parameters", "< 25 %", min(small) < 0.25)
        )
    return checked


def speed_checks(title: str, row: Row) -> list[Check]:
    """Check the latency against the link's own time, and the link's rate against the reference's balance."""
    least, most = LINK_FIDELITY * row["link_ms"], SLOWEST * max(row["link_ms"], row["whole_ms"])
    asked = f"{least:,.0f} … {most:,.0f} ms; in one piece {row['whole_ms']:,.0f}"
    within = least <= row["latency_ms"] <= most
    checked = [Check(SECTION, f"{title}: latency", f"{row['latency_ms']:,.0f} ms", asked, within)]
    if row["reference_us"] is not None:
        moved = row["link_bytes_per_s"] * row["step_us"] / 1e6
        reference = REFERENCE.in_bytes_per_s * row["reference_us"] / 1e6
        what, same = f"{title}: bytes that the link brings in one step's time", abs(moved / reference - 1) < 0.01
        checked.append(Check(SECTION, what, f"{moved:,.0f}", f"{reference:,.0f}, as {REFERENCE.name}", same))
    return checked


def library(side: int = 128, rounds: int = 20) -> Iterator[Row]:
    """Yield the rows of this process; `side`: of the image."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) - 1))  # as jobs and the predictor have
    return library_rows(side, rounds, "cpu")
