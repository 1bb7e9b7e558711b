"""The experiments of `pg-tensile bench NAME…` (suite.py): the tables and figures of TENSILE, and more.

An experiment is a list of cases, each a run of the command with several policies, for one training step or for several
jobs together. A method of all experiments is a line in METHODS, a network a line in networks.PAPER. Experiments that
are requested together share the runs of their common cases. `--quick` uses small networks, few steps and small batches.
Cases run in processes of their own; every row is one policy's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from benchmarks.command import LIGHT
from benchmarks.experiments.networks import PAPER, SMALL_RESNET, SMALL_SERESNET, TINY, Network
from benchmarks.experiments.paper import PUBLISHED
from pg_tensile.tools.bench import options
from pg_tensile.tools.bench.options import PolicyChoice

# The methods compared; {} is the budget, which vDNN does not have. True: `savings` measures it at each of SAVINGS.
METHODS = {
    "vdnn": False,
    "vdnn:which=all": False,
    "lru:budget={}": False,
    "capuchin:budget={}": True,
    "tensile:budget={}": False,
    "tensile:early_update=true:budget={}": True,
    "joint:early_update=true:budget={}": True,
}
# compared as well where that takes little time: TENSILE as in the paper, where it saves what it can, and joint on the
# graph without early updates
SIMULATED = ("tensile", "joint:budget={}")
SHARES = (0.1, 0.5, 0.9)
PEERS = (options.CHECKPOINT, options.SAVE_ON_CPU, *(f"{options.MEMORY_BUDGET}={share}" for share in SHARES))
PHASES = {"latencies=roofline:": "cs", "": "up"}  # of table I, by the latencies planned with
SAVINGS = (20, 40, 50, 65)  # percent
BEYOND = (75, 85)  # percent, for joint only, because some peers save that much
BATCHES = (4, 8, 16, 32, 64)
MIXED_SAVED = round(100 * (PUBLISHED["table4", "mixed", "tensile"].msr or 0))
QUICK_SAVED = 20
SLOWER = 1.8  # times vanilla's step: a policy's, on average
CLOSE = 0.7  # share of the policies that `--light` measures in later rounds, taken to be as fast as vanilla
OPTIMUM_SAVED = (20, 40, 60)


class Case(NamedTuple):
    """Several policies on the same jobs; more than one job run all at once.

    `jobs`: each job's arguments of the command, without the policies. `seconds`: approximate time of one vanilla step
    of all jobs, from Network.step_s.
    """

    title: str
    jobs: tuple[tuple[str, ...], ...]
    policies: tuple[str, ...]
    seconds: float = 0.0


class Size(NamedTuple):
    """Extent of the measurements. `batch`: of a single job; `together`: batch of one of several jobs.

    `simulated`: nothing is executed, so more methods are compared, and memory over time is not recorded.
    """

    quick: bool
    batch: int
    together: int
    rounds: int
    simulated: bool = False


FULL, QUICK = Size(False, 16, 4, 3), Size(True, 4, 4, 1)


class Experiment(NamedTuple):
    """Cases and the table that shows them.

    `columns`: the values of a row that the table shows besides case, policy and the paper's. `simulated`: on a
    simulated RTX A6000, unless a device other than the host was chosen.
    """

    title: str
    cases: Callable[[Size], list[Case]]
    columns: tuple[str, ...]
    simulated: bool = False


# ---- what is run ----------------------------------------------------------------------------------------------------


def steps(network: Network, batch: int, size: Size) -> tuple[str, ...]:
    rounds = ("--rounds", str(size.rounds), "--warmup", "1", "--iterations", "1", *LIGHT)
    return (*network.arguments(batch), *rounds, *(() if size.simulated else ("--timeline",)))


def networks(size: Size) -> tuple[Network, ...]:
    return (SMALL_RESNET, SMALL_SERESNET) if size.quick else PAPER


def papers_budget(network: Network, experiment: str = "table3", method: str = "tensile") -> str:
    """Return the budget with which a network saves as much as a method of the paper saved on it, here TENSILE."""
    published = PUBLISHED.get((experiment, network.title, method))
    return f"{100 - (QUICK_SAVED if published is None else round(100 * (published.msr or 0)))}%"


def methods(budget: str, size: Size) -> tuple[str, ...]:
    return tuple(method.format(budget) for method in (*METHODS, *(SIMULATED if size.simulated else ())))


def single(network: Network, batch: int, size: Size, policies: Sequence[str], title: str = "") -> Case:
    jobs = (steps(network, batch, size),)
    return Case(title or network.title, jobs, ("none", *policies), batch / 16 * network.step_s)


def several(title: str, jobs: Iterable[Network], size: Size, policies: Sequence[str]) -> Case:
    jobs = tuple(jobs)
    arguments = tuple(steps(network, size.together, size) for network in jobs)
    return Case(title, arguments, ("none", *policies), size.together / 16 * sum(network.step_s for network in jobs))


def phases(size: Size) -> list[Case]:
    """Return the cases of table I: plans with predicted latencies (cold start) and with measured ones (updated).

    Each saves what the paper's saves in that phase.
    """
    cases = []
    for network in networks(size):
        budgets = {latencies: papers_budget(network, "table1", phase) for latencies, phase in PHASES.items()}
        asked = [
            f"{policy}:{latencies}early_update=true:budget={budget}"
            for policy in ("tensile", "joint")
            for latencies, budget in budgets.items()
        ]
        cases.append(single(network, size.batch, size, asked))
    return cases


def first_iterations(size: Size) -> list[Case]:
    """Return the cases of table II: the first iteration of plans made before it; Capuchin's is passive, as `lru`."""
    asked = ("tensile:latencies=roofline", "joint:latencies=roofline:early_update=true", "lru")
    return with_papers_budget([f"{policy}:budget={{}}" for policy in asked], size)


def single_tasks(size: Size) -> list[Case]:
    """Return the cases of table III."""
    return [single(network, size.batch, size, methods(papers_budget(network), size)) for network in networks(size)]


def with_papers_budget(asked: Iterable[str], size: Size) -> list[Case]:
    return [
        single(network, size.batch, size, [policy.format(papers_budget(network)) for policy in asked])
        for network in networks(size)
    ]


def mix(size: Size, policies: Sequence[str]) -> Case:
    """Return the case of all networks at once, started one after another in random order."""
    return several("mixed", networks(size), size, policies)


def mixed(size: Size) -> list[Case]:
    """Return the case of table IV."""
    return [mix(size, methods(f"{100 - MIXED_SAVED}%", size))]


def savings(size: Size) -> list[Case]:
    """Return the cases of memory against time, for each network and for all at once.

    They have every method at several savings, and PyTorch's own means.
    """
    asked = [method for method in METHODS if "{}" not in method]
    for saved in SAVINGS[:: 3 if size.quick else 1]:
        asked += [method.format(f"{100 - saved}%") for method, swept in METHODS.items() if swept]
    joint = next(method for method in METHODS if method.startswith("joint"))
    asked += [joint.format(f"{100 - saved}%") for saved in ([] if size.quick else BEYOND)]
    peers = PEERS[:3] if size.quick else PEERS
    alone = [single(network, size.batch, size, [*asked, *peers]) for network in networks(size)]
    return [*alone, mix(size, [*asked, *PEERS[:3]])]  # each additional share compiles every network twice more


def workloads(size: Size) -> list[Case]:
    """Return the cases of Fig. 6: one to four jobs of the same network at once."""
    return [
        several(f"{count} × {network.title}", [network] * count, size, methods(papers_budget(network), size))
        for network in networks(size)
        for count in range(1, 3 if size.quick else 5)
    ]


def batch_sizes(size: Size) -> list[Case]:
    """Return the cases of Fig. 7: batches of 4 to 64, with policies that choose their savings themselves."""
    asked = ("tensile", "tensile:early_update=true", "joint:early_update=true")
    return [
        single(network, batch, size, asked, f"{network.title}, batch {batch}")
        for network in networks(size)
        for batch in (BATCHES[:2] if size.quick else BATCHES)
    ]


def distances(size: Size) -> list[Case]:
    """Return the cases of the distance from the best plan: steps small enough for the program that finds it."""
    budgets = [f"{100 - saved}%" for saved in (OPTIMUM_SAVED[:1] if size.quick else OPTIMUM_SAVED)]
    optimum = "optimum:limit_s=20:early_update=true:budget={}"
    asked = [method.format(budget) for budget in budgets for method in (*METHODS, optimum)]
    return [
        single(network, network.batch, size, list(dict.fromkeys(asked))) for network in TINY[:: 4 if size.quick else 1]
    ]


MEMORY = ("msr", "eor", "cbr", "stall_ms", "recomputes")
TOGETHER = ("msr", "eor", "cbr", "stall_ms")
EXPERIMENTS = {
    "table1": Experiment("Each phase's performance", phases, MEMORY),
    "table2": Experiment("First iteration", first_iterations, ("msr", "first_eor", "eor", "planning_ms")),
    "table3": Experiment("A single task", single_tasks, MEMORY),
    "table4": Experiment("Mixed neural architectures", mixed, TOGETHER),
    "fig6": Experiment("One to four workloads", workloads, TOGETHER),
    "fig7": Experiment("The batch size's influence", batch_sizes, MEMORY),
    "savings": Experiment("Memory against time", savings, MEMORY),
    "optimum": Experiment("Beside the best plan", distances, (*MEMORY, "planning_ms"), simulated=True),
}


# ---- runs -----------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """One measurement for all experiments that have the same case, with all their policies."""

    case: Case
    wanted: dict[str, tuple[str, ...]]  # the policies of each experiment
    simulated: bool = False

    def seconds(self, size: Size) -> float:
        """Estimate the duration in seconds on two otherwise idle cores.

        It counts the steps of eager PyTorch, vanilla and the calibration, and those of policies, which are slower.
        """
        others, first, later = 18 + 3 * size.rounds, 3 * SLOWER, 2 * CLOSE * (size.rounds - 1)
        return self.case.seconds * (others + (first + later) * (len(self.case.policies) - 1))


def runs(names: Iterable[str], size: Size, title: str | None = None) -> list[Run]:
    """Return the runs for these experiments, one for all cases with the same jobs.

    `title`: that of the only case to run; None means all cases.
    """
    by_case: dict[tuple[object, ...], Run] = {}
    for name in dict.fromkeys(names):
        experiment = EXPERIMENTS[name]
        for case in experiment.cases(size):
            if title not in (None, case.title):
                continue
            key = (case.title, case.jobs, experiment.simulated)
            run = by_case.get(key, Run(case, {}, experiment.simulated))
            policies = tuple(dict.fromkeys((*run.case.policies, *case.policies)))
            wanted = run.wanted | {name: case.policies}
            by_case[key] = run._replace(case=case._replace(policies=policies), wanted=wanted)
    return list(by_case.values())


def parsed(policies: Sequence[str]) -> tuple[PolicyChoice, ...]:
    from pg_tensile.tools.bench.clone import KNOWN

    return options.parse_policies(",".join(policies), KNOWN, (None,), False)
