"""Plain tables."""

from __future__ import annotations

from collections.abc import Sequence


def format_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A title, a header and rows; the first column to the left, the others to the right."""
    cells = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join([first, *others])

    return "\n".join([title, line(cells[0]), "  ".join("-" * width for width in widths), *map(line, cells[1:]), ""])
