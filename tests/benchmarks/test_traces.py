"""Counts of what the host does for a card: those in the page are those of this checkout."""

import pytest

import sources
import traces
from commands import parser
from commpress.errors import InvalidArgument


def command(*arguments):
    return traces.run(parser().parse_args(["traces", *map(str, arguments)]))


def table(text):
    return text.partition(traces.OPENS)[2].partition(traces.CLOSES)[0].strip().splitlines()


def test_the_page_has_the_counts_of_this_checkout(tmp_path, capsys):
    page, kept = tmp_path / "page.md", sources.ROOT / "docs" / "gpu.md"
    page.write_text(f"# Page\n\n{traces.OPENS}\n\nold\n\n{traces.CLOSES}\n\nend\n")
    assert command("--docs", page, "--check", "--json", tmp_path / "now.json") == 0
    now, told = table(page.read_text()), table(kept.read_text())
    assert page.read_text().endswith(f"{traces.CLOSES}\n\nend\n")
    assert len(now) > 8
    assert [after(row) for row in told] == [after(row) for row in now]
    assert "0 KiB by pageable memory" in capsys.readouterr().out


def after(row):
    """The cells of a row without the counts before the arrows."""
    return [cell.split("→")[-1].strip() for cell in row.split("|")]


def test_counts_of_another_checkout_stand_in_front_where_they_differ():
    row = {"what": "a bucket"} | dict.fromkeys([*traces.COLUMNS, traces.OFF], 2.0)
    assert traces.beside(row, row | {"copies": 3.5})["copies"] == "3.5 → 2"
    assert traces.beside(row, None)["copies"] == "2"


def test_a_page_without_the_lines_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing")
    with pytest.raises(InvalidArgument, match="has no lines"):
        traces.enter(page, [{"what": "a bucket"}])
