"""Several jobs at once: real processes, each with a model of its own.

Long: each test starts processes that import PyTorch and train.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.together import rounds
from benchmarks.together.job_process import Inspection, JobError, Jobs, Measured, digest_of, start_server
from benchmarks.together.rounds import Entrant, TogetherRow, empty_row, filled_row, run_together
from pg_tensile.errors import MeasurementError
from pg_tensile.execution.runtime.record import Counters
from pg_tensile.execution.runtime.state import TrainingState
from pg_tensile.planning import policies
from pg_tensile.planning.device.profile import GB, RTX_A6000
from pg_tensile.planning.plan.memory import floor_bytes, footprint
from pg_tensile.planning.plan.plan import NO_EVENTS
from pg_tensile.tools.bench.contenders import Turn
from pg_tensile.tools.bench.measured import MeasuredBench
from pg_tensile.tools.bench.options import CHECKPOINT, SAVE_ON_CPU, VANILLA, BenchOptions, PolicyChoice
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.cli.bench import parse
from tests.unit.graphs import chain

pytestmark = pytest.mark.long

MODELS = '''
import os
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


class Blocks(nn.Module):
    def __init__(self, depth=3):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum(1)


class Tired(Blocks):
    """Does not last: the third step that PyTorch itself executes raises; or ends the process."""

    def __init__(self, fatal=False):
        super().__init__()
        self.fatal, self.steps = fatal, 0

    def forward(self, x):
        self.steps += type(x) is torch.Tensor  # not while it is captured
        if self.steps == 3:
            if self.fatal:
                os._exit(1)
            raise RuntimeError("I am tired")
        return super().forward(x)


class MoodyBlock(Block):
    """Other numbers every other time that PyTorch itself executes it."""

    times = 0

    def forward(self, x):
        self.times += type(x) is torch.Tensor
        return super().forward(2 * x if self.times and self.times % 2 == 0 else x)


class Moody(Blocks):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MoodyBlock() for _ in range(2))


class Flat(nn.Module):
    """Without blocks."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(128, 128)

    def forward(self, x):
        return self.head(x).kthvalue(7, 1).values


def undecided():
    """Another network in the first process than in all others."""
    try:
        with open("first", "x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        pass
    return Net(4 if Path("first").read_text() == str(os.getpid()) else 5)


def broken():
    raise ValueError("no such thing")
'''

WORN = '''
from collections import deque

import torch
from torch import nn

SEEN, REPEATED = deque(maxlen=4), []


@torch.library.custom_op("nets::tanh", mutates_args=())
def tanh(x: torch.Tensor) -> torch.Tensor:
    """Can be computed again a few times only."""
    if float(x.sum()) in SEEN:
        REPEATED.append(x)
        if len(REPEATED) >= 6:
            SEEN.clear()
            raise RuntimeError("it is worn out")
    SEEN.append(float(x.sum()))
    return torch.tanh(x)


@tanh.register_fake
def _(x):
    return torch.empty_like(x)


def keep(ctx, inputs, output):
    ctx.save_for_backward(output)


def backward(ctx, gradient):
    (y,) = ctx.saved_tensors
    return gradient * (1 - y * y)


tanh.register_autograd(backward, setup_context=keep)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = tanh(layer(x))
        return x.sum(1)
'''
LINK_GBPS = 0.1
NONE = PolicyChoice(VANILLA, VANILLA)
PEERS = PolicyChoice(CHECKPOINT, CHECKPOINT), PolicyChoice(SAVE_ON_CPU, SAVE_ON_CPU)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "nets.py").write_text(MODELS)
    (tmp_path / "worn.py").write_text(WORN)
    start_server()  # where the repository is, which it imports
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("nets", None)


def job(model: str = "nets.py:Net", kwargs: str = "{}", asked: str = "none", link: float = 2) -> BenchOptions:
    step = ("--model", model, "--kwargs", kwargs, "--input", "float32:128", "--batch", "256", "--rounds", "1")
    return parse(["bench", *step, "--policies", asked, "--early-update", "--threads", "1", "--link", str(link)])


# ---- policies -------------------------------------------------------------------------------------------------------


def test_jobs_train_together_within_one_budget_and_get_the_same_weights(folder, monkeypatch):
    def fails(*_: Any) -> None:
        raise ValueError("no plan today")

    monkeypatch.setitem(policies.POLICIES, "fails", fails)
    asked = "none,joint:budget=75%,fails:budget=50%,swap_all,none"
    jobs = [job(asked=asked), job(kwargs='{"depth": 6}')]
    rows: list[Any] = run_together(jobs, jobs[0].policies, 2, 3, Progress())
    none, joint, failed, all_out = rows
    assert none.eor == 1 and none.msr == 0
    assert none.peak_bytes == none.vanilla_peak_bytes and none.bytes_moved == 0 and none.error is None
    assert joint.error is None and joint.bit_identical and joint.bytes_moved + joint.eor > 0
    assert joint.device_peak_bytes <= joint.budget_bytes == int(0.75 * none.vanilla_peak_bytes)
    assert joint.msr >= 0.25 and len(joint.job_eors) == len(joint.job_ms) == 2
    assert sum(joint.job_ms) / sum(none.job_ms) == pytest.approx(joint.eor)
    assert len(joint.round_ms) == 2 and joint.gradient_difference is None
    assert failed.error == "ValueError: no plan today" and failed.peak_bytes is failed.eor is failed.round_ms is None
    assert all_out.bit_identical and all_out.bytes_moved > joint.bytes_moved
    assert 0 < all_out.floor_bytes <= all_out.device_peak_bytes < joint.device_peak_bytes
    assert all_out.link_gbps == 2.0 and all_out.jobs == ["nets.py:Net"] * 2


def test_a_plan_that_is_too_large_is_an_error(folder):
    jobs = [job(asked="swap_all:budget=1%")]
    rows: list[Any] = run_together(jobs, jobs[0].policies, 1, 2, Progress())
    none, row = rows
    assert none.error is None and "more than the budget of" in row.error and row.bit_identical is None


def test_a_policy_that_fails_in_one_job_is_out_and_the_others_go_on(folder):
    jobs = [job(asked="recompute_all,swap_all"), job("worn.py:Net")]
    rows: list[Any] = run_together(jobs, jobs[0].policies, 2, 2, Progress())
    none, worn, swapped = rows
    assert worn.error == "job 2 failed: RuntimeError: it is worn out"
    assert worn.peak_bytes is worn.job_ms is worn.bit_identical is None
    for row in (none, swapped):
        assert row.error is None and row.bit_identical and len(row.round_ms) == 2


# ---- peers ----------------------------------------------------------------------------------------------------------


def alone(options: BenchOptions) -> list[Any]:
    """Rows of the first two peers."""
    options = replace(options, policies=PEERS, light="a test")
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        return MeasuredBench(options, Progress()).run().rows
    finally:
        torch.set_num_threads(threads)


def test_peers_take_their_turns_beside_policies(folder):
    names = "none,peer:checkpoint,peer:save_on_cpu"
    jobs = [job("nets.py:Blocks", kwargs, names, LINK_GBPS) for kwargs in ('{"depth": 2}', "{}")]
    rows: list[Any] = run_together(jobs, jobs[0].policies, 1, 3, Progress())
    none, *of_peers = rows
    checkpoint, saved = of_peers
    for row in of_peers:
        assert row.error is None and row.bit_identical and row.gradient_difference == 0
        assert row.peak_bytes <= row.device_peak_bytes < none.device_peak_bytes
        assert row.msr == pytest.approx(1 - row.peak_bytes / none.peak_bytes)
        assert row.eor == pytest.approx(sum(row.job_ms) / sum(none.job_ms)) and len(row.job_eors) == 2
        assert row.budget is row.budget_bytes is row.planning_ms is None
    expected = [alone(each) for each in jobs]
    for row, one, other in zip((checkpoint, saved), *expected, strict=True):
        assert row.peak_bytes == one.peak_bytes + other.peak_bytes
        assert row.device_peak_bytes == pytest.approx(one.device_peak_bytes + other.device_peak_bytes, rel=0.002)
    assert checkpoint.bytes_moved is checkpoint.stall_ms is None
    assert saved.bytes_moved == sum(2 * each[1].bytes_out for each in expected)
    # Nothing overlaps, and each has half of the link.
    assert sum(saved.job_ms) > saved.stall_ms > 0.9 * 1e3 * saved.bytes_moved / (LINK_GBPS / 2 * GB)


def test_a_peer_that_cannot_be_had_in_one_job_is_out_with_all(folder):
    names = "none,peer:checkpoint,peer:unified_memory,peer:save_on_cpu"
    jobs = [job("nets.py:Blocks", asked=names), job("nets.py:Flat")]
    rows: list[Any] = run_together(jobs, jobs[0].policies, 1, 2, Progress())
    none, checkpoint, unified, saved = rows
    assert checkpoint.error == "job 2 failed: the model has no sequence of blocks to checkpoint"
    assert "job 1 failed: unified memory" in unified.error and unified.gradient_difference is None
    assert none.error is saved.error is None and saved.bit_identical


# ---- the processes --------------------------------------------------------------------------------------------------


def test_a_peer_that_fails_beside_others_is_out_and_the_others_go_on(folder):
    names = "none,peer:checkpoint,swap_all"
    jobs = [job("nets.py:Blocks", asked=names), job("nets.py:Tired")]
    rows: list[Any] = run_together(jobs, jobs[0].policies, 2, 3, Progress())
    none, tired, swapped = rows
    assert tired.error == "job 2 failed: RuntimeError: I am tired" and tired.peak_bytes is None
    for row in (none, swapped):
        assert row.error is None and row.bit_identical and len(row.round_ms) == 2


def ready(processes: Jobs) -> list[Measured]:
    measured = processes.measure()
    processes.share_link(RTX_A6000)
    return measured


def test_a_job_that_fails_at_any_time_can_be_asked_again(folder):
    plans = dict.fromkeys(range(2), NO_EVENTS)
    with Jobs([job("nets.py:Flat"), job("nets.py:Tired")]) as processes:
        ready(processes)
        expected = processes.turn(NONE, plans, 1, [0, 1])
        running = at_rest(processes)
        with pytest.raises(JobError, match=r"^job 1 failed: the model has no sequence of blocks to checkpoint$"):
            processes.turn(PEERS[0], {}, 1, [1, 0])  # before the turn
        assert left_over(processes, running) == [0, 0]
        with pytest.raises(JobError, match=r"^job 2 failed: RuntimeError: I am tired$"):
            processes.turn(PEERS[1], {}, 4, [0, 1])  # in the steps that count
        with pytest.raises(JobError, match=r"^job 2 failed: RuntimeError: I am tired$"):
            processes.turn(PEERS[1], {}, 1, [1, 0], gap_s=1.0)  # after them, while it waits for the other
        assert left_over(processes, running) == [0, 0]
        found = processes.turn(NONE, plans, 1, [1, 0])
        assert [turn.digest for turn in found] == [turn.digest for turn in expected]


def at_rest(processes: Jobs) -> list[int]:
    """The least that is seen within a second: a thread that ends may take a moment."""
    seen = []
    for _ in range(20):
        seen.append(threads(processes))
        time.sleep(0.05)
    return [min(each) for each in zip(*seen, strict=True)]


def left_over(processes: Jobs, before: list[int]) -> list[int]:
    """Return the number of new threads, as soon as it is 0, or after ten seconds."""
    ends = time.monotonic() + 10
    while any(left := [max(0, now - then) for now, then in zip(threads(processes), before, strict=True)]):
        if time.monotonic() > ends:
            break
        time.sleep(0.05)
    return left


def threads(processes: Jobs) -> list[int]:
    """A device that is not closed has two for its link."""
    return [len(os.listdir(f"/proc/{process.pid}/task")) for process in processes._processes]


def test_first_steps_may_come_before_the_turn(folder):
    """So that a job whose first step takes longer does not miss the others' steps; it trains for no step more."""
    plans = dict.fromkeys(range(2), NO_EVENTS)
    with Jobs([job(), job()]) as processes:
        ready(processes)
        turns = [
            *processes.turn(NONE, plans, 2, [0, 1], gap_s=0.3),
            *processes.turn(NONE, plans, 2, [0, 1], gap_s=0.3, settle=True),
            *processes.turn(PEERS[0], {}, 2, [0, 1], gap_s=0.3, settle=True),
        ]
    assert len({turn.digest for turn in turns}) == 1
    assert all(len(turn.step_ms) == 2 for turn in turns)
    assert all(turn.totals is not None and turn.totals.iterations == 2 for turn in turns[:4])


def test_jobs_that_are_the_same_are_measured_once(folder):
    jobs = [job("nets.py:Flat"), job("nets.py:Flat"), replace(job("nets.py:Flat"), seed=2)]
    with Jobs(jobs) as processes:
        first, second, third = ready(processes)
        assert second is first and third.vanilla.fingerprint == first.vanilla.fingerprint
        assert not np.array_equal(third.vanilla.latency_us, first.vanilla.latency_us)
        turns = processes.turn(NONE, dict.fromkeys(range(3), NO_EVENTS), 1, [0, 1, 2])
        vanilla = footprint(first.vanilla)
        assert [turn.totals and turn.totals.device_peak_bytes for turn in turns] == [vanilla.device_peak_bytes] * 3
        assert vanilla.device_peak_bytes > vanilla.peak_bytes  # the workspaces are known in every process
        saved = processes.inspect(PEERS[1])
        assert saved[1] is saved[0] is not saved[2]


def test_jobs_with_other_graphs_are_measured_each(folder):
    with Jobs([job("nets.py:undecided"), job("nets.py:undecided")]) as processes:
        first, second = processes.measure()
    assert first.vanilla.fingerprint != second.vanilla.fingerprint
    assert first.step_ms != second.step_ms and second.vanilla.latency_us[1:-1].min() > 0


def test_a_job_that_cannot_be_measured_is_named(folder):
    jobs = [job(), job("nets.py:broken")]
    with Jobs(jobs) as processes, pytest.raises(MeasurementError, match=r"job 2 failed: .*no such"):
        processes.measure()


def test_gradients_of_peers_are_compared_with_eager_pytorchs(folder):
    with Jobs([job("nets.py:Moody")]) as processes:
        ready(processes)
        (moody,) = processes.inspect(PEERS[0])
    assert moody.gradient_difference > 0.01


def test_a_process_that_dies_in_a_step_is_named(folder):
    with Jobs([job("nets.py:Tired", '{"fatal": true}')]) as processes:
        ready(processes)
        with pytest.raises(MeasurementError, match="the process of job 1 ended unexpectedly"):
            processes.turn(PEERS[0], {}, 3, [0])


def test_a_process_that_dies_is_named_and_none_is_left(folder):
    with Jobs([job()]) as processes:
        (process,) = processes._processes
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        with pytest.raises(MeasurementError, match="the process of job 1 ended"):
            processes.measure()
    with Jobs([job(), job()]) as processes:
        started = list(processes._processes)
    assert not any(process.is_alive() for process in started)


# ---- rows -----------------------------------------------------------------------------------------------------------


def turn(step_ms: tuple[float, ...], peak: int = 10, digest: str = "a", counts: bool = True) -> Turn:
    totals = Counters(2, bytes_out=8, bytes_in=6, stall_us=4000.0, peak_bytes=peak, device_peak_bytes=peak + 5)
    return Turn(1.0, step_ms, totals=totals if counts else None, digest=digest)


def row(choice: PolicyChoice = NONE) -> TogetherRow:
    trace = chain()
    measured = [Measured(trace, trace, 1.0, RTX_A6000)] * 2
    return replace(empty_row([job()] * 2, choice, 2, 3, RTX_A6000, measured), vanilla_peak_bytes=40)


def test_a_row_sums_its_jobs():
    vanilla = Entrant(NONE, turns=[[turn((2, 4, 3)), turn((1, 1, 1))], [turn((5, 5, 5)), turn((1, 3, 3))]])
    mine = Entrant(NONE, turns=[[turn((6, 9, 7)), turn((4, 4, 4))], [turn((9, 9, 9), 12), turn((2, 2, 8), 1)]])
    found: Any = filled_row(row(), mine, vanilla)
    assert found.floor_bytes == 2 * floor_bytes(chain())
    assert found.round_ms == [7 + 4, 9 + 2] and found.job_ms == [8, 3] and found.job_eors == [8 / 4, 3 / 2]
    assert found.eor == 11 / 6 and found.peak_bytes == 20 and found.device_peak_bytes == 30 and found.msr == 0.5
    assert found.bytes_moved == 2 * 7 and found.stall_ms == 2 * 2 and found.bit_identical is True
    mine.turns[1][1] = turn((2, 2, 8), digest="b")
    assert filled_row(row(), mine, vanilla).bit_identical is False


def test_a_peers_row_has_what_was_seen_of_its_steps():
    peer = Entrant(PEERS[0], inspections=[Inspection(7, 9, 0.0), Inspection(3, 4, 0.25)])
    peer.turns = [[turn((2,), counts=False)] * 2]
    found: Any = filled_row(row(PEERS[0]), peer, Entrant(NONE, turns=[[turn((1,), digest="b")] * 2]))
    assert (found.peak_bytes, found.device_peak_bytes, found.gradient_difference) == (10, 13, 0.25)
    assert found.bytes_moved is found.stall_ms is None and found.bit_identical is False and found.eor == 2


def test_who_has_failed_takes_no_further_turns():
    nobody: Any = None
    mine = Entrant(NONE, turns=[[turn((2,))] * 2])
    mine.fail(JobError("job 1 failed: no memory"))
    mine.take_turn(nobody, 1, [0, 1], 0.0, False, mine)
    assert mine.turns == [] and mine.error == "job 1 failed: no memory"


def test_a_first_step_may_take_a_few_times_vanillas_or_a_few_seconds():
    limits = []

    class Processes:
        def turn(self, choice, plans, steps, order, gap_s, settle, limits_s):
            limits.append(limits_s)
            return [turn((2,))] * 2

    processes: Any = Processes()
    vanilla = Entrant(NONE)
    vanilla.take_turn(processes, 1, [0, 1], 0.0, False, vanilla)
    vanilla.turns = [[turn((2,))._replace(first_ms=60e3), turn((2,))]]
    Entrant(PEERS[0]).take_turn(processes, 1, [0, 1], 0.0, False, vanilla)
    assert limits == [[], [rounds.HOPELESS * 60, rounds.PATIENCE_S]]


def test_a_peer_is_given_up_after_a_step_that_takes_too_long(folder, monkeypatch):
    monkeypatch.setattr(rounds, "HOPELESS", 1e-6)
    monkeypatch.setattr(rounds, "PATIENCE_S", 1e-4)
    vanilla, peer = run_together([job(), job()], (NONE, PEERS[0]), 1, 3, Progress())
    assert vanilla.error is None and vanilla.eor == 1
    assert peer.eor is None and "given up: its first step took longer than 0.0001 s" in (peer.error or "")


def test_a_row_where_vanilla_failed_is_compared_with_nothing():
    mine, vanilla = Entrant(NONE, turns=[[turn((2,))] * 2]), Entrant(NONE, error="job 1 failed: no memory")
    found: Any = filled_row(row(), mine, vanilla)
    assert found.msr == 0.5 and found.eor is found.cbr is found.job_eors is found.bit_identical is None


def test_on_cuda_nobody_times_stalls():
    mine = Entrant(NONE, turns=[[turn((2,))] * 2])
    found = filled_row(replace(row(), device="cuda:0"), mine, mine)
    assert found.stall_ms is None and found.bytes_moved == 14


def test_the_digest_tells_names_and_bits():
    def digest(model: dict[str, Any], optimizer: dict[str, dict[str, torch.Tensor]], loss: float = 1.0) -> str:
        return digest_of(Turn(0.0, (), (torch.tensor(loss),), TrainingState(model, optimizer)))

    one, two = torch.ones(2), torch.zeros(3)
    expected = digest({"a": one, "b": two}, {"a": {"m": two, "v": one}})
    assert digest({"b": two, "a": one}, {"a": {"v": one, "m": two}}) == expected
    assert digest({"a": one, "b": two, "extra": "no tensor"}, {"a": {"m": two, "v": one}}) == expected
    others = (
        digest({"a": two, "b": one}, {"a": {"m": two, "v": one}}),
        digest({"a": one, "c": two}, {"a": {"m": two, "v": one}}),
        digest({"a": one, "b": two}, {"a": {"m": one, "v": two}}),
        digest({"a": one, "b": -two}, {"a": {"m": two, "v": one}}),  # −0.0
        digest({"a": one, "b": two}, {"a": {"m": two, "v": one}}, 2.0),
    )
    assert len({expected, *others}) == 6
