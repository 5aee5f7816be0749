"""JSON documents that commpress writes and reads again: small, with a format and a version, refused
by name if others."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from commpress.errors import InvalidArgument


class Document(NamedTuple):
    """Kind of document. Nothing in a file is ever evaluated, and no more than ``limit`` bytes of it
    are read."""

    format: str
    version: int
    limit: int
    writer: str  # the command that makes one

    def write(self, path: str | Path, content: Mapping[str, Any]) -> None:
        head = {"format": self.format, "version": self.version}
        Path(path).write_text(json.dumps(head | dict(content), indent=1) + "\n")

    def read(self, path: str | Path) -> dict[str, Any]:
        """The content; anything but a document of this format and version is refused with a
        reason."""
        content = read_json(path, self.limit, f"what {self.writer} wrote")
        head = (
            (content.pop("format", None), content.pop("version", None))
            if isinstance(content, dict)
            else (None, None)
        )
        if head != (self.format, self.version):
            raise InvalidArgument(
                f"{path} is {head[0]!r}, version {head[1]!r}, expected {self.format!r}, version "
                f"{self.version}: make it again with {self.writer}"
            )
        return dict(content)


def read_json(path: str | Path, limit: int, expected: str) -> Any:
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise InvalidArgument(
            f"{str(path)!r} cannot be read ({error.strerror}), expected {expected}"
        ) from error
    if len(data) > limit:
        raise InvalidArgument(f"{path} has more than {limit} bytes, expected {expected}")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path} is no JSON ({error}), expected {expected}") from error
