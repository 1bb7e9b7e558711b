"""Line of the model that runs: the innermost Python frame outside PyTorch, the standard library and this package."""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, TracebackType

import torch

HERE = Path(__file__).parent
RECORDING = {
    str(HERE / f"{name}.py") for name in ("fake_results", "recorder", "recurrent", "sources")
}  # called while the model runs
TORCH = f"{Path(torch.__file__).parent}/"
STANDARD = f"{sysconfig.get_path('stdlib')}/"


@cache
def _owner(code: CodeType) -> str:
    """Return the owner of the code: "library", "capture" (which calls the model) or "model"."""
    file = code.co_filename
    if file in RECORDING or file.startswith((TORCH, "<frozen", "<eval_with_key")):
        return "library"
    if file.startswith(f"{HERE}/"):
        return "capture"
    return "library" if file.startswith(STANDARD) and "-packages/" not in file else "model"


def running_line() -> str:
    """Return the line of the model that runs now, as "model.py:41", or "" if there is no such line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (owner := _owner(frame.f_code)) != "capture":
        if owner == "model":
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_running(path: str) -> bool:
    """Return whether a function of a source file runs now, called by the model or by what it calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return frame is not None


def failing_line(traceback: TracebackType | None) -> str | None:
    """Return the line of the model nearest to where an error was raised; None if the traceback has no such line."""
    line = None
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if _owner(code) == "model":
            line = f"{Path(code.co_filename).name}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line
