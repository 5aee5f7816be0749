"""A word of the glossary is explained where a page first says it: docs/glossary.py, as the built
site calls it."""

import importlib.util
import re
from html.parser import HTMLParser

import pytest

import sources

markdown = pytest.importorskip("markdown")
DOCS = sources.ROOT / "docs"
PAGES = sorted(path for path in DOCS.glob("*.md") if path.name not in ("glossary.md", "api.md"))
SPEC = importlib.util.spec_from_file_location("glossary", DOCS / "glossary.py")
glossary = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(glossary)
TEXT = (DOCS / "glossary.md").read_text()
WORDS = glossary.entries(TEXT)


def html(text: str) -> str:
    """A page's HTML before the hook."""
    return markdown.markdown(
        text, extensions=["tables", "attr_list", "pymdownx.superfences", "toc"]
    ).replace(".md#", ".html#")


class Prose(HTMLParser):
    """The text of a page outside headings, code, tables and links elsewhere; links to the glossary
    as ⟦slug|word⟧."""

    SKIPPED = ("h1", "h2", "h3", "h4", "h5", "h6", "code", "pre", "table")

    def __init__(self, page: str):
        super().__init__()
        self.text, self.skipped, self.link, self.other = "", 0, None, ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.skipped += tag in self.SKIPPED
        if tag == "a":
            self.link = dict(attributes).get("href") or ""

    def handle_endtag(self, tag):
        self.skipped -= tag in self.SKIPPED
        self.link = None if tag == "a" else self.link
        self.other = "" if tag in ("p", "li") else self.other

    def handle_comment(self, text):
        _, _, self.other = text.strip().partition("other sense: ")

    def handle_data(self, text):
        if self.skipped or (self.link is not None and not self.link.startswith("glossary.html#")):
            self.text += " … "
        elif self.link is not None:
            self.text += f"⟦{self.link.partition('#')[2]}|{text}⟧"
        else:
            for word in filter(None, self.other.split(", ")):
                text = re.sub(rf"(?i)\b{re.escape(word)}(e?s)?\b", "…", text)
            self.text += text


def unexplained(page: str) -> list[str]:
    """Words whose first mention in the prose of a page is no link to their entry."""
    prose, found = Prose(page).text, []
    for word in WORDS:
        plain = re.sub(
            r"⟦([^|]*)\|([^⟧]*)⟧",
            lambda m, w=word: "⟦⟧" if m[1] == w.lower().replace(" ", "-") else " … ",
            prose,
        )
        letters = r"[\s-]+".join(re.split(r"[\s-]", word))
        mention = re.search(rf"(?i:(?<![\w./-]){letters}(?:e?s)?(?![\w/-]))|⟦⟧", plain)
        if mention and mention[0] != "⟦⟧":
            found.append(f"{word}: {plain[max(0, mention.start() - 30) : mention.end() + 10]!r}")
    return found


def test_a_word_is_explained_where_it_first_comes():
    slugs = {word.lower().replace(" ", "-") for word in WORDS}
    for path in PAGES:
        page = glossary.explain(html(path.read_text()), WORDS)
        assert unexplained(page) == [], path
        assert set(re.findall(r'href="glossary\.html#([\w-]+)"', page)) <= slugs, path
        links = re.findall(r'<a class="term" href="([^"]+)" title="([^"]+)"', page)
        assert len(links) == len(set(links)), f"{path}: once is enough"


def found(text: str) -> list[str]:
    return [each.split(":")[0] for each in unexplained(html(text))]


def test_an_unexplained_word_is_found():
    assert found("The residual of a rank.") == ["Rank", "Residual"]
    assert found("A [rank](glossary.md#rank), and rank after rank.") == []
    assert found("A [rank](ddp.md) sends to another rank.") == ["Rank"]


@pytest.mark.parametrize(
    ("text", "slugs"),
    [
        ("# Ranks\n\n`rank`, [ranks](ddp.md)\n\n| rank |\n| --- |\n| rank |", []),
        ("The ranks, all ranks.", ["rank"]),
        ("Exact steps use a codec.\n\nA codec.", ["exact-step", "codec"]),
        ("Hidden rounds, and a round.", ["hidden-round", "round"]),
        (
            "<!-- other sense: row, block -->\nA row of a table, a block.\n\nA row of a message.",
            ["row", "message"],
        ),
    ],
)
def test_the_first_word_of_prose_has_a_link_and_a_longer_one_comes_first(text, slugs):
    explained = glossary.explain(html(text), WORDS)
    assert re.findall(r'class="term" href="glossary.html#([\w-]+)" title="[^"]', explained) == slugs


def test_every_sense_that_a_page_excepts_is_a_word_of_the_glossary_there():
    for path in PAGES:
        for comment in glossary.OTHER.finditer(text := path.read_text()):
            after = text[comment.end() :].split("\n\n")[0]
            for word in comment[1].split(", "):
                assert word.capitalize() in WORDS, f"{path.name}: {word}"
                assert re.search(rf"(?i)\b{word}s?\b", after), (
                    f"{path.name}: nothing says {word} after {comment[0]}"
                )


def test_a_meaning_is_plain_text():
    assert set(WORDS) == set(re.findall(r"^### (.+)$", TEXT, re.M))
    assert WORDS["Fragment"] == (
        "A part of a model's parameters that local updates exchange together. Fragments take turns."
    )
    assert not [word for word, meaning in WORDS.items() if re.search(r"[`*\[\]\n]", meaning)]


def test_the_site_uses_it():
    import yaml

    settings = yaml.safe_load((sources.ROOT / "mkdocs.yml").read_text())
    assert "docs/glossary.py" in settings["hooks"]
    assert "content.tooltips" in settings["theme"]["features"]
