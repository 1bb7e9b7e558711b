"""Validation of plans: every plan passes it before it is executed, whichever policy has made it.

The rules are those of `AccessSequence` (access_sequence.py): every input is resident at every operator, no data are
lost, and the iteration ends in the state in which it starts. Messages name operator, tensor and event (messages.py).
"""

from __future__ import annotations

from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import Boundary, Plan
from pg_tensile.planning.trace.trace import Trace


def validate(trace: Trace, plan: Plan, initial_state: Boundary | None = None, passive: bool = False) -> None:
    """Raise InvalidPlanError, naming the first operator, tensor and event at which `plan` fails, unless it is valid.

    The iteration starts from `initial_state`; None means the plan's own boundary state, in which every iteration ends.
    With `passive`, tensors that are only on the host are swapped in when they are needed, as in the first iteration
    after a change of plan.
    """
    AccessSequence(trace, plan, initial_state, passive).check()
