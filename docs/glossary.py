"""Link the words of glossary.md where a page first says them, with their meaning as a tooltip.

A hook of mkdocs: `explain` works on the HTML of a page, so the Markdown has no links that would be
in the way. The site's link to the repository comes from pyproject.toml.
"""

import re
import tomllib
from html import escape
from pathlib import Path

ENTRY = re.compile(r"^### (.+)\n((?:.+\n)+)", re.M)
TOKEN = re.compile(r"<!--.*?-->|<[^>]+>|[^<]+", re.S)
# no links in these
QUIET = {"a", "code", "h1", "h2", "h3", "h4", "h5", "h6", "pre", "script", "style", "svg", "table"}
# a word of the glossary that a paragraph uses for something else
OTHER = re.compile(r"<!-- other sense: (.+?) -->")


def entries(text: str) -> dict[str, str]:
    """Meaning by word, both as glossary.md has them, without marks of Markdown."""
    return {
        word: re.sub(r"[`*]|\[|\]\([^)]*\)", "", " ".join(meaning.split()))
        for word, meaning in ENTRY.findall(text)
    }


def form(word: str) -> re.Pattern[str]:
    """A word in a text: singular or plural, at the beginning of a sentence or not; no part of a
    compound such as low-rank."""
    first, rest = word[0], r"[\s-]".join(re.escape(part) for part in re.split(r"[\s-]", word[1:]))
    return re.compile(rf"(?<![\w./-])[{first.upper()}{first.lower()}]{rest}(?:s|es)?(?![\w/-])")


def explain(html: str, words: dict[str, str], glossary: str = "glossary.html") -> str:
    """The HTML of a page whose first mention of every word, outside headings, code, tables and
    links, leads to its entry.

    ``<!-- other sense: rank, row -->`` in or before a paragraph keeps these words of it out.
    """
    waiting = {word: form(word) for word in words}
    parts, quiet, other = [], 0, set()
    for token in TOKEN.findall(html):
        if comment := OTHER.match(token):
            other = set(comment[1].split(", "))
        elif token.startswith("<"):
            name = re.match(r"</?(\w+)", token)
            if name and name[1] in QUIET:
                quiet += -1 if token.startswith("</") else 1
            for word in [word for word in waiting if f'"{glossary}#{slug(word)}"' in token]:
                del waiting[word]  # the page links it itself
            if token in ("</p>", "</li>"):
                other = set()
        elif not quiet:
            token, found = linked(
                token, {w: f for w, f in waiting.items() if w.lower() not in other}, words, glossary
            )
            waiting = {w: f for w, f in waiting.items() if w not in found}
        parts.append(token)
    return "".join(parts)


def linked(
    text: str, waiting: dict[str, re.Pattern[str]], words: dict[str, str], glossary: str
) -> tuple[str, set[str]]:
    """A piece of text with a link for the first mention of each waiting word, and the words that it
    has linked."""
    found: list[tuple[int, int, str]] = []
    # "exact step" before words that it contains
    for word in sorted(waiting, key=len, reverse=True):
        free = (
            m
            for m in waiting[word].finditer(text)
            if not any(a < m.end() and m.start() < b for a, b, _ in found)
        )
        if match := next(free, None):
            found.append((*match.span(), word))
    for begin, end, word in sorted(found, reverse=True):
        link = (
            f'<a class="term" href="{glossary}#{slug(word)}" '
            f'title="{escape(words[word])}">{text[begin:end]}</a>'
        )
        text = text[:begin] + link + text[end:]
    return text, {word for *_, word in found}


def slug(word: str) -> str:
    return re.sub(r"\s+", "-", word.lower())


def on_config(config):
    """Called by mkdocs once."""
    text = (Path(config.config_file_path).parent / "pyproject.toml").read_text()
    config.repo_url = tomllib.loads(text)["project"].get("urls", {}).get("Repository")
    return config


def on_page_content(html: str, page, config, files) -> str:
    """Called by mkdocs for every page."""
    if page.file.src_uri in ("glossary.md", "api.md"):
        return html
    return explain(html, entries((Path(config.docs_dir) / "glossary.md").read_text()))
