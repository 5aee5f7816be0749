"""Published versions as the folders that SGLang's ``/pull_weights`` reads: a checkpoint first, then
XOR with the version before, tensor by tensor, under zstd.

    weight_v000007/model.safetensors               a whole version
    weight_v000008/model.safetensors.index.json    metadata: version, base_version, encodings
                   delta.safetensors               changed tensors; checksums of the results

The index is written last. A folder serves the engines beside it: over a slow link versions travel
as commpress has them.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from commpress.errors import InvalidArgument, MissingPackage
from commpress.integrations.weights.receiver import Receiver
from commpress.integrations.zero.safetensors_file import ALONE, INDEX, Writer

DELTA = "delta.safetensors"
Weights = Mapping[str, torch.Tensor]


class SglangFolder:
    """``folder = SglangFolder("http://trainer:9500", "/data/sglang", beside="/models/base")``; then
    ``folder.update()`` whenever it suits, and ``POST /pull_weights`` with the version it returns.

    - ``beside``: a folder whose small files (config, tokenizer) belong to each whole version.
    - ``key``, ``limit``: as ``Receiver`` takes them.

    It begins where an earlier one ended, if that version can still be had, or with a whole one.
    ``version`` is the newest in the folder, 0 before the first.
    """

    def __init__(
        self,
        source: str | os.PathLike[str],
        folder: str | os.PathLike[str],
        *,
        beside: str | os.PathLike[str] | None = None,
        key: bytes | None = None,
        limit: int | str = "64GiB",
    ) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingPackage(
                "SGLang's folders need zstandard: pip install zstandard"
            ) from error
        self._compress = zstandard.ZstdCompressor(level=1).compress
        self._folder, self._beside = Path(folder), None if beside is None else Path(beside)
        if self._beside is not None and not self._beside.is_dir():
            raise InvalidArgument(f"beside is {str(beside)!r}, expected a folder with a config")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._receiver = Receiver(source, key=key, limit=limit)
        self.version = max(map(_version_in, self._folder.iterdir()), default=0)
        if self.version:
            with suppress(InvalidArgument):  # it is no longer kept: a whole one follows
                self._receiver.prepare(self.version)
                self._receiver.install()

    def update(self) -> int:
        """Add the source's newest version, if there is a newer one; the newest in the folder."""
        receiver, old = self._receiver, self._receiver.weights
        follows = receiver.version == self.version > 0
        if receiver.prepare() is not None:
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
        draft = place / f"{INDEX}.part"
        with draft.open("w") as text:
            json.dump(index, text)
            text.flush()
            os.fsync(text.fileno())
        draft.replace(place / INDEX)


def _version_in(place: Path) -> int:
    """The version of a folder that is whole, else 0."""
    found = re.fullmatch(r"weight_v(\d{6,})", place.name)
    return int(found[1]) if found and any((place / n).exists() for n in (ALONE, INDEX)) else 0


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().view(-1).view(torch.uint8)
