"""The pages as a product: no link dead, no page cut off from another, every page in the navigation,
pictures as their figures say."""

import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import sources

DOCS = sources.ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TEXTS = [*sorted(sources.ROOT.glob("*.md")), *PAGES]
LIMIT, README_LINES = 40, 120  # pages; a new subject may be worth a section of one of them
LINK = re.compile(r"\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def anchors(path: Path) -> set[str]:
    """As Python-Markdown makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", without_code(path.read_text()), re.M)
    plain = (
        re.sub(r"[^\w\s-]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", each)) for each in headings
    )
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
    """Commands, tables and lists that follow a paragraph without an empty line, which makes them
    part of it."""
    lines = re.sub(
        r"^```.*?^```", lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S
    ).split("\n")
    begins, inside = re.compile(r"    |\||- "), re.compile(r" |\||- |:::|\d+\. ")
    return [b for a, b in pairwise(lines) if begins.match(b) and a.strip() and not inside.match(a)]


def test_commands_tables_and_lists_stand_apart():
    assert not {path.name: lines for path in TEXTS if (lines := glued(path.read_text()))}
    assert glued("On both:\n    torchrun\n\n    torchrun\n") == ["    torchrun"]


def test_no_link_is_dead():
    assert not {path.name: links for path in TEXTS if (links := dead(path))}


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One word\n[a](#one-word) [b](#two) [c](page.md#one-word) [d](gone.md) "
        "[e](https://example.org)\n"
    )
    assert dead(page) == ["#two", "gone.md"]


# ---------------------------------------------------------------- links to elsewhere

TITLED = re.compile(r"\[([^\]]+)\]\(((?:\w+:)?//[^)\s]+)\)")
ADDRESS = re.compile(r"https://(?:[a-z0-9-]+\.)+[a-z]{2,}(?:/[\w.~%#-]+)*/?")
ARXIV = re.compile(r"https://arxiv\.org/abs/(\d{2}(?:0[1-9]|1[0-2])\.\d{4,5})")


def doubtful(links: list[tuple[str, str]]) -> list[str]:
    """Links (title, address) of a form that cannot be right. Nothing is fetched: tests need no
    network."""
    found = []
    for title, address in links:
        paper = ARXIV.fullmatch(address)
        if not ADDRESS.fullmatch(address) or ("arxiv" in address and not paper):
            found.append(address)
        elif paper and (len(paper[1].partition(".")[2]) == 5) != (paper[1] >= "1501"):
            found.append(
                f"{address} ({title}): four digits after the point until 2014, five since 2015"
            )
    return found


def ambiguous(links: list[tuple[str, str]]) -> dict[str, set[str]]:
    """Papers with two titles, and titles with two papers."""
    papers = {(address, title) for title, address in links if ARXIV.fullmatch(address)}
    of: dict[str, set[str]] = {}
    for address, title in papers:
        of.setdefault(address, set()).add(title)
        of.setdefault(title, set()).add(address)
    return {key: values for key, values in of.items() if len(values) > 1}


EXTERNAL = [link for path in TEXTS for link in TITLED.findall(without_code(path.read_text()))]


def test_links_to_elsewhere_look_right():
    assert len(EXTERNAL) > 30
    assert doubtful(EXTERNAL) == []


def test_a_paper_has_one_title_and_a_title_one_paper():
    assert ambiguous(EXTERNAL) == {}


def test_every_paper_that_sources_name_is_on_the_page_of_papers():
    listed = set(ARXIV.findall((DOCS / "papers.md").read_text()))
    folders = [*sources.folders(), "examples", "benchmarks"]
    texts = {
        path: path.read_text()
        for folder in folders
        for path in sorted((sources.ROOT / folder).rglob("*.py"))
    }
    number = re.compile(r"(?i)arxiv\D{1,12}(\d{4}\.\d{4,5})")
    named = {(path.name, paper) for path, text in texts.items() for paper in number.findall(text)}
    assert named, "files of the gallery name theirs"
    assert {(file, paper) for file, paper in named if paper not in listed} == set()


def test_doubtful_links_are_found():
    paper = "https://arxiv.org/abs/"
    wrong = ["http://example.org", "https://example", "//example.org", "https://example.org/a b"]
    wrong += ["https://arxiv.org/pdf/2102.02888"]
    wrong += [paper + number for number in ("2113.01234", "1901.0984", "1305.00001")]
    right = [f"{paper}2102.02888", "https://www.example.org/a/b-c_d.html#e"]
    assert [len(doubtful([("a", each)])) for each in wrong + right] == [1] * len(wrong) + [0, 0]
    one, two = f"{paper}2102.02888", f"{paper}2102.02889"
    assert ambiguous([("a", one), ("b", one)]) == {one: {"a", "b"}}
    assert ambiguous([("a", one), ("a", two)]) == {"a": {one, two}}


def tails(names: list[str]) -> list[str]:
    """Pages named like another with something behind it, which were cut off from that."""
    return [name for name in names if any(name.startswith(f"{other}_") for other in names)]


def test_one_page_for_a_question():
    assert len(PAGES) <= LIMIT, (
        f"{len(PAGES)} pages, at most {LIMIT}: put the new one into the page that has its subject"
    )
    assert tails([path.stem for path in PAGES]) == []
    assert tails(["fsdp", "fsdp_details", "start_two", "store"]) == ["fsdp_details"]


def test_the_readme_is_short():
    assert len((sources.ROOT / "README.md").read_text().splitlines()) <= README_LINES


def test_every_page_is_in_the_navigation_once():
    def pages(entry):
        if isinstance(entry, str):
            return [entry]
        return [
            page
            for each in (entry.values() if isinstance(entry, dict) else entry)
            for page in pages(each)
        ]

    settings = yaml.safe_load((sources.ROOT / "mkdocs.yml").read_text())
    assert sorted(pages(settings["nav"])) == [path.name for path in PAGES]
    assert len(settings["nav"]) == 4
    assert settings["theme"]["font"] is False, "nothing is loaded from elsewhere"


def test_the_glossary_is_in_order_and_explains():
    text = (DOCS / "glossary.md").read_text()
    entries = re.findall(r"^### (.+)\n(.+)", text, re.M)
    assert [word for word, _ in entries] == sorted((word for word, _ in entries), key=str.lower)
    assert {"Residual", "Error feedback", "Round", "Codec", "Bucket"} <= {
        word for word, _ in entries
    }
    assert all(len(meaning) > 15 for _, meaning in entries)


def test_every_public_name_is_in_the_reference():
    import commpress

    text = (DOCS / "api.md").read_text()
    shown = {line.rpartition(".")[2] for line in text.splitlines() if line.startswith(":::")}
    low_level = {
        "compressed_allreduce_hook",
        "compressed_allreduce",
        "ErrorFeedback",
        "CommpressError",
        "to_json_lines",
        "to_writer",
        "merge_timelines",
        "load_links",
    }
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
            assert re.search(rf"(?<![\d.]){re.escape(format(value, 'g'))}0?(?![\d])", page), (
                f"{label}: {value} in no table"
            )
    assert (DOCS / "figures" / f"{figure['name']}.svg").read_text() == draw.svg(figure), (
        "run python docs/figures/draw.py"
    )
