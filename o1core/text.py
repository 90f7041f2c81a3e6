"""Plain tables, as plans, reports and benchmarks print them."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["table"]


def table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int | None = 1
) -> list[str]:
    """Lines of a table: the first `left` columns to the left (`None`: all), the others right."""
    left = len(header) if left is None else left
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return [
        "  ".join(
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
