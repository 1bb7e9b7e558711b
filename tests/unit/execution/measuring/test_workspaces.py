"""Workspaces measured before the first iteration are those of the iterations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from pg_tensile.execution.capture import Captured, StepSpec, capture
from pg_tensile.execution.measuring.workspaces import probe
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.device.profile import RTX_A6000

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
    probed = probe(graph, device, 1 << 30)
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
    everything = probe(graph, device, 1 << 30)
    assert torch.equal(torch.get_rng_state(), state)
    limit = 4000
    some = probe(graph, device, limit)
    trace = graph.trace
    for operator in np.flatnonzero(everything != some).tolist():
        accessed = trace.access_tensor[slice(*trace.access_start[operator : operator + 2])]
        assert some[operator] == 0 and trace.tensor_bytes[accessed].sum() > limit
    assert some.any() and (everything != some).any()


def test_known_workspaces_stay() -> None:
    graph, device = captured(network()), HostDevice(PROFILE)
    workspaces = np.full(graph.trace.operator_count, 1 << 20)
    graph = replace(graph, trace=graph.trace.with_latencies(graph.trace.latency_us, workspaces))
    np.testing.assert_array_equal(probe(graph, device, 1 << 30), workspaces)
