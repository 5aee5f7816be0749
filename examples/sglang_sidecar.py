"""Keep published weights in the form that SGLang's ``/pull_weights`` reads, beside an engine: a
whole checkpoint first, then XOR with the version before, tensor by tensor, under zstd.

    python examples/sglang_sidecar.py http://trainer:9500 /data/sglang --beside /models/base \\
        --engine http://localhost:30000 --checkpoint /data/live

    weight_v000007/model.safetensors               a whole version
    weight_v000008/model.safetensors.index.json    metadata: version, base_version, encodings
                   delta.safetensors               changed tensors; checksums of the results

Versions travel as commpress has them, and the engine copies from this machine. With --engine it is
told of each one, to patch the checkpoint in --checkpoint and load it. Needs zstandard.
"""

import argparse
import json
import re
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import torch
import zstandard

from commpress.errors import InvalidArgument
from commpress.integrations.weights.places import FolderPlace
from commpress.integrations.zero.safetensors_file import ALONE, INDEX, Writer
from commpress.weights import Receiver

DELTA = "delta.safetensors"
Weights = Mapping[str, torch.Tensor]


class SglangFolder:
    """The folder; ``update`` brings it up to date.

    - ``beside``: a folder whose small files (config, tokenizer) belong to each whole version.
    - ``key``: as ``Receiver`` takes it.

    It begins where an earlier one ended, if that version can still be had, or with a whole one.
    ``version`` is the newest in the folder, 0 before the first.
    """

    def __init__(
        self,
        source: str,
        folder: str | Path,
        *,
        beside: str | Path | None = None,
        key: bytes | None = None,
    ) -> None:
        self._compress = zstandard.ZstdCompressor(level=1).compress
        self._folder, self._beside = Path(folder), None if beside is None else Path(beside)
        if self._beside is not None and not self._beside.is_dir():
            raise InvalidArgument(f"beside is {str(beside)!r}, expected a folder with a config")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._receiver = Receiver(source, key=key)
        self.version = max(map(_version_in, self._folder.iterdir()), default=0)
        if self.version:
            with suppress(InvalidArgument):  # it is no longer kept: a whole one follows
                self._receiver.prepare(self.version)
                self._receiver.install()

    def update(self, wait: float = 0.0) -> int:
        """Add the source's newest version, if there is a newer one or comes in ``wait`` seconds;
        the newest in the folder."""
        receiver, old = self._receiver, self._receiver.weights
        follows = receiver.version == self.version > 0
        if receiver.prepare(wait=wait) is not None:
            receiver.install()  # what was live stays as it is until the next prepare
        if receiver.version == self.version:
            return self.version
        place = self._folder / f"weight_v{receiver.version:06d}"
        shutil.rmtree(place, ignore_errors=True)  # of one that was interrupted
        place.mkdir()
        if follows and receiver.version == self.version + 1:
            self._write_delta(place, receiver.version, old, receiver.weights)
        else:
            self._write_whole(place, receiver.weights)
        self.version = receiver.version
        return self.version

    def _write_whole(self, place: Path, weights: Weights) -> None:
        for path in self._beside.iterdir() if self._beside is not None else ():
            if path.is_file() and ".safetensors" not in path.name:
                shutil.copy2(path, place / path.name)
        with Writer(place / ALONE, weights) as file:
            for name, value in weights.items():
                file.write(name, value)

    def _write_delta(self, place: Path, version: int, old: Weights, new: Weights) -> None:
        codes, checksums = dict[str, torch.Tensor](), dict[str, str]()
        for name, value in new.items():
            was, now = _bytes(old[name]), _bytes(value)
            if not torch.equal(was, now):
                code = self._compress((was ^ now).numpy().data)
                codes[name] = torch.frombuffer(bytearray(code), dtype=torch.uint8)
                checksums[name] = f"{zlib.adler32(now.numpy().data):08x}"
        with Writer(place / DELTA, codes, checksums) as file:
            for name, packed in codes.items():
                file.write(name, packed)
        metadata = {
            "version": f"{version:06d}",
            "base_version": f"{version - 1:06d}",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "adler32",
        }
        index = {"metadata": metadata, "weight_map": dict.fromkeys(codes, DELTA)}
        FolderPlace(place).write(INDEX, [json.dumps(index).encode()])  # whole, and last


def _version_in(place: Path) -> int:
    """The version of a folder that is whole, else 0."""
    found = re.fullmatch(r"weight_v(\d{6,})", place.name)
    return int(found[1]) if found and any((place / n).exists() for n in (ALONE, INDEX)) else 0


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def post(engine: str, call: str, **content: str | int) -> None:
    about = {"Content-Type": "application/json"}
    with urlopen(Request(f"{engine}/{call}", json.dumps(content).encode(), about)) as answer:
        found = json.load(answer)
    if not found.get("success", True):
        raise RuntimeError(f"{engine}/{call} answered {found}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source")
    parser.add_argument("folder")
    parser.add_argument("--beside", help="a folder with config and tokenizer")
    parser.add_argument("--engine", help="address of SGLang on this machine")
    parser.add_argument("--checkpoint", help="the folder that the engine patches and loads")
    parser.add_argument("--versions", type=int, help="end after so many")
    options = parser.parse_args()
    if options.engine and not options.checkpoint:
        parser.error("--engine needs --checkpoint")
    folder = SglangFolder(options.source, options.folder, beside=options.beside)
    told, count = 0, 0
    while options.versions is None or count < options.versions:
        version = folder.update(wait=20.0)
        if version == told:
            continue
        if options.engine:
            places = {"local_checkpoint_dir": options.checkpoint, "source_dir": options.folder}
            post(options.engine, "pull_weights", **places, target_version=version)
            post(options.engine, "update_weights_from_disk", model_path=options.checkpoint)
        print(f"version {version} is in {options.folder}", flush=True)
        told, count = version, count + 1


if __name__ == "__main__":
    main()
