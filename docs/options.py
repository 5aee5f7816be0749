"""Write the table of options in api.md: each public call, its options, their defaults and the words
of its docstring.

    python docs/options.py            rewrites docs/api.md; needs commpress and the trainers
"""

import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

PAGE = Path(__file__).resolve().parent / "api.md"
HEAD = """## Every option

Made by `python docs/options.py` from signatures and docstrings. What has no default is not listed.

| option | default | who needs it, what it does |
| --- | --- | --- |
"""
# options that mean the same wherever they are
COMMON = {
    "lr": "as in torch",
    "betas": "as in torch",
    "eps": "as in torch",
    "weight_decay": "as in torch",
    "block": "elements that are encoded together",
    "process_group": "the ranks that take part; by default all",
    "timeout": "until a rank that is silent is an error; by default that of the group",
    "transport": "in place of `process_group`, such as an `MpiTransport`",
}
BULLET = re.compile(r"^- ((?:``\w+``(?:, )?)+): (.+?)(?=\n- |\n\n|\Z)", re.M | re.S)
INSIDE = re.compile(r"((?:``\w+``(?:, )?)+): (.+?)(?=\.(?:\s|$)|; ``\w+``)", re.S)
ELSEWHERE = re.compile(r"(?:those of|as in|[Ss]ee|of|Beside)\s+``([\w.]+)``")


def calls() -> dict[str, typing.Any]:
    """Public calls by name, in the order of the page; a store is made by its ``open``."""
    found = {}
    for path in re.findall(r"^::: (\S+)", PAGE.read_text(), re.M):
        module, _, name = path.rpartition(".")
        taker = resolve_name(f"{module}:{name}")
        front = module.rpartition(".")[2]
        name = f"{front}.{name}" if front in ("hf", "lightning") else name
        found |= {f"{name}.open": taker.open} if hasattr(taker, "open") else {name: taker}
    return found


def sources(taker: typing.Any) -> Iterator[typing.Any]:
    """The call, the classes that it derives from, and the calls to which its docstring sends the
    reader for more options."""
    waiting, seen = [taker], set()
    while waiting:
        each = waiting.pop(0)
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, type):
            own = [base for base in each.__mro__[1:] if base.__module__.startswith("commpress")]
            waiting += own
        there = vars(sys.modules[each.__module__]) | vars(sys.modules["commpress"])
        for path in ELSEWHERE.findall(inspect.getdoc(each) or ""):
            owner, _, name = path.rpartition(".")
            other = there.get(name) or getattr(
                there.get(owner, sys.modules["commpress"]), name, None
            )
            if callable(other):
                waiting.append(other)


def options(taker: typing.Any) -> dict[str, tuple[str, typing.Any]]:
    """Options of a call, those that are passed on too: default, and the call that takes it."""
    found, passed = {}, []
    for name, parameter in inspect.signature(taker).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            passed += [*typing.get_args(parameter.annotation)]
        elif parameter.default is not parameter.empty:
            found[name] = shown(parameter.default), taker
    for name in (name for typed in passed for name in typing.get_type_hints(typed)):
        takers = ((inspect.signature(s).parameters.get(name), s) for s in sources(taker))
        default, owner = next((p.default, s) for p, s in takers if p is not None)
        found.setdefault(name, (shown(default), owner))
    return found


def shown(default: object) -> str:
    return "a function" if inspect.isfunction(default) else f"`{default!r}`"


def words(name: str, taker: typing.Any) -> str:
    """The first sentence of a docstring on an option: its own entry, else one that has its name."""
    docs = [re.sub(r"[ \t]+", " ", inspect.getdoc(s) or "") for s in sources(taker)]
    for pattern in (BULLET, INSIDE):
        for doc in docs:
            for names, text in pattern.findall(doc):
                if f"``{name}``" in names and not text.startswith("see ``"):
                    return sentence(text)
    for doc in docs:
        for text in re.split(r"(?<=[.!?])\s+|\n\n|\n- ", doc):
            if re.search(rf"``{name}(?:=[^`]*)?``", text) and ": see ``" not in text:
                return sentence(text)
    return COMMON.get(name, "")  # a test refuses options without words


def sentence(text: str) -> str:
    first = re.split(r"(?<=\.)\s", " ".join(text.split()))[0].strip("-.; ")
    return first.replace("``", "`").replace("|", "\\|")


def table() -> str:
    """A row for each option; those that several calls pass on stand where the first lists them."""
    rows, listed = "", {}
    for call, taker in calls().items():
        cells, others = [], []
        for name, (default, owner) in options(taker).items():
            first = listed.setdefault((name, owner), call)
            if first == call:
                cells.append(f"`{name}` | {default} | {words(name, taker)}")
            elif first not in others:
                others.append(first)
        cells += [f"those of `{other}` | |" for other in others]
        rows += "".join(f"| {cell} |\n" for cell in [f"**`{call}`** | |", *cells] if cells)
    return rows


def page() -> str:
    return PAGE.read_text().partition(HEAD.partition("\n")[0])[0].rstrip() + "\n\n" + HEAD + table()


if __name__ == "__main__":
    PAGE.write_text(page())
