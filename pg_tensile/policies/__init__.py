"""Policies: pure functions from the jobs' traces, a device profile and a budget to a plan for each job.

One module a policy, one function each. None of them looks at a clock, a device or a random number: equal arguments give
equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pg_tensile.errors import UnknownPolicyError
from pg_tensile.plan import Plan
from pg_tensile.policies import (
    accudnn,
    capuchin,
    joint,
    lru,
    none,
    recompute_all,
    swap_all,
    swapadvisor,
    tensile,
    vdnn,
)
from pg_tensile.profile import DeviceProfile
from pg_tensile.trace import Trace

# traces by job, the device, the bytes that all jobs together may take (None: what the device has) → plans by job
Policy = Callable[[Mapping[int, Trace], DeviceProfile, int | None], dict[int, Plan]]

POLICIES: dict[str, Policy] = {
    "joint": joint.plan,
    "swapadvisor": swapadvisor.plan,
    "tensile": tensile.plan,
    "capuchin": capuchin.plan,
    "accudnn": accudnn.plan,
    "vdnn": vdnn.plan,
    "lru": lru.plan,
    "none": none.plan,
    "swap_all": swap_all.plan,
    "recompute_all": recompute_all.plan,
}


def named_policy(name: str, known: Mapping[str, Policy] = POLICIES) -> Policy:
    """The policy of that name. Raises UnknownPolicyError with the list of names."""
    policy = known.get(name)
    if policy is None:
        raise UnknownPolicyError(f'there is no policy "{name}"', hint=f"Use one of {', '.join(known)}.")
    return policy
