"""What is known to be wrong, and must go on failing until somebody mends it.

Of the four rules in docs/operator.md section 4, the upstream engine's kernels keep only the last.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["KNOWN_DEFECTS"]

FAR_MAXIMUM = (
    "the original reads all rows of a sub-chunk relative to the far maximum after it: those before "
    "a massive key vanish"
)
SHIFT = "the original leaves landmarks that contribute nothing in its shift: near weights underflow"
SHIFT_AND_SCALE = f"{SHIFT}, and so do mixed weights beside the row's largest landmark logit"

KNOWN_DEFECTS: Mapping[str, Mapping[str, str]] = {
    "wgpu-original": {
        **dict.fromkeys(("dropped-far-above", "opposed-80"), SHIFT),
        **{f"survivor-{gap}-below": SHIFT for gap in (25, 29, 35)},
        **dict.fromkeys(("survivor-0-below", "opposed-100", "opposed-1000"), SHIFT_AND_SCALE),
        **{
            f"massive-{size}-at-{at}": FAR_MAXIMUM
            for size in (100, 10000, 100000)
            for at in (1, 40, 62, 63)
        },
        "massive-100-at-3-5-7-127": FAR_MAXIMUM,
        **{f"jumps-of-{step}": FAR_MAXIMUM for step in (30, 100)},
    }
}
"""By variant of a backend and case: the defect that makes it fail."""
