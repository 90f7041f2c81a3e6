"""Constant-memory attention from Python: one operator, any device.

    engine = o1core.O1Batch(backend="auto")
    layer = engine.seal(q, k, v, o1core.Config(landmarks=32, window=128, sinks=4))
    out = layer.extend(q, k, v)

The operator is defined in docs/operator.md; `o1core.reference` is the same definition as code.
"""

import logging as _logging

from o1core import reference, testing
from o1core.config import Config, Geometry, Rectifier
from o1core.engine import Layer, O1Batch, Snapshot
from o1core.errors import BackendFallbackWarning, BackendUnavailable, UnknownBackend
from o1core.executor import Executor
from o1core.layout import Buffer, GroupMeta
from o1core.plan import Dispatch, Plan, SubChunk
from o1core.registry import BackendInfo, backends
from o1core.state import LayerState

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
