"""Types of devices, as PyTorch calls them; "emulated" is that of the project's tests."""

ACCELERATORS = ("cuda", "emulated")
DEVICE_TYPES = ("cpu", *ACCELERATORS)
