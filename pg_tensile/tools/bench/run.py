"""Runs a benchmark: chooses how, writes its rows, prints its table."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from pg_tensile.errors import OptionError
from pg_tensile.tools.bench.options import PEERS, BenchOptions
from pg_tensile.tools.bench.planned import failed_rows
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.report import Report, budget_note, check_writable, print_table, table_console, write_rows


def run(options: BenchOptions) -> int:
    """The exit status: 1 when a policy or a peer failed or a policy's results differ from eager PyTorch's, else 0: that
    a peer's differ is a fact about PyTorch. Raises OptionError before anything is done, and what went wrong when
    nothing could be measured; the rows say so, too."""
    if options.json_path is not None:
        check_writable(options.json_path)
    torch.set_num_threads(options.threads or default_threads(options.device.kind))
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # a model that fails is explained
    try:
        report = measure(options)
    except OptionError:
        raise
    except Exception as error:
        if options.json_path is not None:
            write_rows(options.json_path, failed_rows(options, error))
        raise
    if options.json_path is not None:
        write_rows(options.json_path, report.rows)
    print_table(report.rows, report.title, [*report.notes, *budget_note(report.rows)], table_console())
    wrong = (row.bit_identical is False and row.policy not in PEERS for row in report.rows)
    return int(any(row.error is not None for row in report.rows) or any(wrong))


def default_threads(kind: str) -> int:
    """As many as a job has by default. On the host device one core is left, because swapping takes processor time here:
    a GPU has engines of its own for it."""
    return max(1, len(os.sched_getaffinity(0)) - 1) if kind == "host" else torch.get_num_threads()


def measure(options: BenchOptions) -> Report:
    with Progress() as progress:
        if not options.batch:
            from pg_tensile.tools.bench.batch import candidate_notes, choose_batch

            choice, _ = choose_batch(options, progress)
            report = measured(replace(options, batch=choice.batch_size), progress)
            return report._replace(notes=[*candidate_notes(choice), *report.notes])
        return measured(options, progress)


def measured(options: BenchOptions, progress: Progress) -> Report:
    if options.device.kind == "sim":
        from pg_tensile.tools.bench.simulated import simulate_policies

        return simulate_policies(options, progress)
    from pg_tensile.tools.bench.measured import Session

    return Session(options, progress).run()
