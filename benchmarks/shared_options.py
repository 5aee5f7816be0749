"""Options that several benchmarks share."""

import argparse

from commpress.cli.option_groups import TABLES, at_least, declare, option
from commpress.cli.option_groups import sizes_of as sizes_of
from commpress.units import parse_bytes

natural = at_least(1)


def add_output(parser: argparse.ArgumentParser, *, check: str) -> None:
    """``check`` goes on from "exit status 1 unless"."""
    option(parser, "--check", says=f"exit status 1 unless {check}")
    declare(parser, "@json")


def add_sizes(parser: argparse.ArgumentParser, least: str, most: str, *, factor: int = 2) -> None:
    option(parser, "--min-bytes SIZE", parse_bytes, least)
    option(parser, "--max-bytes SIZE", parse_bytes, most)
    option(parser, "--factor N", at_least(2), factor, "from one size to the next")


def add_ranks(parser: argparse.ArgumentParser, *, ranks: int = 4) -> None:
    declare(parser, TABLES["ranks"].replace("4", f"{ranks}"))


def add_training(parser: argparse.ArgumentParser, *, rounds: int, steps: int, batch: int) -> None:
    option(parser, "--rounds N", natural, rounds, "of every variant")
    option(parser, "--steps N", natural, steps, "of each round")
    option(parser, "--batch N", natural, batch, "windows per rank and step")
    declare(parser, "@training")


def add_measuring(
    parser: argparse.ArgumentParser, *, rounds: int, steps: int, batch: int, check: str
) -> None:
    """All options of a command that times training steps on ranks, but for its own."""
    add_training(parser, rounds=rounds, steps=steps, batch=batch)
    add_ranks(parser)
    add_output(parser, check=check)


def add_topology(parser: argparse.ArgumentParser) -> None:
    declare(parser, "@topology")
