"""The exceptions and warnings that are o1core's own; the rest are ValueError and TypeError."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["BackendFallbackWarning", "BackendUnavailable", "UnknownBackend"]


class BackendFallbackWarning(UserWarning):
    """A backend was asked for, cannot serve here, and another one took its place."""


class BackendUnavailable(RuntimeError):
    """A backend cannot serve this machine or layer; `reasons` has every cause and its fix."""

    def __init__(self, backend: str, reasons: Sequence[str]) -> None:
        self.backend = backend
        self.reasons = tuple(reasons)
        super().__init__(f"backend {backend!r} cannot be used: " + "; ".join(self.reasons))

    def __reduce__(self) -> tuple[type[BackendUnavailable], tuple[str, tuple[str, ...]]]:
        # What an exception is rebuilt from is its text otherwise, and a worker's would not arrive.
        return type(self), (self.backend, self.reasons)


class UnknownBackend(BackendUnavailable, ValueError):
    """No backend of that name is installed: a mistake in the call, so nothing falls back."""
