"""The trainer of `evaluate_model` and `feature_importance`: applies a version of a model to the rows of a query.

Phases: the weights, as for a prediction (loaded_models.py, or evaluated_model.py for what sessions predict with
themselves, without PyTorch), on the CPU; then COLUMNS (the target and the groups) and, for each chunk of rows, a
PREDICT frame with the features and a ROWS frame with the target. Chunks are those of predict_rows, so outputs are the
same to the last bit. evaluate_model predicts while rows arrive and keeps no features; feature_importance keeps a sample
of the rows and predicts after ROWS_END. RESULT frames end it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from pg_tensile.execution.data.columns import Chunk, Column, decode
from pg_tensile.planning.device.profile import DeviceProfile
from pyworker.children.channel import Channel
from pyworker.children.evaluated_model import evaluated_model
from pyworker.children.loaded_models import Version, load_version
from pyworker.wire import Frame, FrameType

RESULT_ROWS = 10_000  # of a frame


def run(channel: Channel, libraries: Callable[[], Future[None]]) -> None:
    """Run the evaluation: the rest of the process after JOB. `libraries` begins the import of PyTorch."""
    imports = libraries() if channel.spec["evaluator"] is None else None
    weights = channel.receive_state()
    version: Version | None = evaluated_model(channel.spec, weights, channel.threads)
    if version is not None:
        rows = _results(channel, version)
    else:
        (imports or libraries()).result()
        import torch

        torch.set_num_threads(channel.threads)
        with torch.inference_mode():
            rows = _results(channel, load_version(channel.spec, [memoryview(weights)], _profile(channel)))
    for start in range(0, len(rows), RESULT_ROWS):
        last = start + RESULT_ROWS >= len(rows)
        channel.send(FrameType.RESULT, {"rows": rows[start : start + RESULT_ROWS], "last": last})


def _results(channel: Channel, version: Version) -> list[Any]:
    """Return the rows of the function's result, and close the version."""
    try:
        return (_importance if channel.spec["function"] == "feature_importance" else _evaluation)(channel, version)
    finally:
        version.close()


def _profile(channel: Channel) -> DeviceProfile | None:
    """Return the profile of the CPU if it is needed: the one that a job has measured, or one that is measured now."""
    from pg_tensile.execution.measuring.device import measure

    if not channel.spec["memory_budget"]:
        return None
    fields = channel.spec["profiles"].get("cpu")
    if fields is not None:
        return DeviceProfile.from_json(fields)
    return channel.wait_for(channel.background.submit(measure, "cpu"), "loading")  # behind the imports


def _columns(channel: Channel) -> list[Column]:
    frame = channel.wait_for_frame("loading", {FrameType.COLUMNS})
    return [Column(item["name"], item["type"], item["target"]) for item in frame.header["columns"]]


def _chunks(channel: Channel, columns: list[Column]) -> Iterator[tuple[Frame, Chunk | None]]:
    """Yield the PREDICT frame and the targets of each chunk; last, ROWS_END and None."""
    while True:
        frame = channel.wait_for_frame("loading", {FrameType.PREDICT, FrameType.ROWS_END})
        if frame.type == FrameType.ROWS_END:
            yield frame, None
            return
        rows = channel.wait_for_frame("loading", {FrameType.ROWS})
        yield frame, decode(columns, rows.header["rows"], rows.buffers)


def _evaluation(channel: Channel, version: Version) -> list[Any]:
    """Return the rows of evaluate_model's result."""
    from pg_tensile.execution.data.evaluation import EvaluatedRows, check_rows

    columns = _columns(channel)
    evaluated = EvaluatedRows(version.preprocessing, columns, channel.spec["dataset_cache_bytes"])
    for frame, chunk in _chunks(channel, columns):
        if chunk is not None:
            evaluated.add(version.outputs(version.inputs(frame)[0]), chunk)
            continue
        check_rows(evaluated.rows, evaluated.rows, columns[0])
        return [*channel.wait_for(channel.background.submit(evaluated.result, frame.buffers), "evaluating")]
    raise AssertionError("the last chunk is ROWS_END")


def _importance(channel: Channel, version: Version) -> list[Any]:
    """Return the rows of feature_importance's result."""
    from pg_tensile.execution.data.evaluation import check_rows, dictionaries_of, encoded, missing, target_values
    from pg_tensile.execution.data.importance import MAX_ROWS, Rows, Sample, importances

    spec, preprocessing = channel.spec, version.preprocessing
    columns = _columns(channel)
    sample = Sample(MAX_ROWS, spec["dataset_cache_bytes"], spec["seed"])
    rows = with_target = 0
    for frame, chunk in _chunks(channel, columns):
        if chunk is not None:
            present = (~missing(chunk, columns[0])).nonzero()[0]
            rows, with_target = rows + chunk.rows, with_target + len(present)
            sample.add(Rows.of(version.inputs(frame)[0], target_values(chunk, columns[0])).take(present))
            continue
        check_rows(rows, with_target, columns[0])
        kept = sample.result()
        dictionary = dictionaries_of(columns, frame.buffers)[0]
        ranking = importances(
            kept,
            encoded(kept.values, columns[0], dictionary, preprocessing),
            preprocessing,
            version.outputs,
            spec["metric"],
            spec["repeats"],
            spec["seed"],
            lambda: channel.poll_early("evaluating"),
        )
        return [[*item, spec["metric"]] for item in ranking]
    raise AssertionError("the last chunk is ROWS_END")
