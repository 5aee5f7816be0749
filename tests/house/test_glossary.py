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


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_word_is_explained_where_it_first_comes(path):
    page = glossary.explain(html(path.read_text()), WORDS)
    assert unexplained(page) == []
    for slug in re.findall(r'href="glossary\.html#([\w-]+)"', page):
        assert slug in {word.lower().replace(" ", "-") for word in WORDS}
    links = re.findall(r'<a class="term" href="([^"]+)" title="([^"]+)"', page)
    assert len(links) == len(set(links)), "once is enough"


def test_an_unexplained_word_is_found():
    assert [each.split(":")[0] for each in unexplained(html("The residual of a rank."))] == [
        "Rank",
        "Residual",
    ]
    assert unexplained(html("A [rank](glossary.md#rank), and rank after rank.")) == []
    assert unexplained(html("A [rank](ddp.md) sends to another rank.")) == [
        "Rank: 'A  …  sends to another rank.'"
    ]


def test_only_prose_has_links():
    page = html(
        "# Ranks\n\n`rank` and [ranks](ddp.md), low-rank.\n\n| rank |\n| --- |\n| rank |\n\nThe "
        "ranks, all ranks.\n"
    )
    explained = glossary.explain(page, WORDS)
    assert explained.count('class="term"') == 1
    assert (
        'The <a class="term" href="glossary.html#rank" title="One process of a group.' in explained
    )


def test_longer_words_come_first_and_links_of_a_page_count():
    explained = glossary.explain("<p>Exact steps use a codec.</p><p>A codec.</p>", WORDS)
    assert re.findall(r"#([\w-]+)", explained) == ["exact-step", "codec"]
    page = '<p>See <a href="glossary.html#codec">codec</a>: a codec.</p>'
    assert glossary.explain(page, WORDS) == page


def test_another_sense_holds_for_one_paragraph():
    page = html(
        "<!-- other sense: row, block -->\nA row of a table, a block of it.\n\nA row of a "
        "message.\n"
    )
    explained = glossary.explain(page, WORDS)
    assert "A row of a table, a block of it." in explained
    assert re.findall(r"#([\w-]+)", explained) == ["row", "message"]


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
