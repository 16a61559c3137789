"""Tables as plain text, for rich and for notebooks."""

from __future__ import annotations

import io

import pytest

from diffusers_omni_offload.tables import Table

TABLE = Table(
    "What each takes",
    ("component", "GiB", "call"),
    [("transformer", "26.6", "a[0]"), ("vae\nof it", "0.2", "<b> & c")],
    ("All of it is predicted.",),
    left_end=1,
)


def test_plain_text_is_aligned() -> None:
    assert str(TABLE).split("\n") == [
        "What each takes",
        "component     GiB  call",
        "-----------  ----  -------",
        "transformer  26.6  a[0]",
        "vae           0.2  <b> & c",
        "of it",
        "All of it is predicted.",
    ]


def test_a_table_of_notes_alone() -> None:
    table = Table("", (), (), ("one", "two"))
    assert str(table) == "one\ntwo"
    assert "<table" not in table._repr_html_() and "two" in table._repr_html_()


def test_html_escapes_and_takes_the_colors_of_the_page() -> None:
    html = TABLE._repr_html_()
    assert "&lt;b&gt; &amp; c" in html and "<b>" not in html and "vae<br>of it" in html
    assert html.count("<tr>") == 3
    for fixed in ("#", "black", "white", "rgb"):
        assert fixed not in html


def test_rich_prints_cells_as_they_are() -> None:
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=80, record=True, file=io.StringIO())
    console.print(TABLE)
    text = console.export_text()
    assert "a[0]" in text and "What each takes" in text and "All of it is predicted." in text


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="A row has 1 cells, but there are 2 headers"):
        Table("", ("a", "b"), [("one",)])
