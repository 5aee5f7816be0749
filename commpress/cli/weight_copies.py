"""Published weights at the command line: serve a folder, copy it, check it, say what is in it."""

import argparse
from contextlib import closing
from dataclasses import asdict
from functools import partial
from time import sleep

from commpress.cli.terminal import table, write_json
from commpress.errors import CommunicationError, InvalidArgument
from commpress.integrations.weights import mirror
from commpress.integrations.weights.http_server import WeightServer
from commpress.integrations.weights.receiver import Receiver
from commpress.integrations.weights.weight_records import Version
from commpress.integrations.zero.safetensors_file import save_safetensors
from commpress.units import show_bytes

NOTHING = "nothing is published there yet"
LOOK = 0.5  # seconds between two looks at readers
PATIENCE = 60.0  # of one wait for a newer version
AGAIN = 5.0  # until a server that did not answer is asked again

say = partial(print, flush=True)


def serve(options: argparse.Namespace) -> int:
    told = dict[str, int]()
    with closing(WeightServer(options.source, options.port, host=options.host)) as server:
        say(f"{options.source} can be read at {server.url}")
        while True:
            sleep(LOOK)
            for reader, (version, _) in server.readers.items():
                if told.get(reader) != version:
                    told[reader] = version
                    sent = show_bytes(server.sent_bytes)
                    say(f"{reader} reads version {version}; {sent} sent")


def pull(options: argparse.Namespace) -> int:
    saved, wait = 0, 0.0
    while True:
        try:
            version = mirror.pull(options.source, options.folder, wait=wait, tell=say)
        except CommunicationError as error:
            if not options.follow:
                raise
            say(f"{error}; asking again")
            sleep(AGAIN)
            continue
        if options.safetensors and version > saved:
            receiver = Receiver(options.folder, limit=options.limit)
            receiver.prepare()
            saved = receiver.install()
            save_safetensors(receiver.weights, options.safetensors)
            say(f"version {saved} is in {options.safetensors}")
        if not options.follow:
            say(f"{options.folder} has version {version}" if version else NOTHING)
            return 0 if version else 1
        wait = PATIENCE


def verify(options: argparse.Namespace) -> int:
    found = mirror.verify(options.source, tell=say)
    say(f"{len(found)} versions, all of them whole" if found else NOTHING)
    _write(options.json, found)
    return 0 if found else 1


def stat(options: argparse.Namespace) -> int:
    found = mirror.stat(options.source)
    if not found:
        raise InvalidArgument(f"source is {options.source!r}, and {NOTHING}")
    print(table(list(map(_cells, found))))
    _write(options.json, found)
    return 0


def _write(path: str | None, found: list[Version]) -> None:
    if path:
        write_json(path, list(map(asdict, found)))


def _cells(found: Version) -> dict[str, str]:
    return {
        "version": str(found.version),
        "base": str(found.base),
        "epoch": str(found.epoch),
        "parts": str(found.parts),
        "changed": f"{100 * found.density:.2f} %",
        "bytes": f"{found.bytes:,}",
        "times fewer": f"{found.dense_bytes / found.bytes:.1f}" if found.bytes else "",
        "anchor": show_bytes(found.anchor_bytes) if found.anchor_bytes else "",
    }
