"""Plans on a quiet machine and beside busy processes.

A database server has other work to do. Three networks of other shapes than those of the papers are trained with the
policy `none`, and with `joint` within 50 and 35 % of the memory that `none` takes; once on the machine as it is, and
once beside two processes that keep its cores busy, also while the operators are measured from which the plans are made.
Plans are searched for (policies/joint/plan_search.py), as the server does while a job trains.
All plans of a network share a run, in interleaved rounds, so every time is compared with vanilla's in the same rounds.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.checks import Check, name_of, plan_checks, simulator_checks, timings_of
from benchmarks.command import Row, run_bench
from benchmarks.experiments.networks import SMALL_GPT2, UNTUNED, Network
from benchmarks.results import Results
from benchmarks.scenarios import Scenario, compact, rounds, scenario_section
from benchmarks.tables import COSTS, costs, table
from pg_tensile.execution.measuring.busy_processes import BusyProcesses
from pg_tensile.planning.policies.joint.plan_search import TRIES

QUIET, BUSY = "quiet", "beside busy processes"
PROCESSES = 2
MOST = {"50%": 1.10, "35%": 1.20}  # of the time without a plan, by the share of its memory
# A batch with which the activations are most of the memory
GPT = SMALL_GPT2._replace(
    title="GPT, 6 layers", batch=8, kwargs='{"layers": 6, "width": 384, "vocabulary": 1000}', inputs=("int64<1000:128",)
)
NETWORKS = (GPT, *(network for network in UNTUNED if network.title in ("ViT, 8 layers", "dilated convolutions")))


def scenarios(_device: str, quick: bool) -> list[Scenario]:
    networks = (SMALL_GPT2,) if quick else NETWORKS
    return [scenario(network, section, quick) for network in networks for section in (QUIET, BUSY)]


def scenario(network: Network, section: str, quick: bool) -> Scenario:
    policies = ",".join(["none", *(f"joint:tries={TRIES}:budget={budget}" for budget in MOST)])
    arguments = (*network.arguments(), *rounds(1 if quick else 5), "--early-update", "--policies", policies)
    work = None if section == QUIET else beside_busy
    return Scenario(section, network.title, (*arguments, *(() if work is None else ("--device", "host"))), work=work)


def beside_busy(*arguments: str) -> list[Row]:
    """Run the command beside processes that keep all cores busy."""
    with BusyProcesses(PROCESSES, "cpu"):
        done, rows = run_bench(arguments)
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stderr.strip())
    return [compact(row) for row in rows]


def checks(results: Results) -> list[Check]:
    checked: list[Check] = []
    for section in (QUIET, BUSY):
        rows = results.titled(section)
        checked += simulator_checks(section, timings_of(rows))
        checked += [check for title, row in rows for check in row_checks(section, title, row)]
    return checked


def row_checks(section: str, title: str, row: Row) -> Iterator[Check]:
    """Check results, peak and time."""
    what = f"{name_of(title, row)}, {section}"
    if row["error"] is not None:
        yield Check(section, what, row["error"], "no error", False)
        return
    yield from plan_checks(section, what, row)
    if row["budget"] in MOST:
        times, most = row["step_ms_median"] / row["vanilla_step_ms_median"], MOST[row["budget"]]
        yield Check(section, f"{what}: times `none`", f"{times:.2f}", f"≤ {most:.2f}", times <= most)


def tables(results: Results) -> list[str]:
    """Return the time of a step beside that without a plan, for each network, surrounding and budget."""
    rows = [
        (title, section, row["budget"] or "`none`", *costs(row))
        for section in (QUIET, BUSY)
        for title, row in results.titled(section)
    ]
    return table(("network", "machine", "memory", *COSTS), rows)


BENCHMARK = scenario_section("Plans beside other work", scenarios, tables, checks)
