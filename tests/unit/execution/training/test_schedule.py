"""Learning rates of schedules that are known when a run begins."""

from __future__ import annotations

import numpy as np
import pytest

from pg_tensile.execution.training.schedule import RISE, cosine, scheduled
from pg_tensile.execution.training.settings import Settings


def test_the_cosine_rises_to_1_and_falls_to_0() -> None:
    assert cosine(0.0) == 0.0 and cosine(RISE) == 1.0 and cosine(1.0) == pytest.approx(0.0, abs=1e-12)
    assert cosine(RISE + (1 - RISE) / 2) == pytest.approx(0.5)
    rising = [cosine(part) for part in np.linspace(0.0, RISE, 50).tolist()]
    falling = [cosine(part) for part in np.linspace(RISE, 1.0, 50).tolist()]
    assert rising == sorted(rising) and falling == sorted(falling, reverse=True)


def test_other_schedules_leave_the_rate_to_the_losses() -> None:
    plateau = Settings(10, 32, learning_rate=0.5, learning_rate_schedule="plateau")
    assert scheduled(plateau, 5.0, None) is None and scheduled(plateau, 5.0, 0.125) == 0.125
    ends = Settings(10, 32, learning_rate=0.5, learning_rate_schedule="cosine")
    assert scheduled(ends, 1.0, None) == 0.5 and scheduled(ends, 5.5, None) == pytest.approx(0.25)
