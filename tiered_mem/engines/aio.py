"""The kernel's older asynchronous interface through the ``libaio`` package. Fast only on files opened past the page cache;
on many file systems ``submit`` does the whole transfer, which is why one thread does nothing but submit."""

from commpress.errors import MissingPackage
from commpress.tiered_mem.engines.completion import QueueEngine
from commpress.tiered_mem.engines.engine import Transfer


class LibaioEngine(QueueEngine):
    name = "libaio"

    def __init__(self, depth: int = 4) -> None:
        try:
            import libaio
        except ImportError as error:
            raise MissingPackage("the engine 'libaio' needs the package: pip install 'commpress[nvme]'") from error
        except OSError as error:  # the shared library
            raise MissingPackage(
                f"the package libaio does not find its shared library ({error}): apt-get install libaio1 (libaio1t64 on "
                "newer systems), dnf install libaio; the engines 'threads' and 'io_uring' need nothing"
            ) from error
        super().__init__(depth)
        self._libaio, self._context = libaio, libaio.AIOContext(depth + 1)
        self._stopped = False
        self.start()

    def close(self) -> None:
        super().close()
        self._context.close()

    def _enqueue(self, transfer: Transfer) -> None:
        mode = self._libaio.AIOBLOCK_MODE_WRITE if transfer.write else self._libaio.AIOBLOCK_MODE_READ
        block = self._libaio.AIOBlock(mode, transfer.fd, [transfer.rest], transfer.offset + transfer.moved)
        block.transfer = transfer
        if self._context.submit([block]) != 1:
            raise OSError(11, "the kernel's queue of asynchronous transfers is full: raise fs.aio-max-nr")

    def _completed(self) -> list[tuple[Transfer, int]] | None:
        events = self._context.getEvents(min_nr=1, timeout=0.2)
        if not events and self._stopped:
            return None
        return [(block.transfer, result) for block, result, _ in events]

    def _stop(self) -> None:
        self._stopped = True
