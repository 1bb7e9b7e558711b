"""Errors of jobs whose ranks are on a Ray cluster. pyworker/child.py maps these classes to SQLSTATEs."""

from __future__ import annotations

from pg_tensile.errors import TensileError


class RayMissingError(TensileError):
    """Ray is not installed for the Python that jobs run in."""


class RayTokenError(TensileError):
    """The cluster does not accept the token, or there is none."""


class RayVersionError(TensileError):
    """The cluster has another version of Ray or Python, or one that is too old."""


class RayConnectionError(TensileError):
    """The cluster cannot be reached, or the connection to it is lost."""


class RankLostError(TensileError):
    """A rank has died, or does not answer the others."""
