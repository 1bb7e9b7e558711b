"""A process that compiles nothing does without torch._dynamo, and one that compiles later gets all of it."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from pg_tensile.execution.capture import compiler
compiler.defer()
import torch
import torch.distributed as dist
from torch import nn
from pg_tensile.execution.capture import OptimizerSpec, StepSpec, capture

def step():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    batch = [torch.zeros(8, 4)], [torch.zeros(8, dtype=torch.long)]
    captured = capture(model, *batch, StepSpec(nn.functional.cross_entropy), early_update=True)
    state = torch.optim.AdamW(model.parameters()).state_dict()
    return captured.trace.to_bytes()

def is_loaded():
    return "torch._dynamo.convert_frame" in sys.modules, compiler.is_loaded()

class Counted(nn.Module):
    def forward(self, x):
        return x * 2 if torch.compiler.is_compiling() else x

without = step()
print("after capturing", *is_loaded())
model = nn.Linear(4, 2)
for optimizer in torch.optim.AdamW(model.parameters(), fused=True), torch.optim.SGD(model.parameters(), lr=0.1):
    model(torch.zeros(8, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("after training", *is_loaded())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
print("in a process group", *is_loaded())
print("rules", callable(torch._dynamo.trace_rules.get_legacy_mod_inlinelist), torch._dynamo.trace_rules.__name__)
print("once used", *is_loaded())
compiler.defer()  # too late: nothing changes
import torch._dynamo
print("module", torch._dynamo is sys.modules["torch._dynamo"], hasattr(torch._dynamo, "no_such_name"))
print("functions", *(part.__module__ for part in (torch._dynamo.disable, torch._dynamo.graph_break)))
print("compiled", torch.compile(Counted(), backend="eager")(torch.ones(2)).tolist())
print("same trace", step() == without)
"""


def test_capturing_and_process_groups_load_no_compiler_and_compiling_does() -> None:
    """In an interpreter of its own, because PyTorch loads it once."""
    lines = subprocess.run([sys.executable, "-c", CODE], check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines == [
        "after capturing False False",
        "after training False False",
        "in a process group False False",
        "rules True torch._dynamo.trace_rules",
        "once used True True",
        "module True False",
        "functions torch._dynamo.decorators torch._dynamo.decorators",
        "compiled [2.0, 2.0]",
        "same trace True",
    ]
