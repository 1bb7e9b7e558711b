"""The policies available to benchmarks: those of the jobs, and the best plan of a small trace."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

from pg_tensile.errors import OptionError
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import NO_EVENTS, Plan
from pg_tensile.planning.policies import POLICIES, Policy
from pg_tensile.planning.trace.trace import Trace


def optimum(
    traces: Mapping[int, Trace], profile: DeviceProfile, budget: int | None, limit_s: float = 60.0
) -> dict[int, Plan]:
    """Plan one job with optimum.best; without a budget the plan is empty.

    Raises OptionError for several jobs or if the solver is not installed, BudgetError, TraceTooLargeError.
    """
    if budget is None:
        return dict.fromkeys(traces, NO_EVENTS)
    if len(traces) > 1:
        raise OptionError("the optimum is found for one job only")
    try:
        from pg_tensile.tools.bench.optimum.best import best
    except ImportError:
        raise OptionError("the optimum needs a solver", "Install highspy.") from None
    return {job: best(trace, profile, budget, limit_s).plan for job, trace in traces.items()}


KNOWN: Mapping[str, Policy] = ChainMap({"optimum": optimum}, POLICIES)
