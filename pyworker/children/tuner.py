"""The tuner: chooses the values of the next trial of a tuning with Optuna, from the trials before it.

Its supervisor is the controller (supervisors/tunings.py). Each SUGGEST frame has all that is to be known about a tuning
(`tensile_internal._next_suggestion`), and the study is made from it, in memory: a tuner remembers nothing. The
generator of random numbers is seeded by the tuning's seed and the number of the trial, so that the same trials before
it give the same values. SUGGESTED answers with `params`, the value of each key of the space that applies to the chosen
architecture.

The sampler is the tree-structured Parzen estimator (Bergstra et al., Algorithms for Hyper-Parameter Optimization,
2011). Trials that still run are told as running; those that do not fit into the memory violate a constraint.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pg_tensile.errors import OptionError
from pyworker.connection import Connection
from pyworker.wire import FrameType, ProtocolError

if TYPE_CHECKING:
    import optuna

MOST_STARTUP = 10  # trials chosen at random before the estimator is used
SEEDS = 1 << 32
ARCHITECTURE = "architecture"
FEASIBLE, INFEASIBLE = 0.0, 1.0


def run(connection: Connection, hello: dict[str, Any]) -> None:
    """Run the process: answer each request until the supervisor ends it."""
    while True:
        frame = connection.recv()
        assert frame is not None  # no time-out
        if frame.type != FrameType.SUGGEST:
            raise ProtocolError(f"unexpected {frame.type.name} frame")
        connection.send(FrameType.SUGGESTED, header={"params": suggest(frame.header)})


def suggest(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of trial `number` of a tuning.

    `request` is what `tensile_internal._next_suggestion` returns. Raises OptionError if Optuna is not installed."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        hint = "Install it into the environment of pg_tensile.python: pip install optuna."
        raise OptionError("the package optuna, which tune_model needs, is not installed", hint) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(
        n_startup_trials=min(MOST_STARTUP, max(1, request["trials"] // 4)),
        seed=derived_seed(request["seed"], request["number"]),
        multivariate=False,
        constant_liar=True,
    )
    study = optuna.create_study(sampler=sampler, direction="maximize" if request["maximize"] else "minimize")
    params: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the end of a range that is not a whole number of steps is moved
        study.add_trials([_frozen(trial, request) for trial in request["known"]])
        trial = study.ask()
        for domain in request["domains"]:
            if applies(domain, params.get(ARCHITECTURE, request[ARCHITECTURE])):
                params[domain["name"]] = _chosen(trial, domain)
    return params


def derived_seed(seed: int, number: int) -> int:
    """Return the seed of the generator for trial `number`: other trials and other seeds have others."""
    import numpy as np

    entropy = [seed % (1 << 64), number]
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint32)[0]) % SEEDS


def applies(domain: Mapping[str, Any], architecture: str) -> bool:
    """Return whether a key of the space is one of the architecture, or an argument or an option."""
    return domain["types"] is None or architecture in domain["types"]


def _distribution(domain: Mapping[str, Any]) -> optuna.distributions.BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if "choices" in domain:
        return CategoricalDistribution([_name(choice) for choice in domain["choices"]])
    low, high, log = domain["low"], domain["high"], domain.get("log", False)
    if domain["integer"]:
        return IntDistribution(int(low), int(high), log=log, step=int(domain.get("step", 1)))
    return FloatDistribution(float(low), float(high), log=log, step=domain.get("step"))


def _name(choice: Any) -> str:
    """Return the name of a value in a list, which tells 1 from true and 1.0."""
    return json.dumps(choice, sort_keys=True)


def _chosen(trial: optuna.Trial, domain: Mapping[str, Any]) -> Any:
    """Return the value that the sampler chooses for a key."""
    distribution = _distribution(domain)
    arguments = distribution._asdict()
    if "choices" in domain:
        return json.loads(trial.suggest_categorical(domain["name"], **arguments))
    suggest_number = trial.suggest_int if domain["integer"] else trial.suggest_float
    return suggest_number(domain["name"], **arguments)


def _frozen(trial: Mapping[str, Any], request: Mapping[str, Any]) -> optuna.trial.FrozenTrial:
    """Return a trial before this one as the study takes it."""
    import optuna
    from optuna.trial import TrialState

    distributions = {
        domain["name"]: _distribution(domain) for domain in request["domains"] if domain["name"] in trial["params"]
    }
    params = {
        domain["name"]: _name(trial["params"][domain["name"]])
        if "choices" in domain
        else trial["params"][domain["name"]]
        for domain in request["domains"]
        if domain["name"] in distributions
    }
    state, value, constraint = _result(trial)
    return optuna.create_trial(
        state=state,
        value=value if state == TrialState.COMPLETE else None,
        params=params,
        distributions=distributions,
        intermediate_values={1: value} if state == TrialState.PRUNED and value is not None else None,
        constraints={"memory": constraint},
    )


def _result(trial: Mapping[str, Any]) -> tuple[Any, float | None, float]:
    """Return state and value of a trial for the study, and by how much it does not fit into the memory (0: it does)."""
    from optuna.trial import TrialState

    value = trial.get("value")
    value = value if isinstance(value, (int, float)) and math.isfinite(value) else None
    match trial["state"]:
        case "running":
            return TrialState.RUNNING, None, FEASIBLE
        case "finished" if value is not None:
            return TrialState.COMPLETE, float(value), FEASIBLE
        case "pruned" if value is not None:
            return TrialState.PRUNED, float(value), FEASIBLE
        case "infeasible":  # ordered by the memory that they need
            return TrialState.PRUNED, None, float(trial.get("least_bytes") or INFEASIBLE)
        case _:
            return TrialState.FAIL, None, FEASIBLE
