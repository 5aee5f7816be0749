"""The pages as a product: no link dead, no page too long, every page in the navigation, pictures as their figures say."""

import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import sources

DOCS = sources.ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [sources.ROOT / "README.md", *PAGES]
WORDS, README_LINES, REFERENCES = 1200, 120, ("api.md", "command_line.md")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """As Python-Markdown makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.M)
    plain = (re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each)) for each in headings)
    return {re.sub(r"[-\s]+", "-", each.strip().lower()) for each in plain}


def dead(path: Path) -> list[str]:
    """Links inside the repository that lead nowhere."""
    found = []
    for link in LINK.findall(without_code(path.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def glued(text: str) -> list[str]:
    """Commands, tables and lists that follow a paragraph without an empty line, which makes them part of it."""
    lines = re.sub(r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S).split("\n")
    begins, inside = re.compile(r"    |\||- "), re.compile(r" |\||- |:::|\d+\. ")
    return [b for a, b in pairwise(lines) if begins.match(b) and a.strip() and not inside.match(a)]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_commands_tables_and_lists_stand_apart(path):
    assert glued(path.read_text()) == []
    assert glued("On both:\n    torchrun\n\n    torchrun\n") == ["    torchrun"]


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_no_link_is_dead(path):
    assert dead(path) == []


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One word\n[a](#one-word) [b](#two) [c](page.md#one-word) [d](gone.md) [e](https://example.org)\n")
    assert dead(page) == ["#two", "gone.md"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_page_is_longer_than_a_sitting(path):
    """Words as ``wc -w`` counts them, those of code and tables too. The two references may be longer."""
    words = len(path.read_text().split())
    assert words <= WORDS or path.name in REFERENCES, f"{path.name} has {words} words: split it by subject, or cut it"


def test_the_readme_is_short():
    assert len((sources.ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_every_page_is_in_the_navigation_once():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [page for each in (entry.values() if isinstance(entry, dict) else entry) for page in pages(each)]

    settings = yaml.safe_load((sources.ROOT / "mkdocs.yml").read_text())
    assert sorted(pages(settings["nav"])) == [path.name for path in PAGES]
    assert len(settings["nav"]) == 4
    assert settings["theme"]["font"] is False, "nothing is loaded from elsewhere"


def test_the_glossary_is_in_order_and_explains():
    text = (DOCS / "glossary.md").read_text()
    entries = re.findall(r"^### (.+)\n(.+)", text, re.M)
    assert [word for word, _ in entries] == sorted((word for word, _ in entries), key=str.lower)
    assert {"Residual", "Error feedback", "Round", "Codec", "Bucket"} <= {word for word, _ in entries}
    assert all(len(meaning) > 15 for _, meaning in entries)


def test_every_public_name_is_in_the_reference():
    import commpress

    text = (DOCS / "api.md").read_text()
    shown = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith(":::")}
    low_level = {
        "compressed_allreduce_hook", "FlatShardState", "compressed_reduce_scatter_hook", "compressed_allreduce",
        "ErrorFeedback", "CommpressError", "to_json_lines", "to_writer", "merge_timelines", "load_links",
    }  # fmt: skip
    assert set(commpress.__all__) - shown <= low_level


# ---------------------------------------------------------------- pictures

SPEC = importlib.util.spec_from_file_location("draw_figures", DOCS / "figures" / "draw.py")
draw = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(draw)
FIGURES = draw.figures()


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure["name"])
def test_a_picture_shows_what_its_page_says(figure):
    page = (DOCS / figure["page"]).read_text()
    for bars in figure["panels"].values():
        for label, value in bars.items():
            assert re.search(rf"(?<![\d.]){re.escape(format(value, 'g'))}0?(?![\d])", page), f"{label}: {value} in no table"
    assert (DOCS / "figures" / f"{figure['name']}.svg").read_text() == draw.svg(figure), "run python docs/figures/draw.py"
