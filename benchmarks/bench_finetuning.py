"""`make bench-finetuning`: fine-tuning of pretrained transformers within less memory. How it runs: scenarios.py.

MiniLM (6 layers of width 384) and a decoder of GPT-2's size (12 layers of width 768, random weights), with short
sequences, are trained by LoRA and as a whole: with the policy `none`, and with `joint` at 100, 50 and 35 % of the
memory that `none` takes. All plans of a network share a run, in interleaved rounds, so every time is compared with
vanilla's in the same rounds. A budget below the least one of a network has no plan, which is no failure: with LoRA,
most of the memory may be weights.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks.experiments.networks import DECODER, MINILM, SMALL_DECODER, Network
from benchmarks.scenarios import (
    Benchmark,
    Check,
    Results,
    Row,
    Scenario,
    main,
    name_of,
    plan_checks,
    simulator_checks,
    timings_of,
)
from benchmarks.tables import COSTS, costs, table

SECTION = "fine-tuning"
BUDGETS = ("100%", "50%", "35%")
ROUNDS = ("--rounds", "3", "--warmup", "1", "--iterations", "1", "--light")
QUICK = ("--rounds", "1", "--warmup", "1", "--iterations", "1", "--light")
STEPS = 40  # of a run, approximately


def scenarios(_device: str, quick: bool) -> list[Scenario]:
    return [
        scenario(network, QUICK if quick else ROUNDS) for network in ((SMALL_DECODER,) if quick else MINILM + DECODER)
    ]


def scenario(network: Network, rounds: tuple[str, ...]) -> Scenario:
    policies = ",".join(["none", *(f"joint:budget={budget}" for budget in BUDGETS)])
    arguments = (*network.arguments(), *rounds, "--early-update", "--policies", policies)
    return Scenario(SECTION, network.title, arguments, STEPS * network.step_s)


def checks(results: Results) -> list[Check]:
    rows = results.rows(SECTION)
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
    rows = [(title, row["budget"] or "`none`", *costs(row)) for title, row in results.rows(SECTION)]
    return table(("network", "memory", *COSTS), rows)


def no_planning(_device: str, _quick: bool) -> list[Row]:
    return []


BENCHMARK = Benchmark("finetuning", "Fine-tuning within less memory.", scenarios, no_planning, checks, tables)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
