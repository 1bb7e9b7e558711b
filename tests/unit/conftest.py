"""The tests share their cores: one thread each, set before torch starts any."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
