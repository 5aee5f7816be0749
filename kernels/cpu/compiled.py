"""Kernels as machine code: bitcode that Numba made when the package was built, compiled by LLVM for
this processor.

A kernel is compiled on its first call, and its machine code is cached on disk (``object_cache``).
Without bitcode of the present sources (as in a checkout under development) Numba makes it now.
"""

import ctypes
import json
import logging
import time
import zlib
from functools import cache
from hashlib import blake2b
from threading import RLock
from typing import Any, NamedTuple

import llvmlite
import llvmlite.binding as llvm

from commpress.errors import MissingPackage
from commpress.kernels.cpu import object_cache
from commpress.kernels.cpu.digest import FOLDER, LLVM, cached_name, digest
from commpress.kernels.cpu.kinds import Kind

log = logging.getLogger("commpress")
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_compiling = RLock()


# ---------------------------------------------------------------- bitcode


class _Family(NamedTuple):
    variants: dict[str, list[tuple[Kind, ...]]]
    module: bytes


@cache
def _family(name: str) -> _Family:
    header, _, body = bitcode(name).partition(b"\n")
    variants = {
        kernel: [
            tuple(Kind(dtype, int(dims)) for dtype, dims in (kind.split("/") for kind in kinds))
            for kinds in each
        ]
        for kernel, each in json.loads(header)["kernels"].items()
    }
    return _Family(variants, zlib.decompress(body))


def variants(family: str) -> dict[str, list[tuple[Kind, ...]]]:
    """Return the declared arguments of each kernel of a family."""
    return _family(family).variants


def bitcode(family: str) -> bytes:
    """Return the file that ``build`` makes of these sources."""
    return _packed(family) or _of_these_sources(family)


def _packed(name: str) -> bytes | None:
    """Return the file from the package, if it was made from these sources and LLVM can read it."""
    try:
        file = (FOLDER / f"{name}.bc").read_bytes()
    except OSError:
        return None
    header = json.loads(file.partition(b"\n")[0])
    return (
        file
        if header["digest"] == digest() and header["llvm"] <= list(llvm.llvm_version_info)
        else None
    )


def _of_these_sources(name: str) -> bytes:
    file_name = cached_name(name)
    if (file := object_cache.load(file_name)) is not None:
        return file
    with object_cache.lock(file_name):  # one process compiles, the others wait for its file
        if (file := object_cache.load(file_name)) is None:
            log.warning(
                "commpress: %s was not made from these sources of kernels: Numba compiles %s now, "
                "which takes up to half a minute; python -m commpress.kernels.cpu.build does it "
                "once",
                FOLDER,
                name,
            )
            try:
                from commpress.kernels.cpu import build
            except ImportError as error:
                raise MissingPackage(
                    f"the bitcode of the kernels in {FOLDER} is missing or not of these sources, "
                    f"or llvmlite {llvmlite.__version__} is too old to read it, and Numba, which "
                    f"makes it, cannot be imported ({error}). Install commpress again from a "
                    "wheel, upgrade llvmlite, or install Numba."
                ) from error
            file = build.bitcode(name)
            object_cache.store(file_name, file)
    return file


# ---------------------------------------------------------------- machine code


class _Host(NamedTuple):
    machine: llvm.TargetMachine
    engine: llvm.ExecutionEngine
    name: str  # hash of processor and features, for which machine code is the same


@cache
def _host() -> _Host:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    triple, cpu, features = (
        llvm.get_process_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
    )
    target = llvm.Target.from_triple(triple)
    relocations = "static" if target.name.startswith("x86") else "default"
    options = {
        "cpu": cpu,
        "features": features,
        "opt": 3,
        "codemodel": "jitdefault",
        "reloc": relocations,
        "jit": True,
    }
    empty = llvm.parse_assembly(f'target triple = "{triple}"')
    engine = llvm.create_mcjit_compiler(empty, target.create_target_machine(**options))
    name = blake2b(f"{triple} {cpu} {features}".encode(), digest_size=8).hexdigest()
    return _Host(target.create_target_machine(**options), engine, name)


def function_of(family: str, symbol: str) -> Any:
    """Return the compiled kernel with this name in a family's module."""
    with _compiling:
        host = _host()
        if not (address := host.engine.get_function_address(symbol)):
            host.engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code(family, symbol)))
            host.engine.finalize_object()
            address = host.engine.get_function_address(symbol)
        return _FUNCTION(address)


def machine_code(family: str, symbol: str) -> bytes:
    """Return an object file with the kernel of this name, for this processor."""
    file_name = f"{digest()}-{LLVM}-{_host().name}-{symbol}.o"
    code = object_cache.load(file_name)
    if code is None:
        started = time.thread_time()
        code = _optimised(_family(family).module, symbol)
        log.debug("commpress: compiled %s in %.2f s", symbol, time.thread_time() - started)
        object_cache.store(file_name, code)
    return code


def _optimised(module: bytes, symbol: str) -> bytes:
    """Return machine code of one kernel. The passes are those of Numba: inline functions, drop
    reference counts of arrays that do not leave a function, then optimize everything."""
    machine, of = _host().machine, llvm.parse_bitcode(module)
    of.triple, of.data_layout = machine.triple, str(machine.target_data)
    _hide(of, {llvm.Linkage.external}, symbol)
    for level in (0, 3):
        tuning = llvm.create_pipeline_tuning_options(speed_level=level)
        tuning.loop_vectorization = tuning.slp_vectorization = level > 0
        builder = llvm.create_pass_builder(machine, tuning)
        if level == 0:
            unused = llvm.create_new_module_pass_manager()
            unused.add_global_dead_code_eliminate_pass()
            unused.run(of, builder)
        passes = builder.getModulePassManager()
        if level == 0:
            passes.add_loop_rotate_pass()
            passes.add_instruction_combine_pass()
            passes.add_jump_threading_pass()
        passes.add_refprune_pass()
        passes.run(of, builder)
    _hide(of, {llvm.Linkage.external, llvm.Linkage.linkonce_odr}, symbol)
    return machine.emit_object(of)


def _hide(module: llvm.ModuleRef, linkages: set[llvm.Linkage], but: str) -> None:
    for function in module.functions:
        if not function.is_declaration and function.linkage in linkages and function.name != but:
            function.linkage = llvm.Linkage.internal
