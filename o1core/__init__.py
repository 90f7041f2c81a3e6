"""Constant-memory attention from Python: one operator, any device.

    engine = o1core.O1Batch(backend="auto")
    layer = engine.seal(q, k, v, o1core.Config(landmarks=32, window=128, sinks=4))
    out = layer.extend(q, k, v)

The operator is defined in docs/operator.md; `o1core.reference` is the same definition as code.
"""

from o1core import reference, testing
from o1core.config import Config, Geometry
from o1core.engine import Layer, O1Batch, Snapshot
from o1core.errors import BackendFallbackWarning, BackendUnavailable
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
    "Snapshot",
    "SubChunk",
    "__version__",
    "backends",
    "reference",
    "testing",
]
