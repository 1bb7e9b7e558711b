"""A benchmark from its options to its output: measured or simulated, rows written, table printed."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from pg_tensile.errors import OptionError
from pg_tensile.tools.bench.options import PEERS, BenchOptions
from pg_tensile.tools.bench.planned import failed_rows
from pg_tensile.tools.bench.progress import Progress
from pg_tensile.tools.bench.report import Report, budget_note, print_table, table_console
from pg_tensile.tools.bench.row_file import RowFile


def run(options: BenchOptions) -> int:
    """Run the benchmark and return the exit status.

    It is 1 if a policy or a peer failed or a policy's results differ from eager PyTorch's, else 0: a peer whose results
    differ is not a failure, because that is a property of PyTorch. Raises OptionError if the options cannot be used,
    and any error that prevents the measurement, after recording it in the rows.
    """
    file = None if options.json_path is None else RowFile(options.json_path)
    torch.set_num_threads(options.threads or default_threads(options.device.kind))
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # a model that fails is explained
    try:
        report = measure(options, file)
    except OptionError:
        raise
    except Exception as error:
        if file is not None and not file.has_rounds:
            file.write(failed_rows(options, error))
        raise
    if file is not None:
        file.write(report.rows)
    print_table(report.rows, report.title, [*report.notes, *budget_note(report.rows)], table_console())
    wrong = (row.bit_identical is False and row.policy not in PEERS for row in report.rows)
    return int(any(row.error is not None for row in report.rows) or any(wrong))


def default_threads(kind: str) -> int:
    """Return the default number of threads of a job.

    On the host device one core stays free, because swapping takes processor time there; a GPU has its own copy engines.
    """
    return max(1, len(os.sched_getaffinity(0)) - 1) if kind == "host" else torch.get_num_threads()


def measure(options: BenchOptions, file: RowFile | None) -> Report:
    with Progress() as progress:
        if not options.batch:
            from pg_tensile.tools.bench.batch import candidate_notes, choose_batch

            choice, _ = choose_batch(options, progress)
            report = measured(replace(options, batch=choice.batch_size), progress, file)
            return report._replace(notes=[*candidate_notes(choice), *report.notes])
        return measured(options, progress, file)


def measured(options: BenchOptions, progress: Progress, file: RowFile | None) -> Report:
    if options.device.kind == "sim":
        from pg_tensile.tools.bench.simulated import simulate_policies

        return simulate_policies(options, progress)
    from pg_tensile.tools.bench.measured import MeasuredBench

    bench = MeasuredBench(options, progress) if file is None else MeasuredBench(options, progress, file.keep)
    return bench.run()
