"""Imports and a first capture, done once before the processes of jobs are forked."""

from __future__ import annotations

from benchmarks.together import job_process as job_process  # what they execute
from pg_tensile.execution.training.warm_up import warm_up

warm_up()
