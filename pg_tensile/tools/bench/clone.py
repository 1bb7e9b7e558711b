"""Parts of the command that only a clone of the repository has, in its folder benchmarks/: the paper's experiments, and
the search for the best plan of a small trace, which is the policy `optimum`."""

from __future__ import annotations

import importlib
import sys
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pg_tensile.errors import OptionError
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies import POLICIES, Policy
from pg_tensile.planning.trace.trace import Trace

ROOT = Path(__file__).resolve().parents[3]


def from_clone(module: str) -> Any:
    """Import a module of benchmarks/, whatever the current folder is. Raises OptionError outside a clone."""
    if not (ROOT / "benchmarks").is_dir():
        raise OptionError(
            "this measurement is not installed with pg_tensile",
            "Run it in a clone of the repository, where make venv installs the command.",
        )
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module(f"benchmarks.{module}")


def optimum(
    traces: Mapping[int, Trace], profile: DeviceProfile, budget: int | None, limit_s: float = 60.0
) -> dict[int, Plan]:
    """Plan one job with the best plan found in `limit_s` seconds; without a budget the plan is empty.

    Raises OptionError for several jobs, outside a clone, or if the solver is not installed; BudgetError and
    TraceTooLargeError.
    """
    if budget is None:
        return dict.fromkeys(traces, NO_EVENTS)
    if len(traces) > 1:
        raise OptionError("the optimum is found for one job only")
    try:
        best = from_clone("optimum.best").best
    except ImportError:
        raise OptionError("the optimum needs a solver", "Install highspy.") from None
    return {job: best(trace, profile, budget, limit_s).plan for job, trace in traces.items()}


KNOWN: Mapping[str, Policy] = ChainMap({"optimum": optimum}, POLICIES)
