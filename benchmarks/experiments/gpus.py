"""Profiles of the GPUs of older papers, at effective rates as in pg_tensile/planning/device/profile.py."""

from __future__ import annotations

from pg_tensile.planning.device.profile import GB, GIB, TERA, DeviceProfile

# AccUDNN, section 6: PCIe 3.0 x16, 12 of 16 GB/s; FP32: 5 of 6.8 TFLOP/s; GDDR5: 220 of 288 GB/s.
M40 = DeviceProfile("M40", "sim", 24 * GIB, 12 * GB, 12 * GB, 1.0, 5 * TERA, 220 * GB, 10.0, 2.0)
# SwapAdvisor, section 6: PCIe 3.0 x16, 12 GB/s one way, 20 both ways; FP32: 12 of 15.7 TFLOP/s; HBM2: 750 of
# 900 GB/s.
V100 = DeviceProfile("V100", "sim", 16 * GIB, 12 * GB, 12 * GB, 20 / 24, 12 * TERA, 750 * GB, 10.0, 2.0)
