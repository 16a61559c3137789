"""Tables of text: plain, for rich, and for a notebook."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import rich.console

_STYLE = {
    "table": "border-collapse:collapse;margin:0.5em 0",
    "caption": "caption-side:top;text-align:left;color:inherit;font-weight:bold;padding:0 0 0.4em 0",
    "th": "padding:0.2em 0.8em;border-bottom:1px solid currentColor;color:inherit;background:transparent",
    "td": "padding:0.2em 0.8em;color:inherit;background:transparent",
    "p": "margin:0.2em 0;color:inherit",
}
"""Colors are those of the page, so that a table is readable on light and dark ones."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a line of headers. `str()` is plain text, `print` of rich and notebooks show it their way.

    Attributes:
        title: a line above; "" for none.
        headers: one a column.
        rows: one text a column each; line breaks are kept.
        notes: lines below.
        left: how many of the first columns, and `left_end` of the last ones, hold words and stand at the left; the
            rest hold numbers and stand at the right.
        left_end: see there.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()
    left: int = 1
    left_end: int = 0

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.headers):
                raise ValueError(f"A row has {len(row)} cells, but there are {len(self.headers)} headers: {row}.")

    def __str__(self) -> str:
        lines = [self.title] if self.title else []
        if self.headers:
            widths = [
                max(len(line) for row in (self.headers, *self.rows) for line in row[column].split("\n"))
                for column in range(len(self.headers))
            ]
            lines += self._plain(self.headers, widths)
            lines.append("  ".join("-" * width for width in widths))
            for row in self.rows:
                lines += self._plain(row, widths)
        return "\n".join([*lines, *self.notes])

    def __rich__(self) -> rich.console.RenderableType:
        """What rich prints."""
        from rich import box
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        parts: list[rich.console.RenderableType] = []
        if self.headers:
            title = Text(self.title) if self.title else None
            table = RichTable(
                title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
            )
            for column, header in enumerate(self.headers):
                justify: Literal["left", "right"] = "left" if self._is_left(column) else "right"
                # On a narrow terminal words are broken rather than cut off.
                table.add_column(Text(header), justify=justify, overflow="fold")
            for row in self.rows:
                table.add_row(*map(Text, row))
            parts.append(table)
        elif self.title:
            parts.append(Text(self.title, style="bold"))
        return Group(*parts, *map(Text, self.notes))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        parts = []
        if self.headers:
            caption = _tag("caption", self.title) if self.title else ""
            head = self._html_row("th", self.headers)
            body = "".join(self._html_row("td", row) for row in self.rows)
            parts.append(
                f'<table style="{_STYLE["table"]}">{caption}<thead>{head}</thead><tbody>{body}</tbody></table>'
            )
        elif self.title:
            parts.append(_tag("p", self.title, "font-weight:bold"))
        parts += [_tag("p", note) for note in self.notes]
        return "".join(parts)

    def _is_left(self, column: int) -> bool:
        return column < self.left or column >= len(self.headers) - self.left_end

    def _plain(self, row: Sequence[str], widths: Sequence[int]) -> list[str]:
        cells = [cell.split("\n") for cell in row]
        lines = []
        for index in range(max(map(len, cells))):
            texts = [cell[index] if index < len(cell) else "" for cell in cells]
            padded = (
                text.ljust(width) if self._is_left(column) else text.rjust(width)
                for column, (text, width) in enumerate(zip(texts, widths, strict=True))
            )
            lines.append("  ".join(padded).rstrip())
        return lines

    def _html_row(self, tag: str, row: Sequence[str]) -> str:
        cells = (
            _tag(tag, cell, f"text-align:{'left' if self._is_left(column) else 'right'}")
            for column, cell in enumerate(row)
        )
        return f"<tr>{''.join(cells)}</tr>"


def _tag(name: str, text: str, style: str = "") -> str:
    styles = ";".join(filter(None, (_STYLE[name], style)))
    return f'<{name} style="{styles}">{html.escape(text).replace(chr(10), "<br>")}</{name}>'
