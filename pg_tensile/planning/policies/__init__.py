"""Policies: pure functions from the jobs' traces, a device profile and a budget to a plan for each job.

Each policy is one function, `plan`, in a module or package of its own. No policy depends on a clock, the state of a
device or an unseeded random generator: equal arguments give equal plans.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pg_tensile.errors import UnknownPolicyError
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.policies import accudnn, capuchin, lru, none, recompute_all, swap_all, vdnn
from pg_tensile.planning.policies.joint import policy as joint
from pg_tensile.planning.policies.swapadvisor import policy as swapadvisor
from pg_tensile.planning.policies.tensile import rounds
from pg_tensile.planning.trace.trace import Trace

# traces by job, device profile, budget in bytes for all jobs together (each policy says what None means) → plans by job
Policy = Callable[[Mapping[int, Trace], DeviceProfile, int | None], dict[int, Plan]]

POLICIES: dict[str, Policy] = {
    "joint": joint.plan,
    "swapadvisor": swapadvisor.plan,
    "tensile": rounds.plan,
    "capuchin": capuchin.plan,
    "accudnn": accudnn.plan,
    "vdnn": vdnn.plan,
    "lru": lru.plan,
    "none": none.plan,
    "swap_all": swap_all.plan,
    "recompute_all": recompute_all.plan,
}


def named_policy(name: str, policies: Mapping[str, Policy] = POLICIES) -> Policy:
    """Return the policy of that name. Raises UnknownPolicyError with the list of names."""
    policy = policies.get(name)
    if policy is None:
        raise UnknownPolicyError(f'there is no policy "{name}"', hint=f"Use one of {', '.join(policies)}.")
    return policy
