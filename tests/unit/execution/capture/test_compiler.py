"""A process that compiles nothing does without torch._dynamo, and one that compiles later gets all of it."""

from __future__ import annotations

import subprocess
import sys

STEP = """
import sys
from pg_tensile.execution.capture import compiler
if {deferred}:
    compiler.defer()
import torch
from torch import nn
from pg_tensile.execution.capture import OptimizerSpec, StepSpec, capture

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
batch = [torch.zeros(8, 4)], [torch.zeros(8, dtype=torch.long)]
step = capture(model, *batch, StepSpec(nn.functional.cross_entropy), early_update=True)
state = torch.optim.AdamW(model.parameters()).state_dict()
print(step.trace.to_bytes().hex())
"""
LOADED = "torch._dynamo.convert_frame"


def output(code: str, deferred: bool) -> list[str]:
    """Return the lines that the code prints in an interpreter of its own."""
    command = [sys.executable, "-c", STEP.format(deferred=deferred) + code]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_capturing_loads_no_compiler() -> None:
    deferred = output(f"print({LOADED!r} in sys.modules, compiler.is_loaded())", deferred=True)
    loaded = output(f"print({LOADED!r} in sys.modules, compiler.is_loaded())", deferred=False)
    assert deferred[0] == loaded[0]
    assert (deferred[1], loaded[1]) == ("False False", "True True")


def test_training_without_a_plan_and_a_process_group_load_no_compiler() -> None:
    lines = output(
        """
for optimizer in torch.optim.AdamW(model.parameters(), fused=True), torch.optim.SGD(model.parameters(), lr=0.1):
    model(batch[0][0]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(compiler.is_loaded())
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print(compiler.is_loaded())
print(callable(torch._dynamo.trace_rules.get_legacy_mod_inlinelist), compiler.is_loaded())
print(torch._dynamo.trace_rules.__name__)
""",
        deferred=True,
    )
    assert lines[1:] == ["False", "False", "True True", "torch._dynamo.trace_rules"]


def test_compiling_loads_the_compiler() -> None:
    lines = output(
        """
class Counted(nn.Module):
    def forward(self, x):
        return x * 2 if torch.compiler.is_compiling() else x

compiled = torch.compile(Counted(), backend="eager")
print(compiled(torch.ones(2)).tolist(), compiler.is_loaded())
compiler.defer()  # too late: nothing changes
import torch._dynamo
print(torch._dynamo is sys.modules["torch._dynamo"], hasattr(torch._dynamo, "no_such_name"))
print({part.__module__ for part in (torch._dynamo.disable, torch._dynamo.graph_break)})
""",
        deferred=True,
    )
    assert lines[1:] == ["[2.0, 2.0] True", "True False", "{'torch._dynamo.decorators'}"]
