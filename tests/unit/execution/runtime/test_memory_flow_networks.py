"""Two equal jobs that together exceed the memory of one: the networks of the papers and a transformer, at small size.

Each of the two has 88 % of the batch that fills the memory alone, with 8 groups on the way to its peak, and 93 % with
16: what the paper's pairs reach on full-size networks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pg_tensile.execution.capture import Captured, OptimizerSpec, StepSpec, capture
from pg_tensile.planning.memory_flow.groups import groups_of, step_bytes
from pg_tensile.planning.plan.access_sequence import AccessSequence
from pg_tensile.planning.plan.plan import NO_EVENTS
from tests.unit.memory_flow import FlowJob, alone, run_together
from tests.unit.zoo import thinned

ALONE = 64  # batch of a job that fills the memory
SHARES = {8: 0.88, 16: 0.93}  # of that batch, by groups on the way to the peak
STEPS = 3


def small_bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    config.num_labels = 10
    return BertForSequenceClassification(config)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and the width of an image; 0: tokens
    "vgg16": (thinned("vgg.vgg16", 32), 224),
    "inceptionv3": (thinned("inceptionv3.inceptionv3", 16), 75),
    "inceptionv4": (thinned("inceptionv4.inceptionv4", 32), 75),
    "resnet50": (thinned("resnet.resnet50", 16), 33),
    "densenet121": (thinned("densenet.densenet121", 8), 32),
    "bert": (small_bert, 0),
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = NETWORKS[name][0]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def batch(name: str, rows: int) -> tuple[list[Tensor], list[Tensor]]:
    width, generator = NETWORKS[name][1], torch.Generator().manual_seed(0)
    images = torch.randn(rows, 3, width, width, generator=generator) if width else None
    inputs = torch.randint(0, 50, (rows, 32), generator=generator) if images is None else images
    return [inputs], [torch.randint(0, 10, (rows,), generator=generator)]


def captured_step(name: str, rows: int) -> Captured:
    spec = StepSpec(
        F.cross_entropy, OptimizerSpec("sgd", 1e-3, momentum=0.9), output_key="logits" if name == "bert" else None
    )
    return capture(model_of(name), *batch(name, rows), spec, early_update=True)


@pytest.mark.long
@pytest.mark.parametrize("name", NETWORKS)
def test_two_jobs_with_nearly_the_batch_of_one_never_exceed_its_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long because six networks of up to 500 operators are captured three times each and train."""
    budget = int(step_bytes(AccessSequence(captured_step(name, ALONE).trace, NO_EVENTS)).max())
    for count, share in SHARES.items():
        rows = int(share * ALONE)
        captured = captured_step(name, rows)
        sequence = AccessSequence(captured.trace, NO_EVENTS)
        groups = groups_of(sequence, math.ceil(int(np.ptp(step_bytes(sequence))) / count))
        job = FlowJob(captured, lambda: model_of(name), NO_EVENTS, groups, *batch(name, rows))
        expected = alone(job, STEPS)
        flow = run_together([job, job], budget, STEPS, monkeypatch)
        assert flow.most_bytes <= budget, count
        assert flow.overlapped, count
        for losses in flow.losses:
            assert all(torch.equal(*pair) for pair in zip(losses, expected, strict=True)), count
