"""Training of a job whose rows are preprocessed, up to its weights: in the job's own process, or in a rank of it.

Capturing and waiting for memory (memory.py), training, and at the end the version, its weights and DONE. A STOP is
honoured in every phase (channel.py).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from pg_tensile.errors import CaptureError
from pg_tensile.execution.data.baseline_metrics import measured, shortfall
from pg_tensile.execution.data.splits import described
from pg_tensile.planning.device.profile import DeviceProfile
from pg_tensile.planning.latency.load import LoadMeter
from pyworker.children.channel import Channel, Stopped
from pyworker.children.job import Job, job_settings, with_hint
from pyworker.children.job_budget import most_bytes
from pyworker.children.prepared import Prepared, State
from pyworker.wire import FrameType

if TYPE_CHECKING:
    from pg_tensile.execution.training.checkpoint import Checkpoint
    from pg_tensile.execution.training.observer import EpochMetrics, Outcome, Progress
    from pg_tensile.execution.training.run_steps import Steps
    from pg_tensile.execution.training.trainer import Trainer
    from pyworker.children.memory import MemoryClient


class TrainingRun:
    """One job that is trained; also the run's observer (`pg_tensile.execution.training.observer.Observer`).

    `identity`: what a checkpoint must agree with; `recipe` is stored with checkpoints."""

    def __init__(self, channel: Channel, identity: dict[str, Any], recipe: dict[str, Any]) -> None:
        self._channel = channel
        self._spec = channel.spec
        self._identity = identity
        self._recipe = recipe
        self._load = LoadMeter()
        self._memory: MemoryClient | None = None
        self._warnings: list[str] = []
        self._start: bytes | None = None  # weights to begin with, a safetensors file
        self._start_prefix = ""  # of the network's weights in it
        self._revision = 0  # of the last TRACE, that of an earlier claim
        self._choice: dict[str, Any] | None = None  # of the batch size, if the job leaves it open (batch_size.py)

    def fit(self, prepared: Prepared, checkpoint: State | None, profile: Future[DeviceProfile]) -> None:
        """Train, from the preprocessed rows to the weights; `profile` is the device's."""
        channel = self._channel
        channel.send(FrameType.PROGRESS, {"phase": "building"})
        job = self._build(prepared)
        self._memory = self._make_memory(job, channel.wait_for(profile, "building"))
        trainer = self._begin(job, prepared, checkpoint)
        outcome = trainer.run()
        if outcome.stopped:
            channel.send(FrameType.DONE, {"stopped": True})
            return
        if job.settings.device_graphs:
            graphs = self._memory.device_graphs()
            if graphs.obstacle is not None:
                self._warnings.append(f"iterations were not captured as device graphs: {graphs.obstacle}")
        self._warnings += outcome.warnings
        self._send_results(job, outcome, prepared)
        channel.send(FrameType.DONE, {"stopped": False, "warnings": self._warnings})

    def _build(self, prepared: Prepared) -> Job:
        """Return the job with its model, built on the CPU from generators seeded with the job's seed."""
        import torch

        from pg_tensile.execution import models
        from pg_tensile.execution.backends import use_deterministic_algorithms
        from pg_tensile.execution.device_choice import choose_device
        from pg_tensile.execution.training import checkpoint as ckpt
        from pg_tensile.execution.training.graphs import Sizes
        from pg_tensile.execution.training.settings import check_model

        torch.set_num_threads(self._channel.threads)
        device = choose_device(self._spec["device"])
        use_deterministic_algorithms()
        settings, preprocessing = job_settings(self._spec), prepared.fitted.preprocessing
        ckpt.seed_generators(settings.seed)
        architecture = models.parse(self._spec["network"])
        model = models.build(architecture, preprocessing.model_inputs, preprocessing.outputs)
        if self._start is not None:
            tensors, prefix = ckpt.from_bytes(self._start), self._start_prefix
            own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
            ckpt.load_model(model, own)
            self._start = None
        check_model(model, min(settings.batch_size, prepared.fitted.training_rows))
        sizes = Sizes.of(prepared.dataset, preprocessing)
        return Job(model, settings, preprocessing.task, sizes, device)

    def _measure_device(self) -> DeviceProfile:
        """Return the profile of the job's device: the known one, or one that is measured now.

        Runs in the background, after the libraries have been imported.
        """
        from pg_tensile.execution.device_choice import choose_device
        from pg_tensile.execution.measuring.device import measure

        device = choose_device(self._spec["device"])
        fields = self._spec["profiles"].get(str(device))
        return measure(device) if fields is None else DeviceProfile.from_json(fields)

    # ---- training ----

    def _make_memory(self, job: Job, profile: DeviceProfile) -> MemoryClient:
        from pg_tensile.execution.backends import device_load
        from pyworker.children.memory import MemoryClient
        from pyworker.children.overhead import allocator_cautions

        load = self._load if job.device.type == "cpu" else LoadMeter(device_load(job.device))
        self._warnings += allocator_cautions(str(job.device), profile)
        return MemoryClient(self._channel, job, profile, load, revision=self._revision)

    def _begin(self, job: Job, prepared: Prepared, checkpoint: State | None) -> Trainer:
        """Return the run, at its beginning or in the checkpoint's state."""
        from pg_tensile.execution.training import checkpoint as ckpt
        from pg_tensile.execution.training.trainer import Trainer

        dataset, preprocessing = prepared.dataset, prepared.fitted.preprocessing

        def trainer(job: Job, steps: Steps) -> Trainer:
            return Trainer(job.settings, steps, dataset, preprocessing, self, self._identity)

        state = None if checkpoint is None else ckpt.Checkpoint.from_bytes(*checkpoint)
        if self._spec["batch_size"]:
            run = trainer(job, self._plan(job))
        elif state is None:
            return self._choose(trainer)
        else:
            from pyworker.children.batch_size import resumed

            self._choice = state.meta["choice"]
            job = resumed(job, self._choice)
            run = trainer(job, self._plan(job))
        if state is not None:
            run.resume(state)
        return run

    def _choose(self, trainer: Callable[[Job, Steps], Trainer]) -> Trainer:
        """Return the run of a job whose batch size is chosen, after its first steps."""
        from pyworker.children.batch_size import Chooser

        assert self._memory is not None
        try:
            chosen = Chooser(self._channel, self._memory, trainer).run()
        except CaptureError as error:
            raise with_hint(error, chosen=True) from error
        self._choice = chosen.choice
        run = trainer(chosen.job, chosen.steps)
        if chosen.state is not None:
            run.resume(chosen.state)
        return run

    def _plan(self, job: Job) -> Steps:
        """Return the `Steps` of the run, once its memory has been granted."""
        from pg_tensile.execution.training.graphs import capture_graphs, evaluation_rows
        from pg_tensile.execution.training.steps import EagerSteps

        assert self._memory is not None
        self._memory.job = job
        if self._spec["policy"] == "none":
            rows = evaluation_rows(*job)
            self._memory.claim()
            budget = most_bytes(self._spec)
            claim = self._memory.claim_taken if job.settings.ranks == 1 else None  # with ranks, the device is its own
            return EagerSteps(job.model, job.settings, job.task, job.device, rows, budget, claim)
        self._channel.send(FrameType.PROGRESS, {"phase": "capturing"})
        try:
            graphs = capture_graphs(*job)
        except CaptureError as error:
            raise with_hint(error) from error
        return self._memory.admit(graphs)

    def _send_results(self, job: Job, outcome: Outcome, prepared: Prepared) -> None:
        """Send the version and its weights."""
        from pg_tensile.execution.training import checkpoint as ckpt

        self._send_version(outcome, prepared, self._training(outcome), architecture=self._spec["network"])
        self._channel.send_state("weights", ckpt.to_bytes(ckpt.model_tensors(job.model)))

    def _send_version(self, outcome: Outcome, prepared: Prepared, training: dict[str, Any], **header: Any) -> None:
        """Describe the version that the weights belong to, which are sent next.

        `training` is for the column of that name; `header` are further fields of the frame."""
        from pg_tensile.execution.training.uncertainty import derive, with_validation

        fitted = prepared.fitted
        calibrate, times = self._spec["options"].get("calibrate", True), prepared.dataset.validation_times
        derived = derive(fitted.preprocessing, outcome.validation, calibrate, times)
        preprocessing = derived.preprocessing.to_json()
        rows = {"training": fitted.training_rows, "validation": fitted.validation_rows, "skipped": fitted.skipped_rows}
        crossed = "cross_validation" in outcome.metrics
        metrics = outcome.metrics | {"baseline": measured(fitted.preprocessing, prepared.dataset, crossed)}
        if not header.get("first"):
            self._warnings += shortfall(metrics)
        split = described(fitted.division, fitted.training_rows, fitted.validation_rows)
        version = {
            "task": preprocessing["task"],
            "preprocessing": preprocessing | {"rows": rows},
            "metrics": metrics,
            "fingerprint": prepared.dataset.fingerprint,
            "training": derived.notes | training | {"split": split},
            "reference": with_validation(prepared.reference, derived.preprocessing, outcome.validation).to_json(),
        }
        self._channel.send(FrameType.VERSION, version | header)

    def _training(self, outcome: Outcome) -> dict[str, Any]:
        """Return the settings and the course of the training, for `model_versions.training`."""
        assert self._memory is not None
        settings = self._memory.job.settings
        chosen = {"batch_size": settings.batch_size, "learning_rate": settings.learning_rate}
        schedule = {"learning_rate_schedule": settings.learning_rate_schedule}
        course = {"epochs": outcome.epochs, "stopped": outcome.reason, "refitted_rows": outcome.refitted_rows}
        captured = {"replays": self._memory.device_graphs().replays} if settings.device_graphs else {}
        return (
            captured | chosen | schedule | {"average_weights": settings.average_weights, "keep": settings.keep} | course
        )

    # ---- observing ----

    def progress(self, progress: Progress) -> None:
        header = progress._asdict()
        memory, step_s = header.pop("memory")._asdict(), header.pop("step_s")
        assert self._memory is not None
        self._channel.send(FrameType.PROGRESS, header | memory | self._memory.progress(step_s))

    def metrics(self, metrics: EpochMetrics) -> None:
        header = {"epoch": metrics.epoch, "split": metrics.split, "seconds": metrics.seconds}
        self._channel.send(FrameType.METRICS, header | metrics.metrics.to_json())
        assert self._memory is not None
        self._memory.epoch_ended()

    def checkpoint(self, checkpoint: Checkpoint, written: Callable[[float], None]) -> None:
        choice = {"choice": self._choice} if self._choice else {}
        choice["recipe"] = self._recipe
        self._channel.checkpoint_stored = written
        meta = checkpoint.meta | {"threads": self._channel.threads} | choice
        self._channel.send_state("checkpoint", checkpoint.to_bytes(), meta)

    def poll(self) -> None:
        memory = self._memory
        assert memory is not None
        try:
            frame = self._channel.poll({FrameType.PLAN, FrameType.REFUSE})
            if frame is not None:
                memory.receive(frame)
        except Stopped as stop:
            from pg_tensile.execution.training.observer import StopTraining

            raise StopTraining(stop.checkpoint) from None
        memory.tick()
