"""Random argument lists: every command ends with a status and a sentence, never with a
traceback."""

import argparse
import contextlib
import io
import random
import re
import signal

import pytest

from commpress.cli import cluster_options, commands, demo, main, option_groups, parser, ranks
from commpress.errors import CommpressError
from commpress.plan.costs import device_costs

ODD = ("", " ", "\u0663", "0 1|2 3", "\u202e", "\udcff", "\U0001f4a5")
WORDS = r"""
0 1 2 3 -1 -0.5 0.5 1e-3 1e9 1e400 nan inf -inf 999999999999999999999999999999 0x10 1_000 a
a,b , ,, = 1,2 1,,2 2x2 2x x 0x0 4x1,2x2 3,1 | 1mbit 100mbit 1gbit,100us 1gbit, ,1us
0gbit,0us none,1us 1us 5ms 900GB/s 0GB/s 1KiB 4096 64KiB 1QiB sign int8 int4 none plain
powersgd-4 powersgd-0 topk-0 bits99 local:int4:30:0 local:: auto plain,sign sign=1 =1 110M
0M 1.5B device=1GiB device= host=2GiB,disk kill,stop / /dev/null no/such/file
no/such/file.svg -- - %s {} os:getcwd os:none no.such:module json:dumps : python -h
torch,network network, clocks
"""
VALUES = (*ODD, *re.findall(r"\S+", WORDS))


class Reached(CommpressError):
    """All was accepted: here processes would start."""


def leaves(top, words=()):
    rooms = [action for action in top._actions if isinstance(action, argparse._SubParsersAction)]
    if not rooms:
        return {words: top}
    return {
        name: leaf
        for word, below in rooms[0].choices.items()
        for name, leaf in leaves(below, (*words, word)).items()
    }


def drawn(draw, known, *, valid=0.0):
    """A list of words; ``valid``: how often an option that wants a number gets one."""
    words = draw.choice(list(known))
    given = [*words] if draw.random() < 0.95 else [*words[:-1], draw.choice(VALUES)]
    options = [
        action
        for action in known[words]._actions
        if action.option_strings and action.dest != "help"
    ]
    for _ in range(draw.choice((0, 1, 1, 2, 2, 3, 5, 8))):
        if not options:  # a command that takes a file alone
            given.append(draw.choice(VALUES))
            continue
        option = draw.choice(options)
        given.append(draw.choice(option.option_strings))
        if option.nargs != 0:
            if option.choices and draw.random() < 0.7:
                given.append(str(draw.choice(list(option.choices))))
            else:
                number = draw.random() < valid and option.type in (int, float)
                given.append(str(draw.randint(1, 4)) if number else draw.choice(VALUES))
        if draw.random() < 0.1:
            given.append(draw.choice(VALUES))
    return given


def outcome(call, *arguments):
    """The exit status, or the exception that nobody caught."""
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as said,
    ):
        try:
            status = call(*arguments)
        except SystemExit as left:
            status = left.code
        except BaseException as error:
            return error
    return AssertionError(said.getvalue()) if "Traceback" in said.getvalue() else status


def parsed(top, given):
    top.parse_args(given)
    return 0


def parse(seed, count):
    top, draw = parser(), random.Random(seed)
    known = leaves(top)
    lists = [drawn(draw, known) for _ in range(count)]
    return [
        (given, found) for given in lists if (found := outcome(parsed, top, given)) not in (0, 2)
    ]


def run_to_the_end(seed, count):
    """Of lists that parse, as far as the first process; slow ones are given up."""
    top, draw, bad = parser(), random.Random(seed), []
    # writes gigabytes
    known = {words: leaf for words, leaf in leaves(top).items() if words != ("bench", "io")}
    while count:
        given = drawn(draw, known, valid=0.8)
        if outcome(parsed, top, given) != 0:
            continue
        count -= 1
        found = limited(given)
        if found not in (0, 1, 2):
            bad.append((given, found))
    return bad


def limited(given):
    def enough(*_):
        raise Reached("this takes long")

    before = signal.signal(signal.SIGALRM, enough)
    signal.setitimer(signal.ITIMER_REAL, 2.0)
    try:
        return outcome(main, given)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def no_processes(monkeypatch, tmp_path):
    def reached(*_, **__):
        raise Reached("processes would start")

    for module, name in (
        (ranks, "LocalRanks"),
        (demo, "LocalRanks"),
        (demo, "Hosts"),
    ):
        monkeypatch.setattr(module, name, reached)
    monkeypatch.setattr(
        "commpress.cli.doctor.SECTIONS", dict.fromkeys(option_groups.SECTIONS, lambda *_: [])
    )
    monkeypatch.setattr(cluster_options, "measure_costs", lambda: device_costs(1e11))
    monkeypatch.chdir(tmp_path)
    small = ["--nodes", "2x2", "--device", "900GB/s", "--parameters", "1M", "--compute-ms", "1"]
    # the timer must not fire while modules are loaded: they would stay half there
    for command in ("plan", "simulate"):
        assert outcome(main, [command, *small]) == 0


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_argument_lists_are_parsed_or_refused(count):
    assert parse(count, count) == []


# the timer, within what cannot raise
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="slow ones are given up by a timer")
@pytest.mark.parametrize("count", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_accepted_arguments_end_with_a_status(no_processes, count):
    assert run_to_the_end(count, count) == []


def test_every_command_is_among_those_that_are_tried():
    assert {" ".join(words) for words in leaves(parser())} == {
        command.words for command in commands.COMMANDS
    }
