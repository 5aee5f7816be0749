"""Places of published versions: a folder, or an object store by its URL. Files are written once,
but for the head."""

import contextlib
import os
import secrets
import stat
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from commpress.errors import InvalidArgument, MissingPackage
from commpress.integrations.weights.weight_records import HEAD_NAME, LONGEST_HEAD, HeadRecord

PART = ".part"  # ends the names of files that are not whole yet
AT_ONCE = 8  # parts of files that are read in the background at the same time
LOOK = 0.005  # seconds between two looks for a newer version


class ReadablePlace:
    """Files by name. FileNotFoundError for one that is not there."""

    def __init__(self) -> None:
        self._readers = ThreadPoolExecutor(AT_ONCE, "commpress-read")

    def read(self, name: str, first: int, most: int) -> bytes:
        """Bytes from ``first`` on, ``most`` of them or as many as there are."""
        raise NotImplementedError

    def begin(self, name: str, first: int, most: int) -> "Future[bytes]":
        """Read in the background, ``AT_ONCE`` parts at a time."""
        return self._readers.submit(self.read, name, first, most)

    def head(self, after: int, seconds: float) -> bytes:
        """The file ``head``, as soon as it has a version later than ``after``; after ``seconds`` as
        it is."""
        ends, before = monotonic() + seconds, b""
        while True:
            late = monotonic() >= ends
            try:
                found = self.read(HEAD_NAME, 0, LONGEST_HEAD)
            except FileNotFoundError:
                if late:
                    raise
            else:
                if late or (found != before and HeadRecord.unpack(found).newest > after):
                    return found
                before = found
            sleep(LOOK)


class WeightPlace(ReadablePlace):
    """One that can be written, too."""

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write a file anew; it is on the disk when this returns."""
        raise NotImplementedError

    def create(self, name: str, content: bytes) -> None:
        """Write a file whole or not at all; FileExistsError if there is one."""
        raise NotImplementedError

    def replace(self, name: str, content: bytes) -> None:
        """Write a file in place of another: readers find the one or the other."""
        raise NotImplementedError

    def names(self) -> list[str]:
        raise NotImplementedError

    def remove(self, name: str) -> None:
        raise NotImplementedError


class FolderPlace(WeightPlace):
    """A folder, which all ranks of a publisher see."""

    def __init__(self, path: str | os.PathLike[str], *, make: bool = False) -> None:
        super().__init__()
        self._path = Path(path)
        if make:
            self._path.mkdir(parents=True, exist_ok=True)
        if not self._path.is_dir():
            raise InvalidArgument(
                f"{str(path)!r} is no folder, expected one that a publisher has written to"
            )

    def __str__(self) -> str:
        return str(self._path)

    def read(self, name: str, first: int, most: int) -> bytes:
        file = os.open(self._path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            parts = []
            while most > 0 and (part := os.pread(file, most, first)):
                parts.append(part)
                first, most = first + len(part), most - len(part)
            return b"".join(parts)
        finally:
            os.close(file)

    def range(self, name: str, first: int, last: int) -> tuple[bytes, int]:
        """(bytes, size of the whole file)."""
        found = os.stat(self._path / name, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise FileNotFoundError(name)
        return self.read(name, first, last - first + 1), found.st_size

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        with open(self._path / name, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        self._sync()

    def create(self, name: str, content: bytes) -> None:
        with self._draft(name, content) as draft:
            os.link(draft, self._path / name)
        self._sync()

    def replace(self, name: str, content: bytes) -> None:
        with self._draft(name, content) as draft:
            os.rename(draft, self._path / name)
        self._sync()

    @contextlib.contextmanager
    def _draft(self, name: str, content: bytes) -> Any:
        draft = self._path / f"{name}.{secrets.token_hex(4)}{PART}"
        try:
            with open(draft, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            yield draft
        finally:
            draft.unlink(missing_ok=True)

    def _sync(self) -> None:
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def names(self) -> list[str]:
        return os.listdir(self._path)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


class ObjectPlace(WeightPlace):
    """An object store that fsspec knows, such as ``s3://bucket/run``. Its files appear whole or not
    at all.

    Two publishers that begin at the same moment are not told apart here: fsspec has no exclusive
    write for all stores.
    """

    def __init__(self, url: str, *, make: bool = False) -> None:
        super().__init__()
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise MissingPackage(
                f"{url} needs fsspec: pip install fsspec, and what it needs for such URLs"
            ) from error
        try:
            self._files, self._path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(
                f"{url!r} cannot be opened ({error}), expected a folder, http:// or a URL of fsspec"
            ) from error
        if make:
            self._files.makedirs(self._path, exist_ok=True)
        self._url = url

    def __str__(self) -> str:
        return self._url

    def read(self, name: str, first: int, most: int) -> bytes:
        size = int(self._files.info(self._file(name))["size"])
        content: bytes = (
            self._files.cat_file(self._file(name), start=first, end=min(first + most, size))
            if first < size
            else b""
        )
        return content

    def write(self, name: str, chunks: Iterable[bytes]) -> None:
        with self._files.open(self._file(name), "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def create(self, name: str, content: bytes) -> None:
        if self._files.exists(self._file(name)):
            raise FileExistsError(name)
        self.replace(name, content)

    def replace(self, name: str, content: bytes) -> None:
        self._files.pipe_file(self._file(name), content)
        self._files.invalidate_cache()

    def names(self) -> list[str]:
        self._files.invalidate_cache()
        if not self._files.exists(self._path):
            return []
        return [
            str(path).rstrip("/").rpartition("/")[2]
            for path in self._files.ls(self._path, detail=False)
        ]

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._file(name))

    def _file(self, name: str) -> str:
        return f"{self._path.rstrip('/')}/{name}"


def writable_place(to: str | os.PathLike[str]) -> WeightPlace:
    """A place for a publisher: a folder, which is made, or a URL of fsspec."""
    text = os.fspath(to)
    if text.startswith(("http://", "https://")):
        raise InvalidArgument(
            f"to is {text!r}, expected a folder or an object store: serve it with commpress "
            "weights serve"
        )
    return ObjectPlace(text, make=True) if "://" in text else FolderPlace(to, make=True)
