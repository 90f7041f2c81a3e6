"""The kinds of far field. A kind is one room: its state, its kernels, how it is sealed.

Plan, state files, engine and executors ask the kind and never name one. To add a kind, write a
module beside `nystrom.py`, give it an instance here, and let `Geometry.far` choose it.
"""

from o1core.far.base import FarField
from o1core.far.none import NONE
from o1core.far.nystrom import NYSTROM

__all__ = ["NONE", "NYSTROM", "FarField"]
