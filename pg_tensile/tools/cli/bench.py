"""Options of `pg-tensile bench`: definition and checks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pg_tensile.errors import OptionError
from pg_tensile.extras import needing
from pg_tensile.tools.bench import options
from pg_tensile.tools.bench.options import BenchOptions
from pg_tensile.tools.cli.parser import BENCH, Parser, add, count, number

BENCH_EXAMPLES = """\
inputs:
  float32:3x224x224    numbers of a normal distribution, of this shape after the batch
  int64<30522:128      whole numbers from 0 to 30521, 128 for each sample; also bool:10, bfloat16:8, int32<5
losses:
  cross_entropy        targets below --classes; classes are the output's second dimension, or else its last
  mse, bce             targets of the output's shape: a normal distribution; zeros and ones (the output is logits)
  lm                   the first input is token ids, the targets are the same ids one place further on
  model                the model's output is the loss, or has it under its key "loss"
policies:
  --policies none,joint --budget 70%,50% measures every policy but vanilla with every budget. Settings of one policy:
  joint:budget=50%     its own budget; the word none for no budget
  joint:early_update=true, joint:latencies=roofline (planned with estimates, not with what was measured),
  tensile:lanes=1      and keyword arguments of the policy
  optimum:limit_s=60   searches for the best plan of a small step, as long as that
peers, which are PyTorch's own means of saving memory, among the policies; they have no budget:
  peer:checkpoint      every block of the longest nn.Sequential or nn.ModuleList is computed again
  peer:save_on_cpu     what the backward pass needs waits in host memory
  peer:memory_budget=X torch.compile keeps a share X of the activations, 0 to 1
  peer:unified_memory  the CUDA driver pages memory in and out
examples:
  pg-tensile bench --model pytorchcv.models.resnet:resnet50 --input float32:3x224x224 --classes 1000 --batch 8
  pg-tensile bench --model net.py:Net --input float32:10 --policies none,swap_all --budget 70% --device sim:RTX_A6000
"""
LATENCY_ERROR = "sim: median relative error of the roofline, by which plans with latencies=roofline are off"


def add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help=BENCH,
        description="Trains a model for a few steps with eager PyTorch and with every policy, interleaved in rounds\n"
        "from the same weights and data, and compares memory, time and results. Needs no PostgreSQL.\n"
        "The TENSILE paper's tables and figures: pg-tensile bench table1 (… table4, fig6, fig7, savings; --help).",
        epilog=BENCH_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_bench)
    add_step(parser.add_argument_group("the training step"))
    add_memory(parser.add_argument_group("the memory"))
    add_run(parser.add_argument_group("the run"))


def add_step(group: Any) -> None:
    add(
        group,
        "--model",
        required=True,
        metavar="M:F",
        help="package.module:callable or file.py:callable; returns an nn.Module",
    )
    add(group, "--kwargs", options.parse_kwargs, default={}, metavar="JSON", help="keyword arguments of the callable")
    inputs = "an input of the model; repeat it where there are several"
    add(group, "--input", options.parse_input, action="append", required=True, metavar="TYPE:SHAPE", help=inputs)
    add(group, "--classes", count(1), metavar="N", help="targets are classes below N")
    add(group, "--loss", choices=options.LOSSES, help="cross_entropy (default with --classes), mse (default), …")
    add(group, "--output-key", metavar="KEY", help="which output, of several: key, attribute or index")
    add(group, "--batch", count(0), default=16, metavar="N", help="samples in a batch (16); 0: the fastest that fits")
    add(group, "--optimizer", choices=options.OPTIMIZERS, default="adamw", help="sgd, momentum, adam, adamw (adamw)")
    add(group, "--lr", number(None, "a number from 0 on"), default=1e-3, metavar="X", help="learning rate (0.001)")
    add(group, "--clip", number(0.0, "a number above 0"), metavar="NORM", help="the largest norm of the gradient")
    add(group, "--autocast", choices=("bf16",), nargs="?", const="bf16", help="forward pass in mixed precision")
    add(group, "--accumulation", count(1, 1024), default=1, metavar="K", help="parts that a batch is cut into (1)")
    add(group, "--seed", count(0, 2**63 - 1), default=0, metavar="S", help="of weights, data and dropout (0)")


def add_memory(group: Any) -> None:
    policies = "policies to measure (none, which is vanilla); NAME[:SETTING=VALUE]…"
    add(group, "--policies", default="none", metavar="A,B", help=policies)
    device = "host (default), cuda[:N], or sim:PROFILE, which executes nothing"
    add(group, "--device", options.parse_device, default=options.DeviceChoice("host"), metavar="D", help=device)
    link = "bandwidth of the link each way; default on the host: the balance of an RTX A6000"
    add(group, "--link", number(0.0, "a number above 0"), metavar="GB/S", help=link)
    budget = "device memory: 4GiB, or 70%% of the vanilla peak, or several; vanilla has none, unless alone"
    add(group, "--budget", options.parse_budgets, default=(None,), metavar="B,…", help=budget)
    compression = "of swaps: auto (where it pays), none (default), or a codec for all: zvc, rle, csr, lz4"
    add(group, "--compression", options.parse_compression, default="none", metavar="C", help=compression)
    models = "latency models (the column of tensile.latency_models, as a file) for latencies=models"
    add(group, "--latency-models", options.parse_latency_models, metavar="FILE", help=models)
    add(group, "--latency-error", number(0.0, "a number above 0"), metavar="E", help=LATENCY_ERROR)
    early = "move each parameter's update up to where its gradient is final (vanilla is never reordered)"
    group.add_argument("--early-update", action="store_true", help=early)


def add_run(group: Any) -> None:
    add(group, "--iterations", count(1), default=3, metavar="K", help="timed steps in a round (3)")
    add(group, "--rounds", count(1), default=3, metavar="R", help="rounds (3)")
    add(group, "--warmup", count(0), default=1, metavar="W", help="steps before the timed ones in each round (1)")
    threads = "threads of PyTorch (host device: all cores but one, as a job)"
    add(group, "--threads", count(1, 4096), default=0, metavar="T", help=threads)
    group.add_argument("--timeline", action="store_true", help="put memory over time into the rows of --json")
    seconds = "time for the rounds: after the first, none begins that would probably not end within S seconds"
    add(group, "--seconds", number(0.0, "a number above 0"), metavar="S", help=seconds)
    light = "fewer steps: operators are observed once, the allocator is not, slow policies have one round"
    add(group, "--light", options.parse_reason, metavar="REASON", help=light)
    add(group, "--json", metavar="FILE", help="write one JSON object a line and policy")


def bench_options(arguments: argparse.Namespace) -> BenchOptions:
    """Return the options, after checks that involve several of them. Raises OptionError."""
    from pg_tensile.tools.bench.clone import KNOWN

    loss = arguments.loss or ("cross_entropy" if arguments.classes else "mse")
    if loss == "cross_entropy" and not arguments.classes:
        raise OptionError("--loss cross_entropy needs --classes", "Write how many classes there are: --classes 10.")
    if arguments.classes and loss != "cross_entropy":
        raise OptionError(f"--classes does not go with --loss {loss}", "Leave one of them out.")
    if loss == "lm" and not arguments.input[0].below:
        raise OptionError("--loss lm needs token ids as the first input", "Write one as int64<50257:128.")
    if any(spec.nbytes(arguments.batch) > options.LARGEST for spec in arguments.input):
        raise OptionError("--batch: the samples are too large", "Their bytes do not fit into 62 bits.")
    if not arguments.batch and arguments.accumulation > 1:
        raise OptionError("--batch 0 does not go with --accumulation", "Write how many samples a batch has.")
    if arguments.batch % arguments.accumulation:
        raise OptionError("--accumulation does not divide --batch", "A batch is cut into that many equal parts.")
    try:
        policies = options.parse_policies(arguments.policies, KNOWN, arguments.budget, arguments.early_update)
    except OptionError as error:
        raise OptionError(f"--policies: {error.message}", error.hint) from None
    if any(choice.latencies == options.MODELS for choice in policies) and arguments.latency_models is None:
        raise OptionError("latencies=models needs --latency-models", "Name the file that has them.")
    if arguments.latency_error is not None and arguments.device.kind != "sim":
        raise OptionError("--latency-error is for simulated devices", "Add --device sim:PROFILE.")
    if not arguments.batch and any(choice.budget and choice.budget.percent for choice in policies):
        hint = "Write the budget in bytes, as 4GiB: what share it is depends on the batch."
        raise OptionError("--batch 0 does not go with a share of the vanilla peak", hint)
    return BenchOptions(
        model=arguments.model,
        inputs=tuple(arguments.input),
        kwargs=arguments.kwargs,
        batch=arguments.batch,
        classes=arguments.classes,
        loss=loss,
        output_key=arguments.output_key,
        optimizer=arguments.optimizer,
        learning_rate=arguments.lr,
        clip=arguments.clip,
        autocast=arguments.autocast,
        accumulation=arguments.accumulation,
        policies=policies,
        device=arguments.device,
        link_gbps=arguments.link,
        iterations=arguments.iterations,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        seed=arguments.seed,
        threads=arguments.threads,
        light=arguments.light,
        seconds=arguments.seconds,
        timeline=arguments.timeline,
        json_path=arguments.json,
        latency_models=arguments.latency_models,
        latency_error=arguments.latency_error,
        compression=arguments.compression,
    )


def parse(arguments: Sequence[str]) -> BenchOptions:
    """Parse a command line that begins with `bench`. Raises OptionError."""
    parser = Parser(prog="pg-tensile", allow_abbrev=False)
    add_bench(parser.add_subparsers())
    return bench_options(parser.parse_args(arguments))


def run_bench(arguments: argparse.Namespace) -> int:
    bench = bench_options(arguments)
    with needing("server", "benchmarks need"):
        from pg_tensile.tools.bench.run import run

    return run(bench)
