"""The CUDA source without a GPU: it compiles for real ones, and on the CPU it gives the bytes of
the law.

``cuda_shim`` runs the very launches that CuPy would, thread by thread; both orders of threads are
tried in turn.
"""

import ctypes
import inspect
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from time import sleep
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_shim
import cuda_twin as twin
from commpress.codecs import SparseCodec, codec_named
from commpress.codecs.family import NAMES
from commpress.codecs.registry import EXAMPLES
from commpress.codecs.whole_tensors import WholeTensorCodec
from commpress.errors import InvalidArgument, MissingPackage
from commpress.kernels import reference
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.cuda import machine_code, modules, nvrtc
from commpress.kernels.cuda import row_codec as cuda
from commpress.kernels.pieces import Piece, cut, width_of
from variants import seldom

# ---------------------------------------------------------------- compiled for GPUs


# codes, and headers: nothing in the source asks for the architecture
ONE_OF_EACH = [reference.SIGN_RMS, reference.BITS]


@pytest.mark.parametrize(
    ("architecture", "families"),
    [(80, ONE_OF_EACH), (100, ONE_OF_EACH), *(seldom(n, twin.FAMILIES) for n in (80, 90, 100))],
)
def test_source_compiles_for_every_family(architecture, families):
    """With the options that CuPy adds to ours, of which the first would flush denormals if the
    source let it."""
    if nvrtc.loaded() is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    if architecture not in nvrtc.architectures():
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    added = ("-ftz=true", f"-arch=sm_{architecture}", "--device-as-default-execution-space")

    def compiled(family):
        return nvrtc.compile_source(modules.source(family), modules.options(family) + added)

    with ThreadPoolExecutor(2) as pool:
        for family, (ptx, binary) in zip(families, pool.map(compiled, families), strict=True):
            assert binary.startswith(b"\x7fELF")
            assert set(re.findall(r"\.entry (\w+)", ptx)) == set(cuda_shim.kernel_names(family))
            inexact = re.findall(r"\b\S*(?:\.ftz|\.approx|fma\.|mad\.rn)\S*", ptx)
            assert not inexact, (
                f"family {family}: {set(inexact)} round twice, approximately or drop denormals"
            )


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A folder for machine code that a package ships."""
    monkeypatch.setattr(modules, "FOLDER", tmp_path / "cubins")
    monkeypatch.setenv("COMMPRESS_CACHE_DIR", str(tmp_path / "cache"))
    return modules.FOLDER


def test_shipped_code_is_that_of_the_source_and_of_the_major_version(shipped, monkeypatch):
    if nvrtc.loaded() is None:
        pytest.skip("no NVRTC: pip install nvidia-cuda-nvrtc")
    monkeypatch.setattr(modules, "FAMILIES", (reference.FP16,))
    (path,) = machine_code.build(shipped, (80,))
    assert path.read_bytes().startswith(b"\x7fELF")
    assert [modules.shipped(reference.FP16, card) for card in (75, 80, 86, 89, 90)] == [
        None,
        path,
        path,
        path,
        None,
    ]
    assert modules.shipped(reference.BF16, 80) is None
    monkeypatch.setattr(modules, "digest", lambda family: "of another source")
    assert modules.shipped(reference.FP16, 80) is None


class DriverError(Exception):
    pass


def cupy_that(refuses=False):
    """CuPy as ``modules`` sees it on an A10; what it is asked to make is in ``made``."""
    made, inside = [], []

    class RawModule:
        def __init__(self, path=None, code=None, options=None):
            self.path = path

        def compile(self):
            inside.append(self)
            made.append("load" if self.path else f"compile, {len(inside)} at once")
            sleep(0.05)
            inside.remove(self)
            if self.path and refuses:
                raise DriverError("CUDA_ERROR_NO_BINARY_FOR_GPU")

    driver = SimpleNamespace(CUDADriverError=DriverError)
    device = SimpleNamespace(compute_capability="86")
    return SimpleNamespace(
        RawModule=RawModule, cuda=SimpleNamespace(Device=lambda: device, driver=driver), made=made
    )


@pytest.mark.parametrize("refuses", [False, True])
def test_shipped_code_is_loaded_and_compiled_where_the_driver_refuses_it(shipped, refuses, caplog):
    cupy, path = cupy_that(refuses), modules.cubin(reference.FP16, 80)
    path.parent.mkdir(parents=True)
    path.touch()
    modules.load(cupy, reference.FP16)
    assert cupy.made == (["load", "compile, 1 at once"] if refuses else ["load"])
    assert ("the driver does not take" in caplog.text) == refuses


def test_one_process_compiles_while_others_wait(shipped):
    """A lock of files keeps out threads as it does processes: each opens the file itself."""
    cupy = cupy_that()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: modules.load(cupy, reference.FP16), range(4)))
    assert cupy.made == ["compile, 1 at once"] * 4


# ---------------------------------------------------------------- run on the CPU


@pytest.fixture(scope="session")
def libraries(tmp_path_factory):
    if cuda_shim.compiler() is None:
        pytest.skip("no g++ to run the CUDA source on the CPU")
    return cuda_shim.Shim(tmp_path_factory.mktemp("cuda"), twin.FAMILIES)


@pytest.fixture
def shim(libraries, monkeypatch):
    """cuda.* on CPU tensors, until the test ends."""
    libraries.reverse = False
    monkeypatch.setattr(cuda, "execute", libraries.execute)
    return libraries


@pytest.mark.parametrize(("kind", "block"), twin.PAIRS)
def test_encode_and_decode_give_the_bytes_of_the_law(shim, kind, block):
    # the others with other kinds and blocks
    for i, numel in list(enumerate(twin.LENGTHS))[(kind + block // 8) % 2 :: 2]:
        rows = (1, 3, 2, 5, 4)[(i + kind) % 5]
        shim.reverse = not shim.reverse
        twin.check_round(
            "cpu",
            numel,
            rows,
            kind,
            block,
            seed=31 * i + rows,
            offset=i % 5,
            gain=(1.0, 1 / 3)[i % 2],
        )


@pytest.mark.parametrize(
    ("kind", "block"), [pair for pair in twin.PAIRS if pair[1] in (0, 8, 64, 256, 1024, 2048)]
)
def test_mean_and_serve_give_the_bytes_of_the_law(shim, kind, block):
    for numel, senders in [(0, 1), (1, 2), (2049, 1), (5000, 2), (70, 5)]:
        shim.reverse = not shim.reverse
        twin.check_serve("cpu", numel, senders, kind, block, seed=senders)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    numel=st.integers(0, 7000),
    rows=st.integers(1, 5),
    pair=st.sampled_from(twin.PAIRS),
    seed=st.integers(0, 2**40),
    offset=st.integers(0, 40),
    gain=st.sampled_from([1.0, -1.0, 0.5, 1 / 3, 2.0**-16, 0.0]),
    spread=st.sampled_from([0.0, 1.0, 8.0, 30.0]),
    reverse=st.booleans(),
)
def test_any_geometry(libraries, numel, rows, pair, seed, offset, gain, spread, reverse):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "execute", libraries.execute)
        libraries.reverse = reverse
        twin.check_round("cpu", numel, rows, *pair, seed, offset=offset, gain=gain, spread=spread)


@pytest.mark.parametrize("kind", [reference.SIGN_L1, reference.SIGN_RMS])
def test_lazy_residual(shim, kind):
    for reverse in (False, True):
        shim.reverse = reverse
        twin.check_lazy("cpu", kind, 10_001, 4)
        twin.check_lazy("cpu", kind, 20, 5)
        twin.check_lazy_serve("cpu", kind, 9000, 2)


@pytest.mark.parametrize("repeat", [1, 4])
def test_pieces_side_by_side_are_the_pieces_one_by_one(shim, repeat):
    twin.check_pieces("cpu", repeat)


OF_ROWS = [
    n for n in (*NAMES, *EXAMPLES) if not isinstance(codec_named(n), WholeTensorCodec | SparseCodec)
]


@pytest.mark.parametrize("name", OF_ROWS)
def test_every_named_codec_of_rows(shim, name):
    codec = codec_named(name)
    twin.check_round("cpu", 7001, 2, codec.kind, codec.block, seed=8)


@pytest.mark.parametrize(("kind", "block"), [pair for pair in twin.PAIRS if pair[0] > 255])
def test_of_equals_the_first(shim, kind, block):
    """Few different magnitudes: top-k and the extremes choose among many equals; zeros of both
    signs are equal."""
    for seed in range(3):
        shim.reverse = not shim.reverse
        x = np.rint(twin.sample(2500, seed, 0.0) * (seed + 1) / 2)
        x = [x, np.where(x > 0, x, x * 0), np.where(x < 0, x, x * 0)][seed % 3]
        twin.check_round("cpu", 2500, 1, kind, block, seed, x=x)


@pytest.mark.parametrize(("kind", "block"), dict(reversed(twin.PAIRS)).items())
def test_adding_leaves_what_was_not_sent(shim, kind, block):
    """To the bit: -0 stays -0 there, as on the CPU."""
    pieces, flag = cut([Piece(0, 3000, kind, block)], 1), torch.zeros(1, dtype=torch.uint8)
    message, ours, theirs = (
        twin.MessageRows(1, pieces, 3, "cpu"),
        torch.full((3000,), -0.0),
        torch.full((3000,), -0.0),
    )
    cuda.encode(torch.from_numpy(twin.sample(3000, 5)), message.rows, flag, pieces)
    cuda.decode(message.rows, ours, pieces, gain=-0.5, add=True)
    cpu.decode(message.rows, theirs, pieces, gain=-0.5, add=True)
    twin.same(ours, theirs.numpy())


EXTREMES = {
    "zeros": np.zeros(40),
    "minus-zero": np.full(40, -0.0),
    "denormal": np.full(40, 1e-42),
    "smallest": np.eye(1, 40)[0] * 1e-45,
    "tiny": np.full(40, 2.0**-101),
    "one-hot": np.eye(1, 40)[0] * 3,
    "huge": np.full(40, 3e38) * np.tile([1, -1], 20),
    "half-way": np.arange(40) / 2 + 0.25,
    "range": 2.0 ** np.arange(-149, 128, 7)[:40],
    "nan": np.where(np.arange(40) == 13, np.nan, 1),
    "infinity": np.where(np.arange(40) == 39, np.inf, -1),
    "both": np.where(np.arange(40) < 2, [np.inf, -np.inf] * 20, 0),
}


@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_values(shim, name):
    x = EXTREMES[name].astype(np.float32)
    for kind, block in twin.PAIRS:
        if kind > 255 or block in (0, 8, 64, 2048):
            check_extreme(x, kind, block)


def check_extreme(x, kind, block):
    """As check_round, but overflow of the sums is allowed to raise the flag."""
    pieces, flag = cut([Piece(0, len(x), kind, block)], 1), torch.zeros(1, dtype=torch.uint8)
    want, want_left = twin.expected(x, 1, kind, block, 3)
    message, left = twin.MessageRows(1, pieces, 1, "cpu"), torch.empty(len(x))
    cuda.encode(torch.from_numpy(x), message.rows, flag, pieces, key=3, new_residual=left)
    message.check(0, want[0], twin.scales_of(kind, width_of(len(x), 1), block))
    twin.same(left, want_left)
    assert flag.item() == int(not twin.finite(x, want, kind, width_of(len(x), 1), block))


@pytest.mark.parametrize(("kind", "block"), dict(reversed(twin.PAIRS)).items())
def test_one_bad_number_raises_the_flag(shim, kind, block):
    pieces = cut([Piece(0, 5000, kind, block)], 4)
    for bad in (np.nan, np.inf, -np.inf):
        for position in (0, 100, 4999):
            x = twin.sample(5000, 1)
            x[position] = bad
            message, flag = twin.MessageRows(4, pieces, 0, "cpu"), torch.zeros(1, dtype=torch.uint8)
            cuda.encode(torch.from_numpy(x), message.rows, flag, pieces)
            assert flag.item() == 1


@pytest.mark.parametrize("kind", [k for k in twin.KINDS if reference.CODE_BITS[k] in (8, 16)])
def test_every_code_decodes_as_the_law_says(shim, kind):
    """Also those that no encoder writes: -128, NaN and infinity."""
    count = 1 << reference.CODE_BITS[kind]
    block = 0 if kind in reference.CASTS else 2048
    pieces = cut([Piece(0, count, kind, block)], 1)
    row = np.zeros(pieces.row_bytes, np.uint8)
    header = 4 * reference.scale_count(kind, count, block)
    row[:header].view(np.float32)[:] = 1.5
    codes = np.arange(count, dtype=np.uint8 if count == 256 else np.uint16).view(np.uint8)
    row[header : header + len(codes)] = codes
    out = torch.empty(count)
    cuda.decode(torch.from_numpy(row[None]), out, pieces)
    with np.errstate(invalid="ignore"):  # NaN among the codes
        twin.same(out, reference.decode_row(row, kind, count, count, block))


@pytest.mark.parametrize("tiles", [1, 1000, 1025, 20_000, 70_001])
@pytest.mark.parametrize("kind", [reference.SIGN_L1, reference.SIGN_RMS])
def test_the_tree_over_a_long_row(shim, monkeypatch, kind, tiles):
    """finish_rows alone, over totals made up for rows too long to encode here; the tensors are
    never touched."""
    totals = np.random.default_rng(tiles).random(tiles).astype(np.float32)
    pieces = cut([Piece(0, tiles * cuda.TILE, kind, 0)], 1)
    x, message = torch.empty(tiles * cuda.TILE), torch.empty(1, pieces.row_bytes, dtype=torch.uint8)
    scale, flag = torch.empty(1), torch.zeros(1, dtype=torch.uint8)

    def execute(launch):
        if launch.kernel == "encode_measure":
            ctypes.memmove(int(launch.args[-1]), totals.ctypes.data, totals.nbytes)
        else:
            shim.execute(launch)

    monkeypatch.setattr(cuda, "execute", execute)
    cuda.encode(x, message, flag, pieces, new_scale=scale)
    mean = reference.tree_sum(totals.astype(np.float64)) / np.float64(tiles * cuda.TILE)
    twin.same(scale, np.array([mean if kind == reference.SIGN_L1 else np.sqrt(mean)], np.float32))


# ---------------------------------------------------------------- before any launch


@pytest.mark.parametrize("name", ["encode", "serve", "decode", "decode_mean", "settle"])
def test_arguments_are_those_of_the_cpu_path(name):
    ours, theirs = (
        inspect.signature(getattr(path, name)).parameters.values() for path in (cuda, cpu)
    )
    assert [(p.name, p.kind, p.default) for p in ours] == [
        (p.name, p.kind, p.default) for p in theirs
    ]


def test_importing_imports_no_cupy():
    code = "import sys, commpress.kernels.cuda.row_codec; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_cupy_names_the_cure(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(MissingPackage, match=r"commpress\[cuda12\].*commpress\[cuda13\]"):
        cuda._cupy()


OLD = SimpleNamespace(cuda_stream=77)  # a stream of torch before 2.10
NEW = SimpleNamespace(cuda_stream=77, __cuda_stream__=lambda: (0, 77))


@pytest.mark.parametrize(("version", "stream"), [(14, NEW), (14, OLD), (13, NEW), (13, OLD)])
def test_launches_go_to_cupy_on_the_current_stream(monkeypatch, version, stream):
    """CuPy is asked in the words of version 14 and in those before, with the streams of every
    torch."""
    device, asked = torch.device("cuda", 3), []

    @contextmanager
    def context(*words):
        asked.append(words)
        yield

    def get_function(name):
        return lambda grid, threads, args: asked.append((name, grid, threads, args))

    cupy = SimpleNamespace(
        RawModule=lambda code, options: SimpleNamespace(
            get_function=get_function, compile=lambda: None
        ),
        cuda=SimpleNamespace(
            Device=lambda *index: (
                context("device", *index) if index else SimpleNamespace(compute_capability="75")
            ),
            Stream=SimpleNamespace(),
            ExternalStream=lambda pointer, index: context("external", pointer, index),
        ),
    )
    if version == 14:  # which reads the stream's own answer
        cupy.cuda.Stream.from_external = lambda stream: context(
            "from_external", *stream.__cuda_stream__()
        )
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    monkeypatch.setattr(cuda, "_kernel", cuda._kernel.__wrapped__)
    monkeypatch.setattr(cuda, "_module", cuda._module.__wrapped__)
    cuda.execute(cuda.Launch("settle", 0, 5, 256, (np.int32(1),), device))
    on = ("from_external", 0, 77) if version == 14 else ("external", 77, 3)
    assert asked == [("device", 3), on, ("settle", (5,), (256,), (1,))]


def test_wrong_tensors_are_refused():
    pieces, flag = cut([Piece(0, 64, reference.INT8, 64)], 2), torch.zeros(1, dtype=torch.uint8)
    x, message = torch.zeros(64), torch.zeros(2, pieces.row_bytes, dtype=torch.uint8)
    with pytest.raises(InvalidArgument, match=r"commpress\.kernels\.cpu"):
        cuda.encode(x, message, flag, pieces)
    with pytest.raises(InvalidArgument, match=r"x is torch\.float64"):
        cuda.encode(x.double(), message, flag, pieces)
    with pytest.raises(InvalidArgument, match=r"residual .* expected 64"):
        cuda.encode(x, message, flag, pieces, residual=x[:8])
    with pytest.raises(InvalidArgument, match=r"flag is torch\.float32"):
        cuda.encode(x, message, flag.float(), pieces)
    with pytest.raises(InvalidArgument, match="consecutive"):
        cuda.decode(message, torch.zeros(64, 2)[:, 0], pieces)
    with pytest.raises(InvalidArgument, match=r"pieces\.row_bytes"):
        cuda.decode(message[:, :-8], x, pieces)
