"""Coded swaps in the runtime: whatever the codec and whoever reads a host copy, every bit is what it was."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pg_tensile.errors import CodecError, LinkError, OutOfDeviceMemoryError
from pg_tensile.execution.capture import OptimizerSpec, StepSpec, capture
from pg_tensile.execution.runtime import compressed_copies, host
from pg_tensile.execution.runtime.compressed_copies import Chunks, HostCopy, Look
from pg_tensile.execution.runtime.executor import Executor
from pg_tensile.execution.runtime.host import HostDevice
from pg_tensile.planning.compression.codec import Codec
from pg_tensile.planning.compression.coding import CHUNK_BYTES, STAGING_BYTES, Coding
from pg_tensile.planning.device.profile import Direction
from pg_tensile.planning.plan.codecs import with_codecs
from pg_tensile.planning.plan.memory import footprint
from pg_tensile.planning.plan.plan import Plan
from pg_tensile.planning.trace.trace import Trace
from tests.unit.executing import FAST, batch, captured_net, eager, net, opened, plan_of, recorded, run, same
from tests.unit.execution.runtime.test_several_graphs import validation_net
from tests.unit.graphs import random_plan

CODECS = [Codec.ZVC, Codec.RLE, Codec.CSR, Codec.LZ4]
CHUNK = CHUNK_BYTES["cpu"]


def coded_plan(trace: Trace, codec: Codec, policy: str = "swap_all") -> Plan:
    """Every swap-out that copies is coded."""
    coding = Coding.none(trace.tensor_bytes)
    coding.codec[:] = codec
    return with_codecs(trace.with_coding(coding), plan_of(policy, trace))


def sparse(size: int, share: float = 0.8) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    values = torch.randn(size // 4, generator=generator)
    values[torch.rand(size // 4, generator=generator) < share] = 0.0
    return values.view(torch.uint8)


# ---- the device ----


@pytest.mark.parametrize("codec", CODECS)
def test_a_coded_copy_moves_fewer_bytes_and_comes_back_as_it_was(codec):
    """Three chunks, one of which does not shrink and travels raw, and a tail of some bytes."""
    dense = torch.randn(CHUNK // 4).view(torch.uint8)
    source = torch.cat([sparse(CHUNK), dense, sparse(CHUNK // 2), torch.ones(3).byte()])
    target, back = torch.empty_like(source), torch.empty_like(source)
    chunks = Chunks.of(codec, torch.empty(0))
    with opened() as device:
        out = device.copy_out(source, target, 0, chunks)
        device.wait(out)
        device.wait(device.copy_in(target, back, 0, chunks))
    assert [chunk.codec for chunk in chunks.coded] == [codec, Codec.NONE, codec]
    assert out.bytes == chunks.moved_bytes < 0.8 * source.numel() and out.raw_bytes == source.numel()
    assert torch.equal(back, source) and torch.equal(HostCopy(target, chunks).read(), source)


def test_a_copy_takes_the_link_for_its_coded_bytes():
    profile = replace(FAST, out_bytes_per_s=5e6, in_bytes_per_s=5e6)
    source = sparse(4 * CHUNK, share=0.99)  # 0.4 s each way
    target, chunks = torch.empty_like(source), Chunks.of(Codec.ZVC, torch.empty(0))
    with closing(HostDevice(profile)) as device, device.iteration():
        out = device.copy_out(source, target, 0, chunks)
        device.wait(out)
        back = device.copy_in(target, source.clone(), 0, chunks)
        device.wait(back)
    link_us = chunks.moved_bytes / 5e6 * 1e6
    assert out.bytes == back.bytes < 0.1 * source.numel()
    assert min(out.end_us - out.start_us, back.end_us - back.start_us) >= 0.99 * link_us


def test_a_coder_that_fails_breaks_the_link(monkeypatch):
    def fails(*_: object) -> int:
        raise CodecError("the coder is broken")

    monkeypatch.setattr(compressed_copies, "encode", fails)
    with opened() as device:
        out = device.copy_out(sparse(CHUNK), torch.empty(CHUNK, dtype=torch.uint8), 0, Chunks.of(1, torch.empty(0)))
        with pytest.raises(LinkError, match="the coder is broken"):
            device.wait(out)


# ---- the executor ----


def trains_as_eager(executor: Executor, losses: list[Tensor], first: int = 0) -> None:
    torch.manual_seed(1) if first == 0 else None
    for number, loss in enumerate(losses, first):
        assert torch.equal(executor.step(*batch(number)).loss, loss)


@pytest.mark.parametrize("codec", CODECS)
def test_losses_and_weights_are_those_of_pytorch(start, codec):
    reference, losses = eager(3)
    plan = coded_plan(captured_net().trace, codec)
    assert plan.rows["codec"].any()
    executor = start(plan)
    executor.recording = True
    trains_as_eager(executor, losses)
    assert same(executor.state_dict().model, reference.model.state_dict())
    record = recorded(executor)
    assert record.bytes_out < record.raw_bytes_out and record.bytes_in < record.raw_bytes_in
    assert record.raw_bytes_out == sum(
        transfer.raw_bytes for transfer in record.transfers if transfer.direction == Direction.OUT
    )
    assert executor.counters.bytes_out < executor.counters.raw_bytes_out


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_with_a_codec_for_each_tensor_change_no_bit(start, seed):
    """Swaps of parts of the iteration, of what operators change in place, and across its end, with recomputations."""
    reference, losses = eager(3)
    trace = captured_net().trace
    coding, random = Coding.none(trace.tensor_bytes), Random(seed)
    coding.codec[:] = random.choices([0, *CODECS], k=trace.tensor_count)
    executor = start(with_codecs(trace.with_coding(coding), random_plan(Random(f"coded {seed}"), trace)))
    trains_as_eager(executor, losses)
    assert same(executor.state_dict().model, reference.model.state_dict())


def test_plans_change_between_codecs_and_none(start):
    """Also in the middle of swaps of persistent tensors, whose copies outlive the plan that made them."""
    reference, losses = eager(6)
    trace = captured_net().trace
    executor = start(coded_plan(trace, Codec.ZVC))
    torch.manual_seed(1)
    plans = [plan_of("swap_all", trace), coded_plan(trace, Codec.LZ4), plan_of("none", trace)]
    plans += [coded_plan(trace, Codec.CSR), plan_of("recompute_all", trace)]
    assert torch.equal(executor.step(*batch(0)).loss, losses[0])
    for number, plan in enumerate(plans, 1):
        executor.change_plan(plan)
        assert torch.equal(executor.step(*batch(number)).loss, losses[number])
        assert any(copy.chunks for copy in executor.inspect().copies.values()) == plan.rows["codec"].any()
    assert same(executor.state_dict().model, reference.model.state_dict())


def test_state_is_read_written_and_lent_while_it_lies_coded_on_the_host(start):
    reference, losses = eager(4)
    model = net()
    executor = start(coded_plan(captured_net().trace, Codec.RLE), model=model)
    trains_as_eager(executor, losses[:2])
    assert any(copy.chunks is not None for copy in executor.inspect().copies.values())
    saved, generator = executor.state_dict(), torch.get_rng_state()
    trains_as_eager(executor, losses[2:3], 2)
    executor.load_state_dict(saved)
    inside = executor.inspect()
    assert all(inside.copies[key].chunks is None for key in inside.shells)
    with executor.resident():
        assert same(dict(model.state_dict()), saved.model)
    torch.set_rng_state(generator)
    trains_as_eager(executor, losses[2:], 2)
    executor.close()
    assert same(dict(model.state_dict()), reference.model.state_dict())


def test_an_evaluation_reads_coded_copies(start):
    trace = captured_net().trace
    results = []
    for plan in (plan_of("swap_all", trace), coded_plan(trace, Codec.ZVC)):
        executor = start(plan)
        executor.add(validation_net())
        run(executor, 2)
        results.append((executor.evaluate(*batch(9, 5)), run(executor, 1, first=2)))
    (raw, raw_loss), (packed, packed_loss) = results
    assert torch.equal(raw.loss, packed.loss) and torch.equal(raw_loss[0], packed_loss[0])
    assert all(map(torch.equal, raw.outputs, packed.outputs))


def test_staging_counts_against_the_budget(start):
    trace = captured_net().trace
    plan = coded_plan(trace, Codec.ZVC)
    needed = footprint(trace, plan).device_peak_bytes
    assert needed == footprint(trace, plan_of("swap_all", trace)).device_peak_bytes + STAGING_BYTES["cpu"]
    executor = start(plan, budget=needed)
    executor.recording = True
    run(executor, 1)
    assert recorded(executor).device_peak_bytes == executor.counters.device_peak_bytes == needed
    with pytest.raises(OutOfDeviceMemoryError):
        run(start(plan, budget=needed - 1), 1)


# ---- sparsity ----


class Rectified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 4096), nn.Linear(4096, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


def test_an_executor_tells_how_sparse_what_it_swaps_out_is():
    """Its statistics cover an activation of 8 MiB, which is sampled, and all others that are swapped out."""
    torch.manual_seed(0)
    model, x, y = Rectified(), torch.randn(512, 64), torch.randint(0, 10, (512,))
    spec = StepSpec(F.cross_entropy, OptimizerSpec("sgd", 0.0))
    captured = capture(model, [x], [y], spec)
    plan = plan_of("swap_all", captured.trace)
    with torch.no_grad():
        expected = float((F.relu(model.first(x)) == 0).double().mean())
    with opened() as device, closing(Executor(captured, model, device, plan)) as executor:
        executor.measure_sparsity()
        executor.step([x], [y])
        assert executor.statistics() == {}, "the first iteration is verified"
        executor.step([x], [y])
        statistics = executor.statistics()
    swapped = {event.tensor for event in plan.events if event.kind == 1}
    assert statistics.keys() <= swapped and statistics
    trace = captured.trace
    (rectified,) = (t for t in statistics if trace.target[int(trace.tensor_first[t])] == "aten.relu.default")
    assert statistics[rectified].zero_share == pytest.approx(expected, abs=0.02)
    assert statistics[rectified].run_share == pytest.approx(expected * (1 - expected), abs=0.02)
    weights = [statistics[t].zero_share for t in statistics if trace.tensor_name[t] == "second.weight"]
    assert all(share < 0.01 for share in weights)


@pytest.mark.parametrize("shape", [(4096, 1024), (3000, 2304)])  # of the first, a 512th is a number of whole rows
@pytest.mark.parametrize("dimension", [0, 1], ids=["rows", "columns"])
def test_a_sample_tells_how_many_rows_or_columns_of_a_matrix_are_zero(shape, dimension):
    """As in the gradient of a layer some of whose inputs or outputs are never above zero."""
    if dimension == 0:
        used = torch.rand(shape[0], generator=torch.Generator().manual_seed(0)) < 0.6
        matrix = torch.ones(shape) * used[:, None]
    else:
        used = torch.arange(shape[1]) >= 0.4 * shape[1]
        matrix = torch.ones(shape) * used
    look = Look(4)
    look.take(matrix.view(torch.uint8).reshape(-1))
    statistics = look.statistics()
    assert statistics is not None and look.sample is not None and look.sample.numel() <= 1 << 19
    assert statistics.zero_share == pytest.approx(1 - float(used.float().mean()), abs=0.07)


def test_a_lane_forgives_what_it_overslept_but_no_more(monkeypatch):
    """Coding ended now, after 0.9 ms: that counts from when the lane should have begun, 0.1 ms before it did."""
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    assert host._ended(9.9990, 9.9991) == pytest.approx(9.9999)
    assert host._ended(9.0, 9.9991) == pytest.approx(9.9998)
