"""Workspaces measured before the first iteration are those of the iterations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pg_tensile.errors import OutOfDeviceMemoryError
from pg_tensile.execution.capture import Captured, StepSpec, capture
from pg_tensile.execution.measuring.single_operators import Alone, executing
from pg_tensile.execution.measuring.workspaces import probe
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.device.profile import RTX_A6000
from pg_tensile.planning.plan.allocator import plan_bytes
from pg_tensile.planning.plan.plan import Plan

PROFILE = replace(RTX_A6000, kind="host")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.1), nn.Flatten(), nn.Linear(288, 5)
    )


def captured(model: nn.Module) -> Captured:
    return capture(model, [torch.zeros(4, 3, 8, 8)], [torch.zeros(4, dtype=torch.int64)], StepSpec(F.cross_entropy))


def test_operators_alone_take_what_they_take_in_an_iteration() -> None:
    model = network()
    graph, device = captured(model), HostDevice(PROFILE)
    probed = probe(graph, device, 1 << 30).trace.workspace_bytes
    with Executor(graph, model, device) as executor:
        executor.step([torch.rand(4, 3, 8, 8)], [torch.zeros(4, dtype=torch.int64)])
        executor.measure()
        for _ in range(2):
            executor.step([torch.rand(4, 3, 8, 8)], [torch.zeros(4, dtype=torch.int64)])
        measured = executor.measurement().workspace_bytes
    assert measured.any()
    assert (probed >= measured).all(), np.flatnonzero(probed < measured)


def test_generators_stay_and_what_does_not_fit_is_left_out() -> None:
    graph, device, state = captured(network()), HostDevice(PROFILE), torch.get_rng_state()
    everything = probe(graph, device, 1 << 30).trace.workspace_bytes
    assert torch.equal(torch.get_rng_state(), state)
    limit = 4000
    some = probe(graph, device, limit).trace.workspace_bytes
    trace = graph.trace
    for operator in np.flatnonzero(everything != some).tolist():
        accessed = trace.access_tensor[slice(*trace.access_start[operator : operator + 2])]
        assert some[operator] == 0 and trace.tensor_bytes[accessed].sum() > limit
    assert some.any() and (everything != some).any()


def test_known_workspaces_stay() -> None:
    graph, device = captured(network()), HostDevice(PROFILE)
    workspaces = np.full(graph.trace.operator_count, 1 << 20)
    graph = replace(graph, trace=graph.trace.with_latencies(graph.trace.latency_us, workspaces))
    np.testing.assert_array_equal(probe(graph, device, 1 << 30).trace.workspace_bytes, workspaces)


class Recurrent(nn.Module):
    """A classifier of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.LSTM(16, 32, num_layers=2, batch_first=True), nn.Linear(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states: torch.Tensor = self.layers(x)[0]
        logits: torch.Tensor = self.last(states[:, -1])
        return logits


class Attention(nn.Module):
    """Attention of each element of a sequence to all."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(16, 4, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.last(self.attention(x, x, x, need_weights=False)[0].mean(1))
        return logits


class Bags(nn.Module):
    """Means and maxima of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.means, self.maxima, self.last = (
            nn.EmbeddingBag(9, 16),
            nn.EmbeddingBag(9, 16, mode="max"),
            nn.Linear(16, 5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = (x[..., 0] * 9).long()
        logits: torch.Tensor = self.last(self.means(words) + self.maxima(words))
        return logits


class Groups(nn.Module):
    """A norm over groups of channels, between convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(20, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.LazyLinear(5))
        self.layers(torch.zeros(1, 20, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(x)
        return logits


@pytest.mark.parametrize("kind", [Recurrent, Attention, Bags, Groups])
def test_all_memory_of_composite_operators_is_known_before_the_first_iteration(kind: type[nn.Module]) -> None:
    """Those of a library say neither what they take nor how large what they keep for the backward pass is."""
    model, inputs, targets = kind(), [torch.rand(32, 20, 16)], [torch.zeros(32, dtype=torch.int64)]
    graph, device = capture(model, inputs, targets, StepSpec(F.cross_entropy)), HostDevice(PROFILE)
    probed = probe(graph, device, 1 << 30)
    alone = Alone(probed, device, 1 << 30)
    with executing(device):
        alone.iteration(device.allocator())
    assert not alone.failed
    with Executor(probed, model, device) as executor:
        executor.step(inputs, targets)
        executor.measure()
        for _ in range(2):
            executor.step(inputs, targets)
        np.testing.assert_array_equal(executor.trace.tensor_bytes, probed.trace.tensor_bytes)
        assert (executor.trace.workspace_bytes == probed.trace.workspace_bytes).all()
    if kind is Recurrent:
        assert plan_bytes(probed.trace) > 2 * plan_bytes(graph.trace)


def test_what_a_first_iteration_that_does_not_fit_has_found_is_in_the_trace() -> None:
    """Then the next plan is made with it; so a job whose budget does suffice goes on."""
    model, inputs, targets = Recurrent(), [torch.rand(32, 20, 16)], [torch.zeros(32, dtype=torch.int64)]
    graph, device = capture(model, inputs, targets, StepSpec(F.cross_entropy)), HostDevice(PROFILE)
    needed = plan_bytes(probe(graph, device, 1 << 30).trace)
    device = HostDevice(PROFILE, budget_bytes=plan_bytes(graph.trace))
    with Executor(graph, model, device) as executor:
        while True:
            before = executor.trace
            try:
                executor.step(inputs, targets)
                break
            except OutOfDeviceMemoryError as error:
                assert (executor.trace.tensor_bytes > before.tensor_bytes).any(), error
                executor.change_plan(Plan.build([]), budget_bytes=plan_bytes(executor.trace))
        assert plan_bytes(graph.trace) < plan_bytes(executor.trace) <= needed
