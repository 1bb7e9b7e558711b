"""The error for a request that does not fit the model that it is about."""

from __future__ import annotations


class Malformed(Exception):
    """A request does not fit the model's features."""

    hint = "The server's library and the predictor disagree; run make install and restart the server."
