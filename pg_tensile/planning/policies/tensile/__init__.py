"""The algorithms of the TENSILE paper."""
