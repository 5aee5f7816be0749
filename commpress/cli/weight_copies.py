"""Published weights at the command line: serve a folder, copy it, check it, say what is in it."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import sleep

from commpress.errors import InvalidArgument
from commpress.integrations.weights.http_server import WeightServer
from commpress.integrations.weights.mirror import Verified, pull, save_safetensors, stat, verify
from commpress.units import show_bytes

LOOK = 0.5  # seconds between two looks at readers, or for a newer version


def run(options: argparse.Namespace) -> int:
    actions: dict[str, Callable[[argparse.Namespace], int]] = {
        "serve": _serve,
        "pull": _pull,
        "verify": _verify,
        "stat": _stat,
    }
    return actions[options.action](options)


def _serve(options: argparse.Namespace) -> int:
    server = WeightServer(options.folder, options.port, host=options.host)
    print(f"{options.folder} can be read at {server.url}", flush=True)
    told: dict[str, int] = {}
    try:
        while True:
            sleep(LOOK)
            for reader, (version, _) in server.readers.items():
                if told.get(reader) != version:
                    print(
                        f"{reader} reads version {version}; {show_bytes(server.sent_bytes)} sent",
                        flush=True,
                    )
                    told[reader] = version
    finally:
        server.close()


def _pull(options: argparse.Namespace) -> int:
    server = None
    if options.serve is not None:
        Path(options.folder).mkdir(parents=True, exist_ok=True)
        server = WeightServer(options.folder, options.serve, host=options.host)
        print(f"{options.folder} can be read at {server.url}", flush=True)
    saved = 0
    try:
        while True:
            version = pull(
                options.source, options.folder, tell=lambda text: print(text, flush=True)
            )
            if options.safetensors and version > saved:
                saved = save_safetensors(options.folder, options.safetensors, limit=options.limit)
                print(f"version {saved} is in {options.safetensors}", flush=True)
            if not (options.follow or server):
                break
            sleep(LOOK)
    finally:
        if server is not None:
            server.close()
    print(
        f"{options.folder} has version {version}" if version else "nothing is published there yet"
    )
    return 0 if version else 1


def _verify(options: argparse.Namespace) -> int:
    found = verify(options.source, tell=lambda text: print(text, flush=True))
    print(
        f"{len(found)} versions, all of them whole" if found else "nothing is published there yet"
    )
    _write(options.json, found)
    return 0 if found else 1


def _stat(options: argparse.Namespace) -> int:
    found = stat(options.source)
    if not found:
        raise InvalidArgument(f"source is {options.source!r}, and nothing is published there yet")
    print("version     base  epoch  parts   changed        bytes  times fewer   anchor")
    for each in found:
        print(_line(each))
    _write(options.json, found)
    return 0


def _write(path: str | None, found: list[Verified]) -> None:
    if path:
        Path(path).write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")


def _line(found: Verified) -> str:
    fewer = f"{found.dense_bytes / found.bytes:.1f}" if found.bytes else ""
    return (
        f"{found.version:7}  {found.base:7}  {found.epoch:5}  {found.parts:5}  "
        f"{100 * found.density:6.2f} %  {found.bytes:11,}  {fewer:>11}  "
        f"{show_bytes(found.anchor_bytes) if found.anchor_bytes else '':>8}"
    )
