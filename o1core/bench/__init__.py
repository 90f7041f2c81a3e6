"""`o1core bench`: speed of backends and strategies beside exact attention, checked in the same run.

See docs/performance.md for what is measured and how it is counted.
"""

from o1core.bench.figures import Figure, Results, Subject
from o1core.bench.run import Options, bench
from o1core.bench.work import call_bytes, call_flops

__all__ = ["Figure", "Options", "Results", "Subject", "bench", "call_bytes", "call_flops"]
