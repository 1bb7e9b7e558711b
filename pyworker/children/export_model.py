"""The trainer of `export_model` for formats that need PyTorch: a version as an ONNX graph.

Phases: JOB with architecture and preprocessing, and the weights; the graph is made, and checked against the model on
rows like those of the training. RESULT frames with the file's bytes, in base64, end it.
"""

from __future__ import annotations

import base64
from concurrent.futures import Future

from pyworker.children.channel import Channel
from pyworker.wire import FrameType

CHUNK = 6 << 20  # bytes of the file in a frame, whose header has at most 16 MB


def run(channel: Channel, libraries: Future[None]) -> None:
    """Run the export: the rest of the process after JOB."""
    weights = channel.receive_state()
    channel.wait_for(libraries, "loading")
    contents = channel.wait_for(channel.background.submit(_export, channel, weights), "exporting")
    for start in range(0, len(contents), CHUNK):
        part = base64.b64encode(contents[start : start + CHUNK]).decode()
        channel.send(FrameType.RESULT, {"rows": [[part]], "last": start + CHUNK >= len(contents)})


def _export(channel: Channel, weights: bytes) -> bytes:
    import torch

    from pg_tensile.execution import models
    from pg_tensile.execution.data.preprocessing import Preprocessing
    from pg_tensile.execution.exchange.onnx_check import check_graph
    from pg_tensile.execution.exchange.onnx_graph import onnx_bytes
    from pg_tensile.execution.training import checkpoint

    torch.set_num_threads(channel.threads)
    spec = channel.spec
    preprocessing = Preprocessing.from_json(spec["preprocessing"])
    module = models.build(models.parse(spec["architecture"]), preprocessing.model_inputs, preprocessing.outputs)
    checkpoint.load_model(module, checkpoint.from_bytes(weights))
    module.eval()
    contents = onnx_bytes(preprocessing, module, spec["metadata"])
    check_graph(contents, preprocessing, module)
    return contents
