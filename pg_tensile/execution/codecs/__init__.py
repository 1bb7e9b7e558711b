"""Codecs of swapped tensors, on the host and on a GPU."""
