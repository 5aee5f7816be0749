"""The command line: parses what was typed and runs the module of the command."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

from commpress import __version__
from commpress.errors import CommpressError

DESCRIPTION = (
    "Train over slow networks: gradients travel in few bits, and what those leave out is sent "
    "later."
)
ROOMS = {
    "bench": "Measure; --json for programs.",
    "weights": "New versions of a model at its readers; docs/weights.md has the rest.",
}
LAUNCHED = """\
'commpress probe', bench allreduce and bench train start local processes, or run on several
machines under a launcher:

  torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
    --no-python commpress bench train
"""
WHOLE: dict[str, Any] = {  # of every parser: abbreviated options are refused, with what was meant
    "formatter_class": argparse.RawDescriptionHelpFormatter,
    "allow_abbrev": False,
}
_BELOW: dict[str, Any] = {"metavar": "COMMAND", "required": True, "help": argparse.SUPPRESS}


def parser() -> argparse.ArgumentParser:
    """All commands; of torch and of the modules that run them nothing is loaded."""
    from commpress.cli.commands import COMMANDS
    from commpress.cli.option_groups import declare

    top = argparse.ArgumentParser(
        prog="commpress",
        usage="commpress [-h] [--version] COMMAND ...",
        description=f"{DESCRIPTION}\n\n{overview()}\n{LAUNCHED}",
        **WHOLE,
    )
    top.add_argument("--version", action="version", version=f"commpress {__version__}")
    rooms = {"": top.add_subparsers(**_BELOW, prog="commpress")}
    for command in COMMANDS:
        room, _, word = command.words.rpartition(" ")
        if room not in rooms:
            about = f"{ROOMS[room]}\n\n{overview(room)}"
            usage = f"commpress {room} [-h] COMMAND ..."
            shown = rooms[""].add_parser(room, description=about, usage=usage, **WHOLE)
            rooms[room] = shown.add_subparsers(**_BELOW, prog=f"commpress {room}")
        below = rooms[room].add_parser(word, description=command.help, **WHOLE)
        declare(below, command.options)
        module, _, function = command.runs.partition(".")
        run = partial(_start, f"{__name__}.{module}", function)
        below.set_defaults(run=run, refuses=command.name, parser=below)
    return top


def overview(room: str = "") -> str:
    """Each command once, by groups; those below ``room`` only, if it is named."""
    from commpress.cli.commands import COMMANDS

    shown = [command for command in COMMANDS if command.words.startswith(room)]
    width = max(len(command.words) for command in shown)
    groups: dict[str, str] = {}
    for command in shown:
        line = f"  commpress {command.words:<{width}}  {command.summary}\n"
        groups[command.group] = groups.get(command.group, "") + line
    return "\n".join(f"{group}\n{lines}" for group, lines in groups.items())


def _start(module: str, function: str, options: argparse.Namespace) -> int:
    return int(getattr(import_module(module), function)(options))


def _refuse_unknown(parser: argparse.ArgumentParser, word: str) -> NoReturn:
    """End with the command's own usage, and the option that is meant."""
    from commpress.cli.option_groups import meant

    name = word.partition("=")[0]
    known = [each for action in parser._actions for each in action.option_strings if "--" in each]
    unknown = f"there is no option {name!r}{meant(name, known)}"
    parser.error(unknown if name.startswith("-") else f"{word!r} is one word too many")


def main(argv: Sequence[str] | None = None) -> int:
    _open_closed()
    try:
        return run(parser(), argv)
    except CommpressError as error:
        print(f"commpress: error: {error}", file=sys.stderr)
        return 2


def _open_closed() -> None:
    """Let no pipe or file take the number of a standard stream that is closed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def run(commands: argparse.ArgumentParser, argv: Sequence[str] | None) -> int:
    """The exit status of what ``argv`` asks for; errors of ours and of files in one line."""
    from commpress.cli.option_groups import refuse_early

    words = list(sys.argv[1:] if argv is None else argv)
    end = words.index("--") if "--" in words else len(words)
    options, unknown = commands.parse_known_args(words[:end])
    if end < len(words):  # a command of the user's, with options of its own
        if not hasattr(options, "command"):
            _refuse_unknown(vars(options).get("parser", commands), "--")
        options.command = words[end + 1 :]
    own, refuses = vars(options).pop("parser", commands), vars(options).pop("refuses", None)
    options.usual = own.get_default
    if unknown:
        _refuse_unknown(own, unknown[0])
    try:
        refuse_early(options)
        if refuses is not None:
            from commpress.cli import refusals

            if together := getattr(refusals, refuses, None):
                together(options)
        del options.usual  # options travel to ranks
        return int(options.run(options))
    # who read our output has gone; nothing more is to be flushed to it at exit
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except (CommpressError, OSError) as error:
        print(f"commpress: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
