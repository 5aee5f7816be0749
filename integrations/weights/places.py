"""Places of published versions: a folder, or an object store by its URL. Files are written once,
but for the head."""

import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from pathlib import Path
from time import monotonic, sleep

from commpress.errors import InvalidArgument, MissingPackage
from commpress.integrations.weights import weight_records as records

StrPath = str | os.PathLike[str]
HTTP = ("http://", "https://")  # URLs of servers
PART = ".part"  # ends the names of files that are not whole yet
AT_ONCE = 8  # parts of files that are read in the background at the same time
CHUNK, MOST = 1 << 20, 8 << 20  # bytes of a file that are asked for at once, and at most
LOOK = 0.05  # seconds between two looks for a newer version


class ReadablePlace:
    """Files by name. FileNotFoundError for one that is not there."""

    def __init__(self, where: StrPath) -> None:
        self._where = os.fspath(where)
        self._readers = ThreadPoolExecutor(AT_ONCE, "commpress-read")
        self._looking = threading.Lock()  # of the one that looks for those that wait
        self._seen, self._newest = b"", 0

    def __str__(self) -> str:
        return self._where

    def range(self, name: str, first: int, most: int) -> tuple[bytes, int]:
        """(bytes from ``first`` on, ``most`` of them or fewer; size of the whole file)."""
        raise NotImplementedError

    def read(self, name: str, first: int, most: int) -> bytes:
        """Bytes from ``first`` on, ``most`` of them or as many as there are."""
        parts, part = list[bytes](), b"."
        while most > 0 and part:
            part, total = self.range(name, first, min(most, MOST))
            parts.append(part)
            first, most = first + len(part), min(most - len(part), total - first - len(part))
        return b"".join(parts)

    def begin(self, name: str, first: int, most: int) -> "Future[bytes]":
        """Read in the background, ``AT_ONCE`` parts at a time."""
        return self._readers.submit(self.read, name, first, most)

    def look(self, after: int, seconds: float) -> bytes:
        """The file ``head``. A server may wait until it has a version later than ``after``."""
        return self.read(records.HEAD_NAME, 0, records.LONGEST_HEAD)

    def head(self, after: int, seconds: float) -> bytes:
        """The file ``head``, as soon as it has a version later than ``after``; after ``seconds`` as
        it is. Of those that wait one looks, and the others learn it from that one."""
        if not isinstance(seconds, int | float) or not 0 <= seconds < inf:
            raise InvalidArgument(f"wait is {seconds!r}, expected seconds of at least 0")
        if not seconds:
            return self.look(after, 0.0)
        ends = monotonic() + seconds
        self._look_again(after, 0.0)  # not behind one that waits for a later version
        while self._newest <= after and (left := ends - monotonic()) > 0:
            if self._looking.acquire(timeout=left):
                try:
                    if self._newest <= after:
                        self._look_again(after, left)
                finally:
                    self._looking.release()
        return self._seen or self.look(after, 0.0)

    def _look_again(self, after: int, seconds: float) -> None:
        try:
            self._seen = self.look(after, seconds)
            self._newest = records.unpack(records.HeadRecord, self._seen).newest
        except FileNotFoundError:
            self._seen, self._newest = b"", 0
        if self._newest <= after:
            sleep(min(LOOK, seconds))


class FolderPlace(ReadablePlace):
    """A folder, which all ranks of a publisher see."""

    def __init__(self, path: StrPath, *, make: bool = False) -> None:
        super().__init__(path)
        self._path = Path(path)
        if make:
            with contextlib.suppress(FileExistsError):  # perhaps as a file
                self._path.mkdir(parents=True)
        if not self._path.is_dir():
            raise InvalidArgument(
                f"{str(path)!r} is no folder, expected one that a publisher writes to"
            )

    def range(self, name: str, first: int, most: int) -> tuple[bytes, int]:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # not to wait at a pipe
        with _opened(self._path / name, flags) as file:
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise FileNotFoundError(name)
            return os.pread(file, most, first), found.st_size

    def write(self, name: str, chunks: Iterable[bytes], *, anew: bool = False) -> None:
        """Write a file whole or not at all; it is on the disk when this returns. It takes the place
        of another, or with ``anew`` raises FileExistsError if there is one."""
        draft = self._path / f"{name}.{secrets.token_hex(4)}{PART}"
        try:
            with open(draft, "xb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            (os.link if anew else os.rename)(draft, self._path / name)
        finally:
            draft.unlink(missing_ok=True)
        with _opened(self._path, os.O_RDONLY | os.O_DIRECTORY) as folder:
            os.fsync(folder)

    def names(self) -> list[str]:
        return os.listdir(self._path)

    def remove(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    file = os.open(path, flags)
    try:
        yield file
    finally:
        os.close(file)


class ObjectPlace(ReadablePlace):
    """An object store that fsspec knows, such as ``s3://bucket/run``. Its files appear whole or not
    at all.

    Two publishers that begin at the same moment are not told apart here: fsspec has no exclusive
    write for all stores.
    """

    def __init__(self, url: str, *, make: bool = False) -> None:
        super().__init__(url)
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise MissingPackage(
                f"{url} needs fsspec: pip install fsspec, and what it needs for such URLs"
            ) from error
        try:
            self._files, path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise InvalidArgument(
                f"{url!r} cannot be opened ({error}), expected a folder, http:// or a URL of fsspec"
            ) from error
        self._path = path.rstrip("/")
        if make:
            self._files.makedirs(self._path, exist_ok=True)

    def range(self, name: str, first: int, most: int) -> tuple[bytes, int]:
        path = f"{self._path}/{name}"
        self._files.invalidate_cache(path)  # another process writes the head
        size = int(self._files.info(path)["size"])
        end = min(first + most, size)
        return self._files.cat_file(path, start=first, end=end) if first < size else b"", size

    def write(self, name: str, chunks: Iterable[bytes], *, anew: bool = False) -> None:
        if anew and name in self.names():
            raise FileExistsError(name)
        with self._files.open(f"{self._path}/{name}", "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def names(self) -> list[str]:
        self._files.invalidate_cache()
        found = self._files.ls(self._path, detail=False) if self._files.exists(self._path) else []
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._path}/{name}")


WeightPlace = FolderPlace | ObjectPlace


def url_of(where: StrPath) -> str:
    """A folder or URL as text."""
    if not where or not isinstance(where, str | os.PathLike):
        raise InvalidArgument(f"{where!r} is no place, expected a folder, http:// or another URL")
    return os.fspath(where)


def stored_place(where: StrPath, *, make: bool = False) -> WeightPlace:
    """A folder or an object store, by its URL; ``make``: for a publisher."""
    text = url_of(where)
    if text.startswith(HTTP):
        raise InvalidArgument(
            f"to is {text!r}, expected a folder or an object store: serve it with commpress "
            "weights serve"
        )
    return ObjectPlace(text, make=make) if "://" in text else FolderPlace(where, make=make)
