"""Staging memory and codecs for traces whose swaps are compressed, the same for every policy (CSWAP, section IV)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Concatenate, ParamSpec

from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.codecs import reserved_bytes, with_codecs
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Trace

Options = ParamSpec("Options")
Planning = Callable[Concatenate[Mapping[int, Trace], DeviceProfile, int | None, Options], dict[int, Plan]]


def coded(policy: Planning[Options]) -> Planning[Options]:
    """Return the policy with staging memory reserved in its budget, and with codecs in its plans."""

    @wraps(policy)
    def plan(
        traces: Mapping[int, Trace],
        profile: DeviceProfile,
        budget_bytes: int | None,
        *args: Options.args,
        **kwargs: Options.kwargs,
    ) -> dict[int, Plan]:
        if budget_bytes is not None:
            budget_bytes = max(0, budget_bytes - sum(map(reserved_bytes, traces.values())))
        plans = policy(traces, profile, budget_bytes, *args, **kwargs)
        return {job: with_codecs(traces[job], plan) for job, plan in plans.items()}

    return plan
