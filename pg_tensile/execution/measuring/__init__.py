"""Measurements of a device: its rates and link, operators, codecs, batch sizes."""
