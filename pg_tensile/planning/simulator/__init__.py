"""The time that plans take on a device."""
