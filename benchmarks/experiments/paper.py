"""Results reported in the TENSILE paper (tables I to IV), for comparison with the measured ones."""

from __future__ import annotations

from typing import NamedTuple


class Published(NamedTuple):
    """A published result. `msr` is None in table II, whose `eor` is the first iteration's.

    `prediction_s`, `prediction_eor`: the time of predicting latencies, and the part of `eor` that it is.
    """

    msr: float | None
    eor: float
    prediction_s: float | None = None
    prediction_eor: float | None = None

    @property
    def cbr(self) -> float | None:
        return None if self.msr is None else self.msr / self.eor

    @property
    def vanilla_s(self) -> float | None:
        """Seconds of the first iteration without a plan, which the time of the prediction and its part imply."""
        return self.prediction_s / self.prediction_eor if self.prediction_s and self.prediction_eor else None

    def __str__(self) -> str:
        return f"{self.eor:.2f}" if self.msr is None else f"{self.msr:.1%} at {self.eor:.2f}"


PUBLISHED = {  # table, case and method; in table I its phase: cold start (cs) or updated (up)
    ("table1", "VGG-16", "up"): Published(0.3192, 1.2475),
    ("table1", "VGG-16", "cs"): Published(0.2670, 6.0128),
    ("table1", "Inception v3", "up"): Published(0.4788, 1.4839),
    ("table1", "Inception v3", "cs"): Published(0.4361, 3.1128),
    ("table1", "Inception v4", "up"): Published(0.5558, 1.2898),
    ("table1", "Inception v4", "cs"): Published(0.5154, 2.6727),
    ("table1", "ResNet-50", "up"): Published(0.4647, 1.3813),
    ("table1", "ResNet-50", "cs"): Published(0.4258, 3.5395),
    ("table1", "DenseNet-121", "up"): Published(0.5236, 1.0664),
    ("table1", "DenseNet-121", "cs"): Published(0.5135, 2.2532),
    ("table2", "VGG-16", "tensile"): Published(None, 1.2523, 1.3549, 0.2067),
    ("table2", "VGG-16", "lru"): Published(None, 5.8053),
    ("table2", "Inception v3", "tensile"): Published(None, 1.4744, 1.4743, 0.3699),
    ("table2", "Inception v3", "lru"): Published(None, 6.7529),
    ("table2", "Inception v4", "tensile"): Published(None, 1.3797, 2.4991, 0.2865),
    ("table2", "Inception v4", "lru"): Published(None, 10.2088),
    ("table2", "ResNet-50", "tensile"): Published(None, 1.3924, 1.7823, 0.3198),
    ("table2", "ResNet-50", "lru"): Published(None, 9.6073),
    ("table2", "DenseNet-121", "tensile"): Published(None, 1.3855, 1.3855, 0.3335),
    ("table2", "DenseNet-121", "lru"): Published(None, 10.0925),
    ("table3", "VGG-16", "vdnn"): Published(0.1109, 1.7835),
    ("table3", "VGG-16", "capuchin"): Published(0.2558, 1.8304),
    ("table3", "VGG-16", "tensile"): Published(0.2670, 1.6287),
    ("table3", "Inception v3", "vdnn"): Published(0.1633, 2.5184),
    ("table3", "Inception v3", "capuchin"): Published(0.4331, 2.7745),
    ("table3", "Inception v3", "tensile"): Published(0.4361, 1.6468),
    ("table3", "Inception v4", "vdnn"): Published(0.1903, 2.5028),
    ("table3", "Inception v4", "capuchin"): Published(0.5129, 3.2362),
    ("table3", "Inception v4", "tensile"): Published(0.5154, 1.4281),
    ("table3", "ResNet-50", "vdnn"): Published(0.1733, 2.2981),
    ("table3", "ResNet-50", "capuchin"): Published(0.3859, 2.2320),
    ("table3", "ResNet-50", "tensile"): Published(0.4258, 1.5540),
    ("table3", "DenseNet-121", "vdnn"): Published(0.1381, 2.6148),
    ("table3", "DenseNet-121", "capuchin"): Published(0.4860, 3.4400),
    ("table3", "DenseNet-121", "tensile"): Published(0.5135, 1.1678),
    ("table4", "mixed", "vdnn"): Published(0.0580, 1.6297),
    ("table4", "mixed", "capuchin"): Published(0.1150, 7.6545),
    ("table4", "mixed", "tensile"): Published(0.1565, 1.1589),
}
