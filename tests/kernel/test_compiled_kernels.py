"""Kernels as bitcode: finished where they run, kept where that is safe, and never those of other
sources."""

import logging
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import numpy as np
import pytest
import torch

import sources
from commpress.kernels.cpu import calls, compiled, digest, object_cache
from commpress.kernels.cpu import row_codec as cpu
from commpress.kernels.pieces import Piece, cut
from commpress.kernels.reference import FP32, INT8, SIGN_L1
from variants import seldom

HALVES = (
    "from commpress.kernels.cpu import adam as s; from commpress.kernels.adam import Segments; "
    "x, out = torch.arange(-5.0, 6), torch.zeros(11); "
)


def python(code: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "import torch; " + code]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=os.environ | environment, cwd="/", stdout=pipe, stderr=pipe, text=True
    )


def said(process: subprocess.Popen[str]) -> tuple[str, str]:
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors
    return out, errors


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("COMMPRESS_CACHE_DIR", str(folder))
    return folder


# ---------------------------------------------------------------- files


def test_what_is_kept_comes_back(cache):
    assert object_cache.load("a") is None
    assert object_cache.store("a", b"code")
    assert object_cache.load("a") == b"code"
    assert cache.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in cache.iterdir()] == ["a"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda b: b[:-1],
        lambda b: b"",
        lambda b: b + b"x",
        lambda b: b[:7] + b"?" + b[8:],
        lambda b: b[:-2] + b"?" + b[-1:],
    ],
)
def test_a_damaged_file_is_never_used(cache, caplog, damage):
    object_cache.store("a", b"some machine code")
    (cache / "a").write_bytes(damage((cache / "a").read_bytes()))
    with caplog.at_level(logging.WARNING, "commpress"):
        assert object_cache.load("a") is None
    assert "is damaged" in caplog.text
    assert object_cache.store("a", b"new")
    assert object_cache.load("a") == b"new"


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_folder_that_others_may_write_to_is_never_used(cache, caplog, mode):
    object_cache.store("a", b"code")
    cache.chmod(mode)
    with caplog.at_level(logging.WARNING, "commpress"):
        assert object_cache.load("a") is None
        assert not object_cache.store("b", b"code")
    assert "other users may write" in caplog.text
    assert not (cache / "b").exists()


def test_a_file_that_others_may_write_to_is_never_used(cache):
    object_cache.store("a", b"code")
    (cache / "a").chmod(0o666)
    assert object_cache.load("a") is None
    (cache / "a").rename(cache / "elsewhere")
    (cache / "elsewhere").chmod(0o600)
    (cache / "a").symlink_to(cache / "elsewhere")
    assert object_cache.load("a") is None


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_folder_or_file_of_somebody_else_is_never_used(cache):
    object_cache.store("a", b"code")
    os.chown(cache / "a", 12345, -1)
    assert object_cache.load("a") is None
    os.chown(cache / "a", 0, -1)
    assert object_cache.load("a") == b"code"
    os.chown(cache, 12345, -1)
    assert object_cache.load("a") is None
    assert not object_cache.store("b", b"code")


def test_the_user_s_cache_comes_first_and_then_a_temporary_one(monkeypatch, tmp_path):
    monkeypatch.delenv("COMMPRESS_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()  # so that nothing can be made below it
    monkeypatch.setattr(object_cache.tempfile, "gettempdir", lambda: str(tmp_path / "temporary"))
    assert object_cache.store("a", b"code")
    assert (tmp_path / "temporary" / f"commpress-{os.getuid()}" / "a").exists()
    assert object_cache.load("a") == b"code"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert object_cache.store("a", b"newer")
    assert (tmp_path / "xdg" / "commpress" / "a").exists()
    assert object_cache.load("a") == b"newer"


def test_nowhere_to_write_is_said_once(monkeypatch, caplog):
    object_cache._warn_without_cache.cache_clear()
    monkeypatch.setenv("COMMPRESS_CACHE_DIR", "/proc/nowhere")
    with caplog.at_level(logging.WARNING, "commpress"):
        assert not object_cache.store("a", b"code")
        assert not object_cache.store("b", b"code")
    assert caplog.text.count("COMMPRESS_CACHE_DIR") == 1


# ---------------------------------------------------------------- machine code


def test_machine_code_is_kept_and_made_again_where_it_was_damaged(cache):
    code = compiled.machine_code("adam_loops", "adam_loops.square_sums.0")
    (kept,) = (path for path in cache.iterdir() if path.suffix == ".o")
    whole = kept.read_bytes()
    assert whole.endswith(code)
    kept.write_bytes(whole[:-100] + bytes(100))
    assert compiled.machine_code("adam_loops", "adam_loops.square_sums.0") == code
    assert kept.read_bytes() == whole


def test_its_name_says_sources_tools_and_processor(cache, monkeypatch):
    compiled.machine_code("adam_loops", "adam_loops.square_sums.0")
    (kept,) = (path.name for path in cache.iterdir() if path.suffix == ".o")
    assert digest.digest() in kept
    assert digest.LLVM in kept
    other = compiled._host()._replace(name="another processor")
    monkeypatch.setattr(compiled, "_host", lambda: other)
    compiled.machine_code("adam_loops", "adam_loops.square_sums.0")
    assert len([path for path in cache.iterdir() if path.suffix == ".o"]) == 2


@pytest.mark.slow
def test_processes_that_race_for_the_cache_get_the_same_code(cache):
    code = HALVES + "s.scaled(Segments([x], [x], [(0, 11)]), out, gain=0.5); print(out.tolist())"
    (first, *rest) = [said(process) for process in [python(code) for _ in range(3)]]
    assert "2.5" in first[0]
    assert all(answer == first for answer in rest)
    assert all(path.suffix in (".o", ".bc", ".lock") for path in cache.iterdir())  # no drafts
    assert all(object_cache.load(path.name) for path in cache.iterdir() if path.suffix != ".lock")


def test_a_sign_exchange_compiles_what_signs_and_casts_need_and_no_more(cache):
    """The first calls of a process decide how long its first step takes."""
    code = (
        "from commpress.kernels.cpu import compiled, row_codec as cpu; from "
        "commpress.kernels.pieces import *\n"
        "made, real = [], compiled.machine_code\n"
        "compiled.machine_code = lambda family, symbol: made.append(symbol) or real(family, "
        "symbol)\n"
        f"pieces = cut([Piece(0, 5000, {SIGN_L1}, 2048), Piece(5000, 10, {FP32}, 0)], 2)\n"
        "message, flag = torch.zeros(2, pieces.row_bytes, dtype=torch.uint8), torch.zeros(1, "
        "dtype=torch.uint8)\n"
        "x, left = torch.randn(5010), torch.zeros(pieces.shard)\n"
        "cpu.encode(x, message, flag, pieces)\n"
        "cpu.serve(message, message[:1].clone(), flag, pieces, 0, residual=left, "
        "new_residual=left)\n"
        "cpu.decode(message, x, pieces)\n"
        "import sys; print(made, 'numba' in sys.modules)"
    )
    out, _ = said(python(code))
    variants = compiled._family("row_loops").variants
    plain = {
        name: next(
            i for i, kinds in enumerate(variants[name]) if "None" in {k.dtype for k in kinds}
        )
        for name in variants
        if name in ("encode", "decode")
    }
    assert out.strip() == f"{[f'row_loops.{name}.{i}' for name, i in plain.items()]} False"


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(20)[::2], "strides"),
        (torch.zeros(10, device="meta"), "on meta"),
        (np.zeros(20, np.float32)[::2], "strides"),
        (torch.zeros(10, dtype=torch.float64), "float64"),
        (np.zeros((2, 5), np.float32), "not declared"),
        (3.0, "not declared"),
        (None, "not declared"),
    ],
)
def test_a_kernel_refuses_what_it_was_not_compiled_for(x, message):
    out, table = np.zeros(1, np.float32), np.zeros((1, 1), np.int64)
    with pytest.raises(TypeError, match=message):
        calls.Kernels("low_rank_loops").fold(x, out, out, 0, table, table, 0, 0)


def test_a_kernel_takes_as_many_arguments_as_it_declares():
    with pytest.raises(TypeError, match="fold"):
        calls.Kernels("low_rank_loops").fold(torch.zeros(10))


def test_the_smaller_kernel_for_signs_and_casts_gives_the_same_bytes(monkeypatch):
    pieces = cut(
        [Piece(0, 5000, SIGN_L1, 2048), Piece(5000, 100, FP32, 0), Piece(5100, 3000, SIGN_L1, 64)],
        2,
    )
    assert pieces.plain
    assert not cut([Piece(0, 100, INT8, 64)], 2).plain
    x, results = torch.randn(8100), []
    for mixed in (None, True):
        monkeypatch.setattr(cpu, "_mixed", lambda pieces, mixed=mixed: mixed)
        message, flag, out = (
            torch.zeros(2, pieces.row_bytes, dtype=torch.uint8),
            torch.zeros(1, dtype=torch.uint8),
            x.clone(),
        )
        left = torch.zeros(pieces.residual_numel)
        cpu.encode(
            x, message, flag, pieces, residual=torch.ones(pieces.residual_numel), new_residual=left
        )
        cpu.decode(message, out, pieces)
        results.append((message, left, out))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


# ---------------------------------------------------------------- sources


@pytest.fixture
def checkout(tmp_path):
    """A copy of what kernels need, in which a test may write."""
    package = tmp_path / "site" / "commpress"
    shutil.copytree(
        sources.ROOT / "kernels",
        package / "kernels",
        ignore=shutil.ignore_patterns("__pycache__", "bitcode"),
    )
    shutil.copy(sources.ROOT / "commpress" / "errors.py", package)
    (package / "__init__.py").touch()
    return package


SUM = """
from commpress.kernels import adam
from commpress.kernels.cpu import adam as cpu_adam
print(cpu_adam.square_sum(adam.Segments([torch.ones(3)], [torch.full((3,), 5.0)], [(0, 3)])))
"""


@pytest.mark.slow
def test_a_changed_helper_in_another_file_changes_what_runs(checkout, cache):
    """Numba's own cache looked at the file of the outer function only, and ran the old code."""
    (checkout / "kernels" / "cpu" / "bitcode").mkdir()
    (checkout / "kernels" / "cpu" / "bitcode" / "adam_loops.bc").write_bytes(
        compiled.bitcode("adam_loops")
    )
    run = lambda: said(python(SUM, PYTHONPATH=str(checkout.parent)))  # noqa: E731
    assert run() == ("75.0\n", "")
    vector = checkout / "kernels" / "cpu" / "sources" / "vector.py"
    before = vector.read_text()
    vector.write_text(before.replace("builder.fmul(half, half", "builder.fadd(half, half"))
    assert vector.read_text() != before
    out, errors = run()
    assert out == "30.0\n"
    assert errors.count("\n") == 1
    assert "Numba compiles adam_loops now" in errors
    assert run() == (out, "")  # kept


def test_without_numba_other_sources_are_refused(checkout, cache):
    code = "import sys; sys.modules['numba'] = None\n" + SUM
    process = python(code, PYTHONPATH=str(checkout.parent))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "MissingPackage" in errors
    assert "Install commpress again" in errors


def test_the_digest_is_of_every_source(checkout):
    ask = [sys.executable, "-c", "from commpress.kernels.cpu.digest import digest; print(digest())"]

    def answer() -> str:
        environment = os.environ | {"PYTHONPATH": str(checkout.parent)}
        return subprocess.run(
            ask, env=environment, cwd="/", capture_output=True, text=True, check=True
        ).stdout.strip()

    assert answer() == digest.digest()  # wherever they lie
    with (checkout / "kernels" / "cpu" / "sources" / "vector.py").open("a") as file:
        file.write("\n# changed\n")
    assert answer() != digest.digest()


def test_bitcode_needs_no_torch_and_every_file_that_kernels_import_is_in_the_digest():
    """pip builds a wheel with what pyproject.toml requires of a build alone: torch is not there."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from commpress.kernels.cpu import build, digest; from importlib import import_module\n"
        "[import_module(f'commpress.kernels.cpu.sources.{family}') for family in digest.FAMILIES]\n"
        "print(*(m.__file__ for n, m in sys.modules.items() if "
        "n.startswith('commpress.kernels.')))\n"
    )
    out, _ = said(python(code))
    kernels = Path(digest.__file__).parent.resolve()
    known = {
        *(kernels / "sources").glob("*.py"),
        *((kernels / name).resolve() for name in digest._BESIDE),
    }
    harmless = {kernels / "__init__.py", kernels / "digest.py", kernels / "object_cache.py"}
    assert {Path(file).resolve() for file in out.split()} - known - harmless == set()


def test_every_kernel_belongs_to_a_family_that_is_built():
    files = (Path(digest.__file__).parent / "sources").glob("*.py")
    assert {path.stem for path in files if "\n@kernel(" in path.read_text()} == set(digest.FAMILIES)


# ---------------------------------------------------------------- nothing to write to

READ_ONLY = """
import logging, os
import torch
logging.basicConfig(format="%(levelname)s %(message)s")
assert not any(os.access(folder, os.W_OK) for folder in ("/tmp", "/var/tmp", "/dev/shm", "/"))
from commpress import compress, SignCodec
import torch.distributed as dist
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 300))
compress(model, SignCodec())
model(torch.randn(4, 300)).sum().backward()
from commpress.cli.kernel_check import check_bytes  # one rank alone encodes nothing
check_bytes(SignCodec())
print("bytes equal the reference")
"""


def test_read_only_containers_compile_in_memory_and_say_so_once(tmp_path):
    """Every mount of this process's own is read-only, as in a container with a read-only root and
    no volume."""
    mounts = ("/", "/tmp", "/var/tmp", "/dev/shm", os.path.expanduser("~"))
    steps = ["mount --make-rprivate /"]
    steps += [
        f"mount --bind {m} {m} && mount -o remount,bind,ro {m}" for m in mounts if os.path.isdir(m)
    ]
    alone = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*alone, " && ".join(steps)], capture_output=True).returncode:
        pytest.skip("this user may not mount")
    (tmp_path / "script.py").write_text(READ_ONLY)
    # As soon as DDP is made, torch.compile wants a folder that is there.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("COMMPRESS_CACHE_DIR", "XDG_CACHE_HOME")
    }
    command = [
        *alone,
        " && ".join([*steps, 'exec "$0" "$1"']),
        sys.executable,
        str(tmp_path / "script.py"),
    ]
    environment |= {"HOME": "/nowhere", "TORCHINDUCTOR_CACHE_DIR": "/"}
    ran = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "bytes equal the reference\n"
    assert ran.stderr.count("no folder for a cache") == 1


def undefined(code: bytes) -> set[str]:
    """Names that an ELF object of 64 bits looks for elsewhere."""
    (table,), (size, count) = (
        struct.unpack_from("<Q", code, 40),
        struct.unpack_from("<HH", code, 58),
    )
    heads = [struct.unpack_from("<IIQQQQIIQQ", code, table + i * size) for i in range(count)]
    symbols = next(head for head in heads if head[1] == 2)
    strings, found = heads[symbols[6]][4], set()
    for at in range(symbols[4], symbols[4] + symbols[5], 24):
        name, _, _, section = struct.unpack_from("<IBBH", code, at)
        if name and not section:
            found.add(code[strings + name : code.index(b"\0", strings + name)].decode())
    return found


@pytest.mark.parametrize(
    "family",
    [name if name == "openmp_loops" else seldom(name) for name in digest.FAMILIES],
)
def test_the_bitcode_of_a_wheel_becomes_machine_code_of_aarch64(family, monkeypatch):
    """llvmlite has that target everywhere. What the code calls is in every C library, so nothing
    is missing where it is loaded."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    machine = target.create_target_machine(opt=3, codemodel="jitdefault", jit=True)
    host = compiled._host()._replace(machine=machine)
    monkeypatch.setattr(compiled, "_host", lambda: host)
    made = compiled._family(family)
    for kernel, variants in made.variants.items():
        for i in range(len(variants)):
            code = compiled._optimised(made.module, f"{family}.{kernel}.{i}")
            assert struct.unpack_from("<H", code, 18) == (183,), "aarch64"
            assert undefined(code) <= {"malloc", "free", "memset", "memcpy", "memmove"}


def test_the_command_that_makes_bitcode_shows_help_and_makes_nothing(tmp_path):
    command = [sys.executable, "-m", "commpress.kernels.cpu.build", "--help"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0
    assert "commpress.kernels.cpu.build FOLDER" in ran.stdout
    assert [*tmp_path.iterdir()] == []
