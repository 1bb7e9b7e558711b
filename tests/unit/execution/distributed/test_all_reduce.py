"""Steps of several ranks: the bits of DistributedDataParallel, whatever the plans of the ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pg_tensile.errors import CaptureError, ExecutorError, TrainingError
from pg_tensile.execution.capture import OptimizerSpec, RankSpec, StepSpec
from tests.unit import ranked
from tests.unit.ranked import Job, Ranks

SGD = OptimizerSpec("sgd", 0.1, momentum=0.9)
JOBS = {
    "adamw": Job(),
    "sgd": Job(SGD),
    "clipped": Job(SGD, clip=0.5),
    "dropout": Job(dropout=0.5),
    "a bucket each": Job(bucket_bytes=1),
}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def moved(result: dict[str, Tensor]) -> bool:
    """Return whether training has changed the weights."""
    return not torch.equal(result["hidden.weight"], ranked.weights(ranked.net())["hidden.weight"])


@pytest.mark.parametrize("name", JOBS)
def test_two_ranks_have_the_bits_of_distributed_data_parallel(ranks: Ranks, name: str) -> None:
    job = JOBS[name]
    (ours, other), (theirs, _), (eager, _) = (
        ranks.call(2, function, job) for function in (ranked.planned, ranked.parallel, ranked.eager)
    )
    assert moved(ours) and same(ours, other)
    assert same(ours, theirs) and same(eager, theirs)


def test_four_ranks_have_them_where_the_buckets_are_the_same(ranks: Ranks) -> None:
    """With more than two ranks the sum of a number depends on its place in a bucket."""
    job = Job(SGD, bucket_bytes=1)
    first, *others = ranks.call(4, ranked.planned, job)
    (theirs, *_) = ranks.call(4, ranked.parallel, job)
    assert moved(first) and same(first, theirs) and all(same(first, other) for other in others)


@pytest.mark.parametrize(("size", "rows"), [(2, (8, 8, 5)), (4, (8, 8, 7, 6))])
def test_ranks_count_by_their_rows(ranks: Ranks, size: int, rows: tuple[int, ...]) -> None:
    job = Job(SGD, rows=rows, bucket_bytes=1, clip=1.0)
    (ours, *_), (theirs, *_), (unweighted, *_) = (
        ranks.call(size, ranked.planned, job),
        ranks.call(size, ranked.parallel, job, True),
        ranks.call(size, ranked.parallel, job),
    )
    assert same(ours, theirs) and not same(ours, unweighted)


@pytest.mark.parametrize("job", [Job(dropout=0.5), Job(SGD, clip=0.5, rows=(8, 8, 6))], ids=["adamw", "clipped"])
def test_plans_of_the_ranks_do_not_matter(ranks: Ranks, job: Job) -> None:
    expected, _ = ranks.call(2, ranked.planned, job)
    for policies in [("joint",), ("recompute_all",), ("swap_all",), ("none", "swap_all"), ("recompute_all", "joint")]:
        found = ranks.call(2, ranked.planned, job, policies, (0.0, 0.7))
        assert all(same(expected, one) for one in found), policies


def test_eager_backward_passes_exchange_as_they_go(ranks: Ranks) -> None:
    """The first one finds out in which order gradients come; of a batch in two parts, the second one exchanges them."""
    assert ranks.call(2, ranked.eager_progress, Job(bucket_bytes=1, rows=(8, 8))) == [[0, 6], [0, 6]]
    parts = Job(bucket_bytes=1, rows=(8, 8), accumulation=2)
    assert ranks.call(2, ranked.eager_progress, parts) == [[0, 6, 0, 6]] * 2


def test_a_bucket_that_a_plan_moves_has_been_exchanged_before(ranks: Ranks) -> None:
    """Otherwise the copy on the host has what was there before."""
    job = Job(bucket_bytes=3000)
    expected, _ = ranks.call(2, ranked.planned, job)
    for policies in [("none",), ("moving buckets",), ("moving buckets", "none")]:
        found = ranks.call(2, ranked.planned_late, job, policies)
        assert all(same(expected, one) for one in found), policies


@pytest.mark.parametrize("size", [2, 4])
def test_runs_repeat_to_the_bit(ranks: Ranks, size: int) -> None:
    job = Job(dropout=0.5, bucket_bytes=3000)
    first, second = ranks.call(size, ranked.planned, job), ranks.call(size, ranked.planned, job)
    assert all(same(one, other) for one, other in zip(first, second, strict=True))
    assert all(same(first[0], eager) for eager in ranks.call(size, ranked.eager, job))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_train_as_one_process_does(ranks: Ranks, size: int) -> None:
    job = Job(OptimizerSpec("sgd", 0.05), rows=(*[16] * 20, 11), norm=False)
    alone = ranked.eager(job)
    together = ranks.call(size, ranked.planned, job)[0]
    assert max(float((together[name] - value).abs().max()) for name, value in alone.items()) < 1e-6


def test_micro_batches_are_exchanged_together(ranks: Ranks) -> None:
    once, parts = (Job(OptimizerSpec("sgd", 0.05), norm=False, accumulation=parts) for parts in (1, 2))
    ours, eager = ranks.call(2, ranked.planned, parts)[0], ranks.call(2, ranked.eager, parts)[0]
    whole = ranks.call(2, ranked.planned, once)[0]
    assert same(ours, eager)
    assert max(float((whole[name] - value).abs().max()) for name, value in ours.items()) < 1e-6


def test_collectives_come_in_the_same_order_on_all_ranks(ranks: Ranks) -> None:
    job = Job(bucket_bytes=3000, rows=(8, 8, 5))
    orders = ranks.call(4, ranked.collectives, job, ("joint", "swap_all", "recompute_all", "none"))
    assert len(set(orders[0])) > 2 and len(orders[0]) % 3 == 0  # three steps, of several collectives each
    assert all(order == orders[0] for order in orders)


# ---- what cannot be --------------------------------------------------------------------------------------------------


def test_a_step_of_ranks_needs_their_group(ranks: Ranks) -> None:
    with pytest.raises(ExecutorError, match="the step is one of 3 ranks, but this process is in no process group"):
        ranked.step_of(3)
    with pytest.raises(ExecutorError, match="one of 3 ranks, but the process group has 2"):
        ranks.call(2, ranked.step_of, 3)
    with pytest.raises(CaptureError, match="a step of 1 ranks exchanges nothing"):
        StepSpec(torch.sum, ranks=RankSpec(1))


def test_ranks_that_differ_are_refused_on_all_of_them(ranks: Ranks) -> None:
    with pytest.raises(TrainingError, match="ranks 0 and 1 differ in their numbers") as error:
        ranks.call(2, ranked.different)
    assert error.value.detail == "rank 0: 0\nrank 1: 1"


def test_ranks_that_exchange_other_gradients_are_refused(ranks: Ranks) -> None:
    for function in (ranked.exchanging_others, ranked.planning_others):
        with pytest.raises(TrainingError, match="ranks 0 and 1 differ in the gradients that they exchange"):
            ranks.call(2, function)


def test_a_gradient_that_comes_and_goes_is_refused(ranks: Ranks) -> None:
    with pytest.raises(TrainingError, match=r'not every step has a gradient of "1\.bias"'):
        ranks.call(2, ranked.skipping)
