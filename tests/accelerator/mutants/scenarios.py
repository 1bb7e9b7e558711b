"""The scenarios that a mutant of the runtime is run through: small, with work that one place alone puts in order.

Imported in the process of one mutant, after its module was loaded. A scenario raises if something is wrong; besides,
the detector's races, and memory and threads that are left, are errors. The values that scenarios return have to be
those of the runtime without a mutation.
"""

from __future__ import annotations

from pg_tensile.planning.compression.coding import CHUNK_BYTES
from tests.accelerator.leftovers import leftovers
from tests.accelerator.mutants import compressed, copies, training
from tests.accelerator.mutants.harness import CHUNK, SCENARIOS, threads_end_when_joined
from tests.accelerator.mutants.job import Prepared
from tests.emulated.emulated import control

__all__ = ["compressed", "copies", "run", "training"]


def run(prepared: Prepared, expected: dict[str, object] | None) -> dict[str, object]:
    """Run all scenarios and return their values. Raises an error for the first that finds the mutant."""
    CHUNK_BYTES["emulated"] = CHUNK
    found: dict[str, object] = {}
    for function in SCENARIOS:
        name = function.__name__
        try:
            control.reset()
            before = leftovers()
            with control.checked(), threads_end_when_joined():
                found[name] = function(prepared)
            assert leftovers() == before, f"left behind: {leftovers()}, before it was {before}"
            assert expected is None or found[name] == expected[name], f"{found[name]} is not {expected[name]}"
        except BaseException as error:
            error.add_note(f"in the scenario {name}")
            raise
    return found
