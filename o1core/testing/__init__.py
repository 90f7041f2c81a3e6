"""Cases, oracle and comparison: the check that every backend passes, for hosts and plug-in authors.

    import o1core.testing

    def test_my_backend():
        o1core.testing.check_backend("mine")

The oracle works on the whole history of a sequence in float64, with no ring and no recursion, so it
cannot share a fault with a kernel. A result is compared within a bound that follows the condition
of its own row (docs/operator.md section 9); nothing in it is fitted to what was seen.
"""

from o1core.testing.around import Hostile
from o1core.testing.cases import Case, cases, golden_case, random_rows
from o1core.testing.comparison import (
    Report,
    adopt,
    check_arrays,
    check_output,
    check_same_output,
    check_state,
    compare,
)
from o1core.testing.handles import check_handles
from o1core.testing.known import KNOWN_DEFECTS
from o1core.testing.matrix import Cell, Column, Matrix, parity
from o1core.testing.oracle import Expected, Oracle, Rows
from o1core.testing.remote import Remote
from o1core.testing.run import Answer, answer, check, check_backend, check_same, run_case
from o1core.testing.sabotage import sabotaged
from o1core.testing.steps import Steps, check_same_steps, check_steps
from o1core.testing.streams import DETOURS, Detour, Stream, random_stream, run_stream

__all__ = [
    "DETOURS",
    "KNOWN_DEFECTS",
    "Answer",
    "Case",
    "Cell",
    "Column",
    "Detour",
    "Expected",
    "Hostile",
    "Matrix",
    "Oracle",
    "Remote",
    "Report",
    "Rows",
    "Steps",
    "Stream",
    "adopt",
    "answer",
    "cases",
    "check",
    "check_arrays",
    "check_backend",
    "check_handles",
    "check_output",
    "check_same",
    "check_same_output",
    "check_same_steps",
    "check_state",
    "check_steps",
    "compare",
    "golden_case",
    "parity",
    "random_rows",
    "random_stream",
    "run_case",
    "run_stream",
    "sabotaged",
]
