"""Simulation of plans: the time that they take on a device."""
