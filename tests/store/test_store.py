"""The tiered store on a real directory: what goes in comes out."""

import threading

import pytest
import torch

from commpress.errors import DirectoryRefused, InvalidArgument
from commpress.tiered_mem import FileLayer, Options, engines
from commpress.tiered_mem.manifest import DTYPES
from small_store import open_store, read


@pytest.mark.parametrize("engine", ["threads", "io_uring", "libaio", "aiofiles"])
@pytest.mark.parametrize("direct", [False, None], ids=["buffered", "direct"])
def test_tensors_survive_eviction_and_reopening(tmp_path, engine, direct):
    if missing := engines.available(FileLayer())[engine]:
        pytest.skip(missing)
    draw = torch.Generator().manual_seed(0)
    sizes = [0, 1, 7, 1000, 2047, 2048, 16384, 16385, 50_000, 200_001]
    tensors = {f"t{n}": torch.randn(n, generator=draw) for n in sizes}
    with open_store(tmp_path, engine=engine, direct=direct) as store:
        for name, tensor in tensors.items():
            store.put(name, tensor)
        store.evict(tensors).wait()
        assert {store.info(name).tier for name in tensors} == {"disk"}
        for name, tensor in tensors.items():
            assert torch.equal(read(store, name), tensor), name
            with store.borrow(name) as borrowed:
                borrowed += 1
        store.commit()
        for name in tensors:
            with store.borrow(name) as borrowed:
                borrowed.zero_()  # never committed
    with open_store(tmp_path, engine=engine, direct=direct) as store:
        assert sorted(store) == sorted(tensors)
        assert store.verify() == []
        for name, tensor in tensors.items():
            assert torch.equal(read(store, name), tensor + 1), name


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_and_shape_keeps_its_bits(store, dtype):
    bits = torch.randint(0, 256, (24 * 16,), dtype=torch.uint8)
    tensor = (bits % 2).bool() if dtype == torch.bool else bits.view(dtype)
    for name, shaped in {
        "flat": tensor,
        "matrix": tensor.reshape(2, -1).t(),
        "scalar": tensor[3],
        "none": tensor[:0],
    }.items():
        store.put(name, shaped)
        store.evict(name).wait()
        found = read(store, name)
        assert (found.dtype, found.shape) == (shaped.dtype, shaped.shape)
        assert torch.equal(
            found.contiguous().view(-1).view(torch.uint8),
            shaped.contiguous().view(-1).view(torch.uint8),
        )


def test_put_replaces_whatever_the_size(store):
    for numel in (10, 100_000, 10, 10, 3000, 100_001):
        store.put("x", torch.full((numel,), float(numel)))
        store.evict("x").wait()
        assert read(store, "x").tolist() == [float(numel)] * numel
    assert len(store) == 1


def test_what_another_thread_uses_stays_when_its_pack_is_evicted(tmp_path):
    with open_store(tmp_path) as store:
        for name in ("x", "beside"):
            store.put(name, torch.arange(9.0))
        used, over = threading.Event(), threading.Event()

        def reads():
            with store.borrow("beside", write=False):
                used.set()
                over.wait(60)

        thread = threading.Thread(target=reads)
        thread.start()
        assert used.wait(60)
        store.evict("x").wait()
        assert store.info("x").tier == "host"
        over.set()
        thread.join()
        store.evict("x").wait()
        assert store.info("beside").tier == "disk", "they are in one pack"


def test_tensors_without_elements(tmp_path):
    """They move as others do, whether they are packed or not."""
    options = {"options": Options(chunk_bytes=64 << 10, pack_below=0, pack_bytes=32 << 10)}
    for name, more in (("packed", {}), ("alone", options)):
        with open_store(tmp_path / name, **more) as store:
            store.put("x", torch.ones(0, 3))
            store.evict("x").wait()
            assert store.info("x").tier == "disk"
            assert read(store, "x").shape == (0, 3)
            store.put("x", torch.ones(0, 3))
            store.flush().wait()
            assert store.commit() == 1
        with open_store(tmp_path / name, **more) as store:
            store.prefetch("x").wait()
            assert read(store, "x").shape == (0, 3)
            assert store.verify() == []


class Reads(FileLayer):
    """It counts them; writes wait where told to."""

    def __init__(self) -> None:
        self.count, self.writing, self.go_on = 0, threading.Event(), threading.Event()
        self.go_on.set()

    def read(self, fd, view, offset):
        self.count += 1
        return super().read(fd, view, offset)

    def write(self, fd, view, offset):
        self.writing.set()
        self.go_on.wait(60)
        return super().write(fd, view, offset)


@pytest.mark.parametrize("gone", [True, False], ids=["on disk", "on its way"])
def test_a_put_over_a_tensor_on_disk_reads_nothing(tmp_path, gone):
    layer = Reads()
    with open_store(tmp_path, layer=layer) as store:
        for i in range(4):
            store.put("x", torch.full((100_000,), float(i)))
            if not gone:
                layer.writing.clear()
                layer.go_on.clear()
            evicted, before = store.evict("x"), layer.count
            if gone:
                evicted.wait()
            else:
                layer.writing.wait(60)
                threading.Timer(0.05, layer.go_on.set).start()
            store.put("x", torch.full((100_000,), i + 0.5))
            evicted.wait()
            assert layer.count == before
            assert (read(store, "x") == i + 0.5).all()
        assert len(store) == 1
        assert store.commit() == 1
    with open_store(tmp_path) as store:
        assert (read(store, "x") == 3.5).all()
        assert store.usage().disk == 98 * 4096  # one such tensor


def test_a_put_over_a_tensor_on_disk_keeps_the_old_one_if_it_fails(tmp_path, monkeypatch):
    with open_store(tmp_path) as store:
        store.put("x", torch.ones(100_000))
        store.evict("x").wait()
        with monkeypatch.context() as patch:

            def fail(*_):
                raise RuntimeError("as told")

            patch.setattr(torch.Tensor, "copy_", fail)
            with pytest.raises(RuntimeError, match="as told"):
                store.put("x", torch.zeros(100_000))
        assert store.usage().host == 0
        assert read(store, "x").sum() == 100_000


def test_a_deleted_tensor_is_gone_and_its_room_is_used_again(store):
    for _ in range(20):
        store.put("x", torch.ones(200_000))
        store.commit()
        store.delete("x")
        assert "x" not in store
        store.commit()
    assert store.usage().disk == 0
    assert store.usage().disk_reserved <= 32 << 20


def test_several_directories_share_the_chunks(tmp_path):
    paths = [tmp_path / name for name in "abc"]
    tensor = torch.randn(300_000)
    with open_store(paths, host="2MiB") as store:
        store.put("x", tensor)
        store.commit()
    assert all(any(file.name.startswith("segment") for file in path.iterdir()) for path in paths)
    with open_store(list(reversed(paths)), host="2MiB") as store:
        assert torch.equal(read(store, "x"), tensor)
    with pytest.raises(DirectoryRefused, match="part 2 is missing"):
        open_store([paths[0], paths[2]])


def test_a_borrowed_tensor_is_empty_afterwards(store):
    store.put("x", torch.ones(10))
    with store.borrow("x") as tensor:
        pass
    assert tensor.numel() == 0


def test_changes_are_kept_when_the_context_is_left_by_an_error(store):
    store.put("x", torch.ones(10))

    def fail() -> None:
        with store.borrow("x") as tensor:
            tensor.zero_()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert read(store, "x").sum() == 0


def test_the_device_tier_with_the_processor_as_device(tmp_path):
    tensors = {f"t{i}": torch.randn(30_000 + i) for i in range(12)}
    with open_store(tmp_path, device="512KiB", accelerator="cpu") as store:
        for name, tensor in tensors.items():
            store.put(name, tensor)
        for _ in range(3):
            for name in tensors:
                with store.borrow(name, on="device") as borrowed:
                    assert torch.equal(borrowed, tensors[name])
                    borrowed += 1
                    tensors[name] = tensors[name] + 1
                    assert store.info(name).tier == "device"
            store.commit()
        usage = store.usage()
        assert 0 < usage.device <= usage.device_capacity == 512 << 10
    with open_store(tmp_path) as store:
        assert all(torch.equal(read(store, name), tensor) for name, tensor in tensors.items())


def test_who_borrows_on_a_device_waits_for_the_streams_of_all_before(tmp_path, monkeypatch):
    """And the host for all of them, before it moves the bytes."""
    log = []

    class Event:
        def __init__(self) -> None:
            self.of = threading.current_thread().name

        def query(self):
            return False

        def synchronize(self):
            log.append(("the host", self.of))

    class Stream:
        def record_event(self):
            return Event()

        def wait_event(self, event):
            log.append((threading.current_thread().name, event.of))

    monkeypatch.setattr("commpress.tiered_mem.blocks.stream_of", lambda device: Stream())

    def used_by(name, *, write):
        def use():
            with store.borrow("x", on="device", write=write):
                pass

        thread = threading.Thread(target=use, name=name)
        thread.start()
        thread.join()

    with open_store(tmp_path, device="512KiB", accelerator="cpu") as store:
        store.put("x", torch.arange(1000))
        for name in ("a", "b"):
            used_by(name, write=False)
        assert log == [("b", "a")]
        log.clear()
        used_by("c", write=True)
        assert log == [("c", "a"), ("c", "b")]
        log.clear()
        store.evict("x").wait()
        assert log == [("the host", name) for name in "abc"]


def test_a_snapshot_is_copied_out_while_the_store_is_used(tmp_path):
    draw, stop = torch.Generator().manual_seed(2), threading.Event()
    tensors = {f"t{n}": torch.randn(n, generator=draw) for n in (0, 3, 500, 5000, 70_000, 100_001)}
    with open_store(tmp_path / "live") as store:
        for name, tensor in tensors.items():
            store.put(name, tensor)
        store.snapshot("s")

        def train() -> None:
            while not stop.is_set():
                for name in tensors:
                    with store.borrow(name) as tensor:
                        tensor += 1
                store.commit()

        thread = threading.Thread(target=train)
        thread.start()
        try:
            for i in range(3):
                store.copy_snapshot("s", tmp_path / f"copy{i}")
            with pytest.raises(InvalidArgument, match="already has a store"):
                store.copy_snapshot("s", tmp_path / "copy0")
            with pytest.raises(InvalidArgument, match="no snapshot 'z'"):
                store.copy_snapshot("z", tmp_path / "z")
        finally:
            stop.set()
            thread.join(60)
        store.drop_snapshot("s")
        store.commit()
        assert store.usage().disk == sum(
            -(-p.nbytes // 4096) * 4096 for p in all_places(store, tensors)
        )
    for i in range(3):
        with open_store([tmp_path / f"copy{i}"]) as copy:
            assert copy.verify() == []
            assert all(torch.equal(read(copy, name), tensor) for name, tensor in tensors.items())


def all_places(store, names) -> set:
    return {place for name in names for place in store.places(name)}
