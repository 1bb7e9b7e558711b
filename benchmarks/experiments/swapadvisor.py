"""Models several times as large as the GPU (SwapAdvisor, section 6.2), simulated at the paper's sizes.

All five models of the paper's table 1, with its largest batches, on the profile of its GPU with 16 GiB: WResNet-152-10
on images of 224 × 224, Inception v4 with four times as many channels, NASNet-25 with the cells and the images of
NASNet-A (6 @ 4032), RNN-8-8K, eight layers of LSTM cells of width 8192, unrolled over time, and BRNN-4-8K, four of both
directions. `ideal` is the time of a step with unlimited memory over that of the policy, as in the paper's Figure 6;
`bound` what no plan for the same order of operators can exceed. The paper does not give the length of its sequences,
which is TIMES here, nor its optimizer, which is SGD here, nor the number of NASNet's filters.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.checks import Check
from benchmarks.command import Row
from benchmarks.experiments.gpus import V100
from benchmarks.experiments.networks import CV, IMAGE, LARGE_IMAGE, TEN, Network, named
from pg_tensile.planning import bounds
from pg_tensile.planning.latency import roofline
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.order import as_executed
from pg_tensile.planning.policies import named_policy
from pg_tensile.planning.trace.trace import Trace
from pg_tensile.tools.bench.planned import predicted
from pg_tensile.tools.bench.report import message_of
from pg_tensile.tools.bench.workload import prepare, weightless_model
from pg_tensile.tools.cli.bench import parse

ODSWAP = "lru:prefetch"  # the paper's baseline
POLICIES: dict[str, tuple[str, dict[str, Any]]] = {  # names and settings
    "lru": ("lru", {}),
    ODSWAP: ("lru", {"prefetch": True}),
    "swapadvisor": ("swapadvisor", {}),
    "joint": ("joint", {}),
}
TIMES = 16
WIDE = Network(
    "WResNet-152-10", f"{CV}.resnet:get_resnet", IMAGE, batch=64, kwargs='{"blocks": 152, "width_scale": 10.0}'
)
INCEPTION = Network(
    "Inception-4",
    "benchmarks.experiments.models:widened",
    LARGE_IMAGE,
    batch=64,
    kwargs=f'{{"model": "{CV}.inceptionv4:inceptionv4", "times": 4}}',
)
NASNET = Network(
    "NASNet-25",
    f"{CV}.nasnet:get_nasnet",
    ("float32:3x331x331",),
    batch=64,
    kwargs='{"repeat": 25, "penultimate_filters": 4032, "init_block_channels": 96, "final_pool_size": 11, '
    '"extra_padding": false, "skip_reduction_layer_input": true, "in_size": [331, 331]}',
)
RECURRENT, SEQUENCE = "benchmarks.experiments.recurrent", (f"float32:{TIMES}x8192",)
RNN = Network("RNN-8-8K", f"{RECURRENT}:UnrolledLSTM", SEQUENCE, TEN, 256, '{"width": 8192, "layers": 8}')
BRNN = Network("BRNN-4-8K", f"{RECURRENT}:BidirectionalLSTM", SEQUENCE, TEN, 128, '{"width": 8192, "layers": 4}')
# GB in the paper's table 1, and shares of the ideal speed that its text gives
PUBLISHED = {
    ("WResNet-152-10", "gb"): "180",
    ("WResNet-152-10", "swapadvisor"): "95%",
    ("WResNet-152-10", ODSWAP): "80%",
    ("Inception-4", "gb"): "71",
    ("Inception-4", "swapadvisor"): "at most 65%",
    ("NASNet-25", "gb"): "193",
    ("NASNet-25", "swapadvisor"): "53%",
    ("RNN-8-8K", "gb"): "118",
    ("RNN-8-8K", "swapadvisor"): "70 to 80%",
    ("RNN-8-8K", ODSWAP): "below 1%",
    ("BRNN-4-8K", "gb"): "99",
    ("BRNN-4-8K", "swapadvisor"): "70 to 80%",
    ("BRNN-4-8K", ODSWAP): "below 1%",
}


def trace_of(network: Network) -> Trace:
    """Capture without weights in memory, which this machine could not hold."""
    options = parse(["bench", *network.arguments(), "--optimizer", "sgd"])
    return roofline.timed(prepare(options, weightless_model(options), torch.device("cpu")).vanilla.trace, V100)


def rows_of(network: Network) -> Iterator[Row]:
    """Yield a row for each policy."""
    trace = trace_of(network)
    vanilla_us = float(trace.latency_us.sum())
    for policy, (name, settings) in POLICIES.items():
        row: Row = {
            "experiment": "swapadvisor",
            "case": network.title,
            "policy": policy,
            "operators": trace.operator_count,
            "batch": network.batch,
            "vanilla_bytes": footprint(trace).device_peak_bytes,
            "budget_bytes": V100.memory_bytes,
            "papers_gb": PUBLISHED[network.title, "gb"],
            "papers_ideal": PUBLISHED.get((network.title, policy), ""),
            "vanilla_ms": vanilla_us / 1e3,
            "error": None,
        }
        began = time.process_time()
        try:
            plan = named_policy(name)({0: trace}, V100, V100.memory_bytes, **settings)[0]
        except Exception as error:
            yield row | {"error": message_of(error)}
            continue
        planning_s = time.process_time() - began
        timeline = predicted(trace, plan, V100)
        bound_us = bounds.least_us(as_executed(trace, plan), V100, V100.memory_bytes)
        yield row | {
            "planning_s": planning_s,
            "peak_bytes": timeline.device_peak_bytes,
            "ideal": vanilla_us / timeline.iteration_us,
            "bound": vanilla_us / bound_us,
        }


def checks(rows: Sequence[Row]) -> list[Check]:
    """Check budgets, that no time is below its bound, and that the policies are ahead of swapping on demand."""
    checked = []
    good = [row for row in rows if row["error"] is None]
    on_demand = {row["case"]: row["ideal"] for row in good if row["policy"] == "lru"}
    for row in good:
        what = f"{row['case']}, {row['policy']}"
        peak, budget, least = row["peak_bytes"], row["budget_bytes"], on_demand.get(row["case"], 0.0)
        checked.append(Check("swapadvisor", f"{what}: peak", f"{peak:,}", f"≤ {budget:,}", peak <= budget))
        ideal, bound = row["ideal"], row["bound"]
        within = ideal <= bound * (1 + 1e-6)
        checked.append(Check("swapadvisor", f"{what}: of ideal", f"{ideal:.1%}", f"≤ {bound:.1%} (bound)", within))
        holds = ideal >= least
        checked.append(Check("swapadvisor", f"{what}: of ideal", f"{ideal:.1%}", f"≥ {least:.1%} (lru)", holds))
    return checked


NETWORKS = (WIDE, INCEPTION, NASNET, RNN, BRNN)
TITLES = [network.title for network in NETWORKS]


def measure(title: str) -> Iterator[Row]:
    """Yield the rows of a network."""
    return rows_of(named(NETWORKS, title))
