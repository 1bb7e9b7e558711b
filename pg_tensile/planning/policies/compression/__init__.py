"""Which swapped tensors to compress (CSWAP): the execution advisor and its costs, for any policy."""
