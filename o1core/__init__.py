"""Constant-memory attention from Python: one operator, any device.

    engine = o1core.O1Batch(backend="auto")
    layer = engine.seal(q, k, v, o1core.Config(landmarks=32, window=128, sinks=4))
    out = layer.extend(q, k, v)

The operator is defined in docs/operator.md; `o1core.reference` is the same definition as code.
"""

import logging as _logging
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from o1core import reference
from o1core.config import Config, Geometry, Rectifier
from o1core.engine import Layer, O1Batch, Snapshot
from o1core.errors import BackendFallbackWarning, BackendUnavailable, UnknownBackend
from o1core.executor import Executor
from o1core.layout import Buffer, GroupMeta
from o1core.plan import Dispatch, Plan, SubChunk
from o1core.registry import BackendInfo, backends
from o1core.state import LayerState

if _TYPE_CHECKING:
    from o1core import testing

__version__ = "0.1.0"

__all__ = [
    "BackendFallbackWarning",
    "BackendInfo",
    "BackendUnavailable",
    "Buffer",
    "Config",
    "Dispatch",
    "Executor",
    "Geometry",
    "GroupMeta",
    "Layer",
    "LayerState",
    "O1Batch",
    "Plan",
    "Rectifier",
    "Snapshot",
    "SubChunk",
    "UnknownBackend",
    "__version__",
    "backends",
    "reference",
    "testing",
]

# A library speaks only where its host listens.
_logging.getLogger(__name__).addHandler(_logging.NullHandler())


def __getattr__(name: str) -> _Any:
    """`o1core.testing`, which a host that runs layers has no need to import."""
    if name == "testing":
        from importlib import import_module

        return import_module("o1core.testing")
    raise AttributeError(f"module 'o1core' has no attribute {name!r}")
