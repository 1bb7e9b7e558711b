"""Fine-tuning of pretrained transformers within less memory.

MiniLM (6 layers of width 384) and a decoder of GPT-2's size (12 layers of width 768, random weights), with short
sequences, are trained by LoRA and as a whole: with the policy `none`, and with `joint` at 100, 50 and 35 % of the
memory that `none` takes. All plans of a network share a run, in interleaved rounds, so every time is compared with
vanilla's in the same rounds. A budget below the least one of a network has no plan, which is no failure: with LoRA,
most of the memory may be weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.checks import Check, name_of, plan_checks, simulator_checks, timings_of
from benchmarks.command import Row
from benchmarks.experiments.networks import DECODER, MINILM, SMALL_DECODER, Network
from benchmarks.results import Results
from benchmarks.scenarios import Scenario, rounds, scenario_section
from benchmarks.tables import COSTS, costs, table

SECTION = "fine-tuning"
BUDGETS = ("100%", "50%", "35%")
STEPS = 40  # of a run, approximately


def scenarios(_device: str, quick: bool) -> list[Scenario]:
    return [scenario(network, 1 if quick else 3) for network in ((SMALL_DECODER,) if quick else MINILM + DECODER)]


def scenario(network: Network, count: int) -> Scenario:
    policies = ",".join(["none", *(f"joint:budget={budget}" for budget in BUDGETS)])
    arguments = (*network.arguments(), *rounds(count), "--early-update", "--policies", policies)
    return Scenario(SECTION, network.title, arguments, STEPS * network.step_s)


def checks(results: Results) -> list[Check]:
    rows = results.titled(SECTION)
    return [
        *simulator_checks(SECTION, timings_of(rows)),
        *(check for title, row in rows for check in row_checks(title, row)),
    ]


def row_checks(title: str, row: Row) -> Iterator[Check]:
    """Check that results are those of eager PyTorch to the bit, and that the peak is within the budget."""
    what = name_of(title, row)
    if row["error"] is not None:
        if row["budget"] in (None, "100%", "50%"):
            yield Check(SECTION, what, row["error"], "no error", False)
        return
    yield from plan_checks(SECTION, what, row)


def tables(results: Results) -> list[str]:
    """Return the time of a step, beside that without a plan, and the peak, for each network and budget."""
    rows = [(title, row["budget"] or "`none`", *costs(row)) for title, row in results.titled(SECTION)]
    return table(("network", "memory", *COSTS), rows)


BENCHMARK = scenario_section("Fine-tuning within less memory", scenarios, tables, checks)
