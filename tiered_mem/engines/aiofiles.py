"""aiofiles: positional reads and writes as coroutines on its thread pool, for systems on which no
other engine works."""

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

from commpress.errors import MissingPackage
from commpress.tiered_mem.engines.transfer import Transfer
from commpress.tiered_mem.layer import FileLayer
from commpress.work import started


class AiofilesEngine:
    name = "aiofiles"

    def __init__(self, layer: FileLayer, depth: int = 4) -> None:
        try:
            from aiofiles.os import wrap
        except ImportError as error:
            raise MissingPackage(
                "the engine 'aiofiles' needs the package: pip install 'commpress[nvme]'"
            ) from error
        self.depth = depth
        self._read, self._write = wrap(layer.read), wrap(layer.write)
        self._run = wrap(lambda call, *args: call(*args))
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="io")
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = started("io-loop", self._loop.run_forever)

    def register(self, memory: memoryview) -> None:
        pass

    def submit(self, transfers: Iterable[Transfer]) -> None:
        for transfer in transfers:
            self._loop.call_soon_threadsafe(self._begin, transfer)

    def close(self) -> None:
        async def finish() -> None:
            while self._tasks:
                await asyncio.wait(list(self._tasks))

        asyncio.run_coroutine_threadsafe(finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._pool.shutdown()

    def _begin(self, transfer: Transfer) -> None:
        task = self._loop.create_task(self._move(transfer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _move(self, transfer: Transfer) -> None:
        failure: Exception | None = None
        where = {"loop": self._loop, "executor": self._pool}
        try:
            if transfer.write:
                await self._run(transfer.hash, **where)
            call = self._write if transfer.write else self._read
            while not transfer.advance(
                await call(transfer.fd, transfer.rest, transfer.offset + transfer.moved, **where)
            ):
                pass
        except Exception as error:
            failure = error
        await self._run(transfer.end, failure, **where)
