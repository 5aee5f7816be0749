"""LLVM bitcode of the kernels in ``sources``, made by Numba: when a wheel is built, or by a
developer.

    python -m commpress.kernels.cpu.build            all families into the package's own folder
    python -m commpress.kernels.cpu.build FOLDER     into another one

The bitcode is hardly optimized, and for no particular processor: ``compiled`` does the rest on the
machine that runs it. It calls nothing of Numba: the memory functions that it needs are here, and a
kernel is called with a frame (``kinds``).
"""

import argparse
import json
import re
import zlib
from importlib import import_module
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import config, types
from numba.core.compiler_lock import global_compiler_lock

from commpress.kernels.cpu import object_cache
from commpress.kernels.cpu.digest import FAMILIES, FOLDER, cached_name, digest
from commpress.kernels.cpu.kinds import FLAG, NOTHING, Kind
from commpress.kernels.cpu.sources.kernel import KERNELS

_I8P, _I64, _I32 = ir.IntType(8).as_pointer(), ir.IntType(64), ir.IntType(32)
_UNOPTIMISED = 0

# An array allocated by a kernel is a block in Numba's format: reference count, destructor and its
# argument, address, size and allocator. Numba's code reads the count and the address, and calls
# these two functions.
_MEMORY = """
declare ptr @malloc(i64)
declare void @free(ptr)

define void @NRT_MemInfo_call_dtor(ptr %block) {
  call void @free(ptr %block)
  ret void
}

define noalias ptr @NRT_MemInfo_alloc_aligned(i64 %size, i32 %line) {
  %align = zext i32 %line to i64
  %room = add i64 %size, %align
  %whole = add i64 %room, 48
  %block = call ptr @malloc(i64 %whole)
  %none = icmp eq ptr %block, null
  br i1 %none, label %done, label %fill
fill:
  %first = getelementptr i8, ptr %block, i64 48
  %number = ptrtoint ptr %first to i64
  %less = sub i64 %align, 1
  %above = add i64 %number, %less
  %negative = sub i64 0, %align
  %place = and i64 %above, %negative
  store i64 1, ptr %block
  %data_at = getelementptr i8, ptr %block, i64 24
  store i64 %place, ptr %data_at
  %size_at = getelementptr i8, ptr %block, i64 32
  store i64 %size, ptr %size_at
  br label %done
done:
  ret ptr %block
}
"""


def bitcode(family: str) -> bytes:
    """Return the file of one family: a line that describes its contents, and the module."""
    import_module(f"commpress.kernels.cpu.sources.{family}")
    parts, names = [], {}
    with global_compiler_lock:  # keeps others from compiling with this level of optimization
        before, config.OPT = config.OPT, type(config.OPT)(_UNOPTIMISED)  # type: ignore[attr-defined]
        try:
            for name, declared in KERNELS[family].items():
                names[name] = [
                    [f"{kind.dtype}/{kind.dims}" for kind in kinds] for kinds in declared.variants
                ]
                for i, kinds in enumerate(declared.variants):
                    parts.append(_variant(declared.function, kinds, f"{family}.{name}.{i}"))
        finally:
            config.OPT = before  # type: ignore[attr-defined]
    module = llvm.parse_assembly(_MEMORY)
    module.triple, module.data_layout = parts[0].triple, parts[0].data_layout
    for part in parts:
        module.link_in(part)
    _strip(
        module,
        {f"{family}.{name}.{i}" for name, variants in names.items() for i in range(len(variants))},
    )
    header = {
        "family": family,
        "digest": digest(),
        "llvm": list(llvm.llvm_version_info),
        "kernels": names,
    }
    return (
        json.dumps(header, separators=(",", ":")).encode()
        + b"\n"
        + zlib.compress(module.as_bitcode(), 9)
    )


def _variant(function: Any, kinds: tuple[Kind, ...], name: str) -> llvm.ModuleRef:
    """Return a module with one function for callers, ``void name(slots)``, and all functions that
    it calls."""
    signature = tuple(map(_numba_type, kinds))
    function.compile(signature)
    compiled = function.overloads[signature]
    context, library = compiled.target_context, compiled.library
    module = context.create_module(name)
    entry = ir.Function(module, ir.FunctionType(ir.VoidType(), [_I8P]), name)
    builder = ir.IRBuilder(entry.append_basic_block())
    slots, arguments, at = entry.args[0], [], 0
    for kind, of in zip(kinds, signature, strict=True):
        if kind.dims:
            arguments.append(
                _array(
                    context,
                    builder,
                    of,
                    [_slot(builder, slots, at + i, _I64) for i in range(1 + kind.dims)],
                )
            )
            at += 1 + kind.dims
        elif kind == NOTHING:
            arguments.append(context.get_dummy_value())
        else:
            loaded = _slot(builder, slots, at, context.get_data_type(of))
            arguments.append(context.data_model_manager[of].from_data(builder, loaded))
            at += 1
    descriptor = compiled.fndesc
    called = context.declare_function(module, descriptor)
    status, result = context.call_conv.call_function(
        builder, called, descriptor.restype, descriptor.argtypes, arguments
    )
    _store(builder, slots, at, builder.zext(status.is_error, _I64))
    if descriptor.restype != types.none:
        _store(
            builder, slots, at + 1, context.cast(builder, result, descriptor.restype, types.int64)
        )
    builder.ret_void()
    whole = library._final_module.clone()
    whole.link_in(llvm.parse_assembly(str(module)))
    return whole


def _numba_type(kind: Kind) -> Any:
    if kind == NOTHING:
        return types.none
    of = types.boolean if kind == FLAG else getattr(types, kind.dtype)
    return types.Array(of, kind.dims, "C") if kind.dims else of


def _place(builder: ir.IRBuilder, slots: Any, at: int, of: Any) -> Any:
    return builder.bitcast(builder.gep(slots, [_I64(8 * at)]), of.as_pointer())


def _slot(builder: ir.IRBuilder, slots: Any, at: int, of: Any) -> Any:
    return builder.load(_place(builder, slots, at, of))


def _store(builder: ir.IRBuilder, slots: Any, at: int, value: Any) -> None:
    builder.store(value, _place(builder, slots, at, value.type))


def _array(context: Any, builder: ir.IRBuilder, kind: Any, words: list[Any]) -> Any:
    """Make an array over memory of the caller, in the order of C."""
    address, *shape = words
    element = context.get_data_type(kind.dtype)
    size, array = context.get_abi_sizeof(element), context.make_array(kind)(context, builder)
    strides = [_I64(size)]
    for length in reversed(shape[1:]):
        strides.insert(0, builder.mul(strides[0], length))
    data = builder.inttoptr(address, element.as_pointer())
    context.populate_array(
        array, data=data, shape=shape, strides=strides, itemsize=_I64(size), meminfo=None
    )
    return array._getvalue()


def _strip(module: llvm.ModuleRef, kernels: set[str]) -> None:
    """Keep only what the kernels need, and nothing of this process.

    Functions may be inlined, but not merely because they have a single call: that doubled the time
    to compile modules.
    """
    for function in module.functions:
        if not function.is_declaration:
            function.linkage = "external" if function.name in kernels else "linkonce_odr"
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = "internal"
    machine = llvm.Target.from_triple(module.triple).create_target_machine()
    passes = llvm.create_new_module_pass_manager()
    for add in (
        "sroa",
        "simplify_cfg",
        "dead_code_elimination",
        "global_dead_code_eliminate",
        "constant_merge",
        "merge_functions",
        "strip_dead_prototype",
    ):
        getattr(passes, f"add_{add}_pass")()
    passes.run(
        module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(_UNOPTIMISED))
    )
    module.verify()
    text = str(module)
    if found := re.search(r"inttoptr \(i64 \d+ to|@numba\.|@_ZN08NumbaEnv", text):
        raise RuntimeError(
            f"the module refers to this process: {text[found.start() : found.start() + 200]}"
        )
    open_ends = {
        f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")
    }
    if foreign := open_ends - {"malloc", "free", "sqrt"}:
        raise RuntimeError(f"the kernels call {', '.join(sorted(foreign))}, which only Numba has")


def write(folder: Path) -> None:
    """Write the files of all families, from the cache if it has them."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.bc"):
        old.unlink()
    for family in FAMILIES:
        if (made := object_cache.load(cached_name(family))) is None:
            made = bitcode(family)
            object_cache.store(cached_name(family), made)
        (folder / f"{family}.bc").write_bytes(made)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m commpress.kernels.cpu.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, metavar="FOLDER")
    write(parser.parse_args().folder)
