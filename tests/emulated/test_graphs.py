"""Captured graphs, by torch.accelerator.Graph."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.fixture
def stream() -> torch.Stream:
    return torch.Stream("emulated:0")


def test_captured_work_runs_at_each_replay_and_not_before(stream):
    tensor = torch.zeros(4, device="emulated")
    torch.accelerator.synchronize()
    graph = torch.accelerator.Graph()
    with stream:
        graph.capture_begin()
        assert stream.is_capturing()
        tensor.add_(1)
        result = tensor * 2
        graph.capture_end()
        assert not stream.is_capturing() and tensor.tolist() == [0.0] * 4
        for count in range(1, 4):
            graph.replay()
            assert result.tolist() == [2.0 * count] * 4
    del graph


def test_a_branch_on_another_stream_is_replayed_in_order(control, stream):
    side = torch.Stream("emulated:0")
    tensor = torch.zeros(1 << 16, device="emulated")
    torch.accelerator.synchronize()
    graph = torch.accelerator.Graph()
    with stream:
        graph.capture_begin()
        tensor.add_(1)
        side.wait_stream(stream)
        with side:
            tensor.mul_(3)
        stream.wait_stream(side)
        tensor.sub_(1)
        graph.capture_end()
        control.schedule("random", 3)
        for _ in range(3):
            graph.replay()
        assert tensor[0].item() == ((((0 + 1) * 3 - 1) + 1) * 3 - 1 + 1) * 3 - 1
    assert control.races() == []


def test_a_race_within_a_graph_is_reported_at_its_replay(control, stream):
    side = torch.Stream("emulated:0")
    tensor = torch.zeros(4, device="emulated")
    torch.accelerator.synchronize()
    graph = torch.accelerator.Graph()
    with stream:
        graph.capture_begin()
        side.wait_stream(stream)
        tensor.add_(1)
        with side:
            tensor.mul_(3)
        stream.wait_stream(side)
        graph.capture_end()
        assert control.races() == []
        graph.replay()
    assert len(control.races()) == 1 and "graph: aten::" in control.races()[0]


def test_what_the_host_waits_for_is_forbidden_during_capture(stream):
    tensor = torch.zeros(4, device="emulated")
    for forbidden in (tensor.cpu, stream.synchronize, tensor.nonzero, lambda: tensor[0].item()):
        graph = torch.accelerator.Graph()
        with stream:
            graph.capture_begin()
            with pytest.raises(RuntimeError, match="not permitted"):
                forbidden()
            with pytest.raises(RuntimeError, match="invalidated"):
                graph.capture_end()
            assert not stream.is_capturing()


def test_a_branch_must_be_joined(stream):
    side = torch.Stream("emulated:0")
    graph = torch.accelerator.Graph()
    with stream:
        graph.capture_begin()
        side.wait_stream(stream)
        with side:
            torch.zeros(4, device="emulated")
        with pytest.raises(RuntimeError, match="has not waited for"):
            graph.capture_end()


def test_replays_draw_new_random_numbers(stream):
    graph = torch.accelerator.Graph()
    torch.manual_seed(3)
    with stream:
        graph.capture_begin()
        numbers = torch.rand(100, device="emulated")
        graph.capture_end()
        graph.replay()
        first = numbers.cpu()
        graph.replay()
        second = numbers.cpu()
        torch.manual_seed(3)
        graph.replay()
        assert torch.equal(numbers.cpu(), first) and not torch.equal(first, second)


def test_memory_of_a_graph_is_its_own_until_it_is_gone(stream):
    torch.accelerator.empty_cache()
    reserved = torch.accelerator.memory_reserved(0)
    graph = torch.accelerator.Graph()
    with stream:
        graph.capture_begin()
        torch.ones(5 << 20, device="emulated").sum()
        graph.capture_end()
    held = torch.accelerator.memory_reserved(0)
    assert held > reserved
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(0) == held
    graph.reset()
    torch.accelerator.empty_cache()
    assert torch.accelerator.memory_reserved(0) == reserved


def test_a_training_step_is_captured_whole(stream):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).to("emulated")
    x, y = torch.randn(8, 6, device="emulated"), torch.randn(8, 1, device="emulated")
    plain = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (model, plain)]

    def step(index: int, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizers[index].zero_grad(set_to_none=False)
        nn.functional.mse_loss((model, plain)[index](inputs), targets).backward()
        optimizers[index].step()

    torch.accelerator.synchronize()
    with stream:
        step(0, x, y)  # gradients and state get their places
        graph = torch.accelerator.Graph()
        stream.synchronize()
        graph.capture_begin()
        step(0, x, y)
        graph.capture_end()
        for _ in range(3):
            graph.replay()
        stream.synchronize()
    for _ in range(4):
        step(1, x.cpu(), y.cpu())
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs)
