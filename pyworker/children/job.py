"""The job of a trainer as the library takes it: settings from its spec, model, sizes and device.

Imports PyTorch only when it is called, as the rows arrive while a thread imports it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pg_tensile.errors import CaptureError, OptionError
from pg_tensile.execution.data.choice import Choice, choose_architecture
from pg_tensile.execution.data.fitting import FittedPreprocessing, fit
from pg_tensile.execution.data.folds import FEW_ROWS, repeats_for
from pg_tensile.execution.data.roles import Roles
from pg_tensile.execution.data.splits import Split
from pg_tensile.execution.data.text_fitting import with_text_vectors
from pg_tensile.execution.data.weights import Weighting

if TYPE_CHECKING:
    import torch
    from torch import nn

    from pg_tensile.execution.data.dataset import RowStore
    from pg_tensile.execution.data.preprocessing import Task
    from pg_tensile.execution.training.graphs import Sizes
    from pg_tensile.execution.training.settings import EarlyStopping, Settings
    from pg_tensile.planning.device.profile import DeviceProfile
    from pg_tensile.planning.trace.trace import Trace

FITTED = ("linear", "boosted")  # types of architectures that a library fits
# Members of an ensemble; lines may be as good as trees where training rows are few
FEW, MANY = ("linear", "boosted", "tabular"), ("boosted", "tabular")


class Job(NamedTuple):
    """Job to be trained: everything that its graphs depend on."""

    model: nn.Module
    settings: Settings
    task: Task
    sizes: Sizes
    device: torch.device

    def with_batch_size(self, batch_size: int) -> Job:
        return self._replace(settings=replace(self.settings, batch_size=batch_size))


def choose_open_architecture(store: RowStore, spec: dict[str, Any]) -> Choice | None:
    """Complete the spec of a job without an architecture by one that its rows suggest, and return the choice.

    Returns None if the spec has one. Raises DataError."""
    if spec["architecture"] is not None:
        return None
    split, weighting = Split.of(spec), Weighting.of(spec["options"])
    choice = choose_architecture(store, Roles.of(store.columns, split.by, weighting.column, split.flagged))
    if choice.architecture["type"] == "tabular" and not spec.get("tuning"):
        choice = choice._replace(architecture={"type": "ensemble"})
    spec["architecture"] = choice.architecture
    return choice


def fit_rows(store: RowStore, spec: dict[str, Any]) -> FittedPreprocessing:
    """Return the preprocessing fitted to a job's rows. Raises DataError and OptionError."""
    from pg_tensile.execution import models

    architecture = models.parse(spec["architecture"])
    options = spec["options"]
    texts = models.text_columns(architecture)
    fitted = fit(
        store,
        Split.of(spec),
        options.get("task"),
        models.token_limits(architecture),
        Weighting.of(options),
        options.get("target_transform"),
        models.takes_ranks(architecture),
        texts,
    )
    if texts is None:
        fitted = with_text_vectors(fitted, store)
    return with_quantiles(fitted, options)


def choose_members(spec: dict[str, Any], fitted_to: FittedPreprocessing) -> None:
    """Complete the spec by the architectures that are trained one after the other.

    `fitted` are those that a library fits, `network` is that of the others, or None if there is none; `repeats` is how
    often the rows are divided for a cross-validation. A job with ranks and a trial train the network alone."""
    training_rows = fitted_to.training_rows
    split = Split.of(spec)
    random = split.by is None and not split.flagged and fitted_to.validation_rows > 0
    is_best = spec["options"].get("keep", "best") == "best" and spec["options"].get("refit", True)
    is_alone = spec.get("ranks") is None and not spec.get("tuning")
    spec["repeats"] = repeats_for(training_rows + fitted_to.validation_rows) if random and is_best and is_alone else 0
    architecture = spec["architecture"]
    members = [architecture]
    if architecture["type"] == "ensemble":
        types = architecture.get("members") or (FEW if training_rows < FEW_ROWS else MANY)
        members = [{"type": name} for name in types]
    networks = [member for member in members if member["type"] not in FITTED]
    fitted = [member for member in members if member["type"] in FITTED]
    if networks and not is_alone:
        fitted = []
    if fitted and spec["options"].get("stages") == "first":
        networks = []
    spec["fitted"], spec["network"] = fitted, networks[0] if networks else None


def job_recipe(spec: dict[str, Any], fitted: FittedPreprocessing) -> dict[str, Any]:
    """Return the fields of a recipe for the job's spec, those that the spec gives included."""
    from pg_tensile.execution.training.recipe import Explicit, Subject, recipe

    architecture = spec["network"] or spec["architecture"]
    tune = architecture.get("tune") if architecture["type"] == "pretrained" else None
    subject = Subject(architecture["type"], fitted.training_rows, tune)
    options = spec["options"]
    patience = options.get("early_stopping", {}).get("patience")
    explicit = Explicit(
        spec["batch_size"],
        spec["learning_rate"],
        patience,
        options.get("learning_rate_schedule"),
        options.get("average_weights"),
        False if spec.get("validation_query") else options.get("refit"),
        spec["epochs"],
        options.get("clip"),
    )
    return recipe(subject, explicit)._asdict()


def job_settings(spec: dict[str, Any]) -> Settings:
    """Return the library's settings for the job's spec with its recipe. Raises OptionError."""
    from pg_tensile.execution.training.settings import Settings
    from pg_tensile.rules import check_options

    options = spec["options"]
    check_options(options)
    if spec["batch_size"] == 0 and options.get("accumulate", 1) > 1:
        hint = "Give a batch_size, or leave accumulate out: the batch size is chosen so that whole batches fit."
        raise OptionError("a job that chooses its batch size cannot accumulate", hint=hint)
    return Settings(
        epochs=spec["epochs"],
        batch_size=spec["batch_size"],
        optimizer=spec["optimizer"],
        learning_rate=spec["learning_rate"],
        seed=spec["seed"],
        weight_decay=options.get("weight_decay"),
        momentum=options.get("momentum"),
        clip=spec.get("clip", options.get("clip")),  # absent in the recipe of an earlier version's checkpoint
        early_stopping=_early_stopping(spec),
        checkpoint_interval_s=spec["checkpoint_interval_s"],
        compression=options.get("compression", "none"),
        keep=options.get("keep", "best"),
        max_time_s=spec["max_time_s"],
        learning_rate_schedule=spec["learning_rate_schedule"],
        average_weights=spec["average_weights"],
        refit=spec["refit"],
        repeats=spec.get("repeats", 0),
        calibrate=options.get("calibrate", True),
        quantiles=tuple(options.get("quantiles", ())),
        precision=options.get("precision", "float32"),
        accumulate=int(options.get("accumulate", 1)),
        device_graphs=options.get("device_graphs", False),
        ranks=spec.get("world_size", 1),
    )


def _early_stopping(spec: dict[str, Any]) -> EarlyStopping | None:
    """Return the rule of early stopping, or None: by default it is on where the best epoch is kept."""
    from pg_tensile.execution.training.settings import EarlyStopping

    options = spec["options"]
    off = "early_stopping" not in options and options.get("keep", "best") == "last"
    if off or spec["patience"] == 0:
        return None
    return EarlyStopping(spec["patience"], options.get("early_stopping", {}).get("min_delta", 0.0))


def with_quantiles(fitted: FittedPreprocessing, options: dict[str, Any]) -> FittedPreprocessing:
    """Return what was fitted, with the quantiles that the job's options ask for.

    Raises OptionError for a classification."""
    quantiles, preprocessing = options.get("quantiles"), fitted.preprocessing
    if quantiles is None:
        return fitted
    if preprocessing.labels is not None:
        hint = "Leave it out, or set the option task to regression if the target is a number."
        name = preprocessing.target.name
        raise OptionError(f'the option quantiles is for regressions, but "{name}" has labels', hint)
    return replace(fitted, preprocessing=replace(preprocessing, quantiles=tuple(quantiles)))


def least_batch_size(spec: dict[str, Any]) -> int:
    """Return the batch size or, if it is to be chosen, the smallest one allowed."""
    least, _ = spec["options"].get("batch_size_range", (1, 1))
    return int(spec["batch_size"] or least)


def with_predicted_latencies(
    trace: Trace, profile: DeviceProfile, models: memoryview | None, load: float = 0.0
) -> Trace:
    """Return the trace with latencies predicted by the device's models or, without models, by the roofline.

    `load` is that of the device by others. The trace has the rules of the device's allocator, too.
    """
    from pg_tensile.planning.latency import model_bytes, roofline

    trace = trace.with_allocator(profile.allocator)
    if models is None:
        return trace.with_latencies(roofline.estimate(trace, profile))
    return trace.with_latencies(model_bytes.decode(bytes(models)).predict(trace, profile, load))


def with_hint(error: CaptureError, chosen: bool = False) -> CaptureError:
    """Return the error with a hint at how such a model can be trained.

    `chosen`: the batch size was to be chosen.
    """
    hint = (error.hint or "").replace("the policy none", "policy => 'none'")
    if "policy => 'none'" not in hint:
        hint = f"{hint} Or train it with policy => 'none', which runs the model as it is.".strip()
    if chosen:
        hint = hint.replace("policy => 'none'", "policy => 'none' and a batch_size")
    return CaptureError(error.message, hint, error.detail)


def network_of(architecture: dict[str, Any]) -> tuple[dict[str, Any] | None, str]:
    """Return the architecture of the network in that of a version, None if there is none, and its weights' prefix."""
    if architecture["type"] != "ensemble":
        return (None if architecture["type"] in FITTED else architecture), ""
    for place, name in enumerate(architecture.get("members") or ()):
        if name not in FITTED:
            return {"type": name}, f"members.{place}."
    return None, ""
