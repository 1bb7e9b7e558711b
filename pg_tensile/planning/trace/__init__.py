"""Traces: a training iteration as operators, tensors and accesses, and its binary form."""
