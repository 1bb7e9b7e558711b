"""Methods side by side on a GPU, at sizes that keep it busy.

Each network trains with the policy `none`, with `joint` and with other methods within 65, 50 and 35 % of the memory
that `none` takes, and with PyTorch's own activation checkpointing, all in interleaved rounds of one run. `joint` has to
be no slower than each policy that has a plan for the same budget, and the simulator has to know the time of each step.
Needs PyTorch for CUDA; PostgreSQL is not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from benchmarks.checks import Check, name_of, plan_checks, simulator_checks, timings_of
from benchmarks.command import Row
from benchmarks.experiments.networks import (
    BERT,
    DENSENET121,
    GPT2,
    INCEPTION3,
    MIXER,
    RESNET50,
    SMALL_RESNET,
    UNET,
    VGG16,
    VIT,
    Network,
)
from benchmarks.results import Results
from benchmarks.scenarios import Scenario, rounds, scenario_section
from benchmarks.tables import table

SECTION = "gpu"
BUDGETS = ("65%", "50%", "35%")
POLICIES = "none,joint,tensile,capuchin,peer:checkpoint"
NOISE = 0.03  # of a ratio of two times measured in the same rounds

NETWORKS = (
    RESNET50._replace(batch=128),
    VGG16._replace(batch=64),
    GPT2._replace(batch=32, inputs=("int64<50257:256",)),
    VIT._replace(batch=256),
    BERT._replace(batch=128),
    UNET._replace(batch=128),
    DENSENET121._replace(batch=64),
    MIXER._replace(batch=256),
    INCEPTION3._replace(batch=64),
)


def scenarios(_device: str, quick: bool) -> list[Scenario]:
    networks, measured = ((SMALL_RESNET,), rounds(1)) if quick else (NETWORKS, rounds(3, iterations=3))
    return [scenario(network, measured) for network in networks]


def scenario(network: Network, measured: tuple[str, ...]) -> Scenario:
    asked = ("--early-update", "--policies", POLICIES, "--budget", ",".join(BUDGETS))
    return Scenario(SECTION, f"{network.title}, batch {network.batch}", (*network.arguments(), *measured, *asked))


def checks(results: Results) -> list[Check]:
    rows = results.titled(SECTION)
    planned = [(title, row) for title, row in rows if row["error"] is None and not row["policy"].startswith("peer")]
    checked = [check for title, row in planned for check in plan_checks(SECTION, name_of(title, row), row)]
    for title, group in groupby(rows, lambda pair: pair[0]):
        checked += rival_checks(title, [row for _, row in group if row["error"] is None])
    checked += simulator_checks(SECTION, timings_of(rows), longer_ms=0.0)
    return checked


def rival_checks(title: str, rows: Sequence[Row]) -> Iterator[Check]:
    """Check that `joint` is no slower than each policy that has a plan for the same budget."""
    joint = {row["budget"]: row["step_ms_median"] for row in rows if row["policy"] == "joint"}
    for row in rows:
        if row["policy"] in ("none", "joint") or row["budget"] is None:
            continue
        mine, its = joint.get(row["budget"]), row["step_ms_median"]
        found = "no plan" if mine is None else f"{mine:.1f} ms"
        holds = mine is not None and mine <= its * (1 + NOISE)
        yield Check(SECTION, f"{name_of(title, row)}: joint beside it", found, f"≤ {its:.1f} ms", holds)


def tables(results: Results) -> list[str]:
    """Return the time of a step beside that without a plan, the least possible one, and the peak of each row."""
    headings = (
        "network", "method", "memory", "peak, MiB", "step, ms", "times `none`", "bound", "simulated, ms", "moved, MiB",
        "recomputed", "results",
    )  # fmt: skip
    return table(headings, [cells(title, row, len(headings)) for title, row in results.titled(SECTION)])


def cells(title: str, row: Row, width: int) -> tuple[str, ...]:
    start = (title, f"`{row['label']}`", row["budget"] or "")
    if row["error"] is not None:
        return (*start, row["error"].splitlines()[0], *[""] * (width - 4))
    peak, step = row["device_peak_bytes"] or row["allocator_peak_bytes"], row["step_ms_median"]
    return (
        *(*start, "" if peak is None else f"{peak / 2**20:.0f}", f"{step:.1f}"),
        f"{step / row['vanilla_step_ms_median']:.3f}",
        *("" if row.get(name) is None else f"{row[name]:.{digits}f}" for name, digits in SHOWN),
        *(f"{((row['bytes_out'] or 0) + (row['bytes_in'] or 0)) / 2**20:.0f}", f"{row['recomputes'] or 0:,}"),
        {True: "identical", False: "different", None: ""}[row["bit_identical"]],
    )


SHOWN = (("least_eor", 3), ("simulated_ms", 1))


BENCHMARK = scenario_section("Methods on a GPU", scenarios, tables, checks, "cuda")
