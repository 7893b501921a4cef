"""The CUDA C++ backend. This version ships none: `backend="native"` says so instead of falling back in silence."""

from __future__ import annotations


class BackendUnavailable(RuntimeError):
    """The backend that was asked for cannot run here; the message says what to do."""


def available() -> tuple[bool, str]:
    """(False, why): whether the native library can be used."""
    return False, "this version of kdtree has no CUDA C++ library; use backend='numba'"


def require() -> None:
    """Raise BackendUnavailable unless the native library can be used."""
    usable, why = available()
    if not usable:
        raise BackendUnavailable(f"backend: got 'native', but {why}")
