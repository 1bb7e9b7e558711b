"""SwapAdvisor, CSWAP and AccUDNN beside their papers' results.

Each scenario is a case of one of the modules in systems/, which describe their measurements and checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from benchmarks.checks import Check
from benchmarks.command import Row
from benchmarks.results import Results
from benchmarks.scenarios import Scenario, scenario_section
from benchmarks.systems import batch, codecs, cswap, inference, serving, swapadvisor
from benchmarks.tables import table

Column = tuple[str, str, str]  # heading, key of the row, format
Work = Callable[[], Iterable[Row]]


class System(NamedTuple):
    """One module. `cases`: by title, what yields the rows of each scenario, and its approximate duration in seconds."""

    section: str
    title: str
    papers: str
    module: Any
    cases: Mapping[str, tuple[Work, float]]
    quick: Mapping[str, Work]
    tables: Mapping[str, tuple[Callable[[Row], bool], tuple[Column, ...]]]


def only(run: Callable[..., Iterable[Row]], titles: Sequence[str], seconds: float) -> dict[str, tuple[Work, float]]:
    return {title: (partial(run, only=title), seconds) for title in titles}


SWAPS = (
    "vDNN_all moves what any layer reads; the paper's vDNN_conv, what convolutions do, on a slower link. Orac: swap "
    "time over none if every tensor had the codec that makes it smallest and coding took no time:"
)

SYSTEMS = (
    System(
        "swapadvisor",
        "SwapAdvisor: models eight times the budget",
        "53 to 99 % of ideal throughput with up to 12 times the memory of the GPU (V100); its simulator ranks plans as "
        "they are measured",
        swapadvisor,
        {
            f"{title}, {part}": (partial(swapadvisor.run, only=title, part=part), 420)
            for part in ("policies", "ranking")
            for title in ("wide ResNet", "unrolled LSTM")
        },
        {"quick": partial(swapadvisor.run, True)},
        {
            "": (
                lambda row: row["policy"] != "ranking",
                (
                    ("", "case", ""),
                    ("policy", "policy", "`"),
                    ("step, ms", "step_ms", ",.0f"),
                    ("simulated, ms", "simulated_ms", ",.0f"),
                    ("of ideal", "ideal", ".1%"),
                    ("budget, MiB", "budget_bytes", "MiB"),
                    ("vanilla, MiB", "vanilla_bytes", "MiB"),
                    ("planned in, s", "planning_s", ".1f"),
                ),
            ),
        },
    ),
    System(
        "inference",
        "SwapAdvisor: inference within a budget",
        "up to 4 times less latency than models that share a GPU by turns (ResNet-152)",
        inference,
        {"library": (inference.library, 120), "SQL": (inference.server_rows, 90)},
        {"library": partial(inference.library, 64, 2), "SQL": partial(inference.server_rows, 64, 2)},
        {
            "": (
                lambda row: True,
                (
                    ("", "where", ""),
                    ("link", "link", ""),
                    ("budget of parameters", "share", ".0%"),
                    ("budget, MiB", "budget_bytes", "MiB"),
                    ("peak, MiB", "peak_bytes", "MiB"),
                    ("latency, ms", "latency_ms", ",.0f"),
                    ("in one piece, ms", "whole_ms", ".0f"),
                    ("slowdown", "slowdown", ".2f"),
                    ("link, GB/s", "link_bytes_per_s", "GB"),
                    ("link alone, ms", "link_ms", ",.0f"),
                    ("the same bits", "identical", ""),
                ),
            ),
        },
    ),
    System(
        "serving",
        "SwapAdvisor: several models within a budget",
        "with 4 and 16 ResNet-152 on a GPU and up to 400 requests a second, the 99th percentile is at most twice that "
        "of one model alone; of models that take turns it is 8 times at 300 requests a second and 16 models (figure 8)",
        serving,
        {"Poisson arrivals": (serving.rows, 300)},
        {"quick": partial(serving.rows, 2, 40, 32, "resnet18", (0.2, 0.4), 1)},
        {
            "Within: all models within the budget; turns: one of them at a time; whole: no budget.": (
                lambda row: True,
                (
                    ("", "way", "`"),
                    ("of the rate", "rate", ".0%"),
                    ("requests/s", "requests_per_s", ".1f"),
                    ("p50, ms", "p50_ms", ",.0f"),
                    ("p99, ms", "p99_ms", ",.0f"),
                    ("one after the other, ms", "service_ms", ",.0f"),
                    ("saturated", "saturated", "yes"),
                    ("models on the device", "loaded", ""),
                    ("budget, MiB", "budget_bytes", "MiB"),
                    ("parameters of all, MiB", "parameter_bytes", "MiB"),
                    ("the same bits", "identical", ""),
                ),
            ),
        },
    ),
    System(
        "codecs",
        "CSWAP: codecs and the model of their times",
        "a relative absolute error of 3 % on average",
        codecs,
        {"codecs": (codecs.run, 420)},
        {"quick": partial(codecs.run, True)},
        {
            "": (
                lambda row: row["section"] == "codec",
                (
                    ("codec", "codec", "`"),
                    ("zeros", "zero_share", ".0%"),
                    ("in runs of", "run_words", ""),
                    ("smaller by", "ratio", ".2f"),
                    ("estimated", "estimated_ratio", ".2f"),
                    ("encode, GB/s", "encode_gb_per_s", ".1f"),
                    ("decode, GB/s", "decode_gb_per_s", ".1f"),
                ),
            ),
            "Relative absolute errors of the times for tensors that the model was not fitted to:": (
                lambda row: row["section"] == "model",
                (("codec", "codec", "`"), ("", "direction", ""), ("error", "error", ".1%")),
            ),
        },
    ),
    System(
        "cswap",
        "CSWAP: compressed swaps",
        "swapping takes up to 50.9 % less time, training 20.7 % less on average than with vDNN (V100); 94.2 % of the "
        "decisions are right",
        cswap,
        only(cswap.run, ("AlexNet", "VGG-16", "SqueezeNet", "plain ReLU net", "ResNet-50", "Inception v3"), 360),
        {"quick": partial(cswap.run, True)},
        {
            SWAPS: (
                lambda row: True,
                (
                    ("", "case", ""),
                    ("policy", "policy", "`"),
                    ("compression", "compression", "`"),
                    ("step, ms", "step_ms", ",.0f"),
                    ("step over none", "step_ms_ratio", ".3f"),
                    ("swap time over none", "swap_ms_ratio", ".3f"),
                    ("Orac", "oracle_ratio", ".3f"),
                    ("moved, MiB", "moved_bytes", "MiB"),
                    ("raw, MiB", "raw_bytes", "MiB"),
                    ("decisions right", "decision_accuracy", ".1%"),
                ),
            ),
        },
    ),
    System(
        "batch",
        "AccUDNN: the batch size that fits",
        "ResNet-152 in 8 instead of more than 24 GB; the efficient batch is up to 4.2 times as large within 12 GB",
        batch,
        only(batch.run, ("choice", "memory", "accuracy"), 300),
        {"quick": partial(batch.run, True)},
        {
            "": (
                lambda row: row["case"] == "choice",
                (
                    ("model", "model", ""),
                    ("budget, MiB", "budget_bytes", "MiB"),
                    ("chosen", "chosen", ","),
                    ("rows/s", "measured", ",.0f"),
                    ("predicted", "predicted", ",.0f"),
                    ("best of twelve", "best", ","),
                    ("rows/s", "best_measured", ",.0f"),
                    ("of the best", "of_best", ".1%"),
                ),
            ),
            "A third of the memory:": (
                lambda row: row["case"] == "memory",
                (
                    ("model", "model", ""),
                    ("batch", "batch", ","),
                    ("budget, MiB", "budget_bytes", "MiB"),
                    ("of vanilla's speed", "speed", ".1%"),
                    ("the paper's plan", "papers_speed", ".1%"),
                ),
            ),
            "Digits:": (
                lambda row: row["case"] == "accuracy",
                (
                    ("chosen", "batch", ","),
                    ("learning rate", "learning_rate", ".2g"),
                    ("accuracy", "accuracy", ".2%"),
                    ("with 64 rows", "base_accuracy", ".2%"),
                ),
            ),
        },
    ),
)


def scenarios(_device: str, quick: bool) -> list[Scenario]:
    if quick:
        works = [(system.section, title, work) for system in SYSTEMS for title, work in system.quick.items()]
        return [Scenario(section, title, (), 60.0, work) for section, title, work in works]
    return [
        Scenario(system.section, title, (), seconds, work)
        for system in SYSTEMS
        for title, (work, seconds) in system.cases.items()
    ]


def rows_of(results: Results, system: System) -> list[Row]:
    return [row for _, row in results.titled(system.section)]


def checks(results: Results) -> list[Check]:
    return [
        check._replace(section=system.section)
        for system in SYSTEMS
        for check in system.module.checks(rows_of(results, system))
    ]


def tables(results: Results) -> list[str]:
    lines = []
    for system in SYSTEMS:
        rows = rows_of(results, system)
        if rows:
            lines += [f"## {system.title}", "", f"The paper: {system.papers}.", ""]
        for words, (chosen, columns) in system.tables.items():
            mine = [row for row in rows if chosen(row)]
            lines += [words, ""] if mine and words else []
            lines += table([heading for heading, _, _ in columns], [cells(row, columns) for row in mine])
    return lines


def cells(row: Row, columns: Sequence[Column]) -> list[str]:
    if row.get("error") and isinstance(row["error"], str):
        named = [shown(row.get(key), form) for _, key, form in columns[:2]]
        return [*named, row["error"].splitlines()[0], *[""] * (len(columns) - 3)]
    return [shown(row.get(key), form) for _, key, form in columns]


def shown(value: Any, form: str) -> str:
    if value is None:
        return ""
    if form == "yes":
        return "yes" if value else ""
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if form == "MiB":
        return f"{value / 2**20:,.1f}"
    if form == "GB":
        return f"{value / 1e9:.2f}"
    return f"`{value}`" if form == "`" else f"{value:{form}}"


BENCHMARK = scenario_section("Three more systems", scenarios, tables, checks)
