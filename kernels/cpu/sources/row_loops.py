"""Blocks of a message, one after the other: loaded, scaled, packed and stored, or unpacked and
added.

A block (input + residual, or the mean of P decoded rows) stays in the first-level cache until it is
done, so that a float is read once and a residual written once. Results are those of ``reference``
bit for bit.
"""

import numpy as np

from commpress.kernels.cpu.kinds import F32, FLAG, FLOATS, HALVES, I64, NOTHING, OCTETS, TABLE, U32
from commpress.kernels.cpu.sources.block_codes import (
    cast,
    dequantize,
    is_cast,
    narrowed,
    quantize_clipped,
    quantize_peak,
    tree_sum,
    uncast,
    widened,
)
from commpress.kernels.cpu.sources.block_headers import (
    WITH_HEADER,
    decode_with_header,
    encode_with_header,
    header_bytes,
)
from commpress.kernels.cpu.sources.decorators import jit
from commpress.kernels.cpu.sources.kernel import kernel
from commpress.kernels.cpu.sources.signs import (
    encode_signs,
    mean_signs,
    pack_signs,
    stream_signs,
    unpack_signs,
)
from commpress.kernels.pieces import (
    BITS,
    BLOCK,
    COLUMN,
    HASH,
    KIND,
    NUMEL,
    RESIDUAL,
    SHARD,
    SOURCE,
    WIDTH,
)
from commpress.kernels.reference import BF16, CHUNK, SIGN_RMS

# ``message`` is one flat byte array; row r starts at r · stride. Blocks are numbered piece by
# piece, row by row.


@jit
def _geometry(line, mixed):
    """Elements per block, blocks per row and bytes of scales of one piece."""
    step = line[BLOCK] if line[BLOCK] else CHUNK
    steps = (line[WIDTH] + step - 1) // step
    if is_cast(line[KIND]):
        return step, steps, 0
    if mixed is not None and line[KIND] & 255 >= WITH_HEADER:
        last = line[WIDTH] - (steps - 1) * step
        return (
            step,
            steps,
            (steps - 1) * header_bytes(line[KIND], step, step)
            + header_bytes(line[KIND], last, step),
        )
    return step, steps, 4 * steps if line[BLOCK] else 4


@jit
def _header_at(line, step, k, mixed):
    """Place where the scale or header of block ``k`` begins in its row."""
    if mixed is not None and line[KIND] & 255 >= WITH_HEADER:
        return k * header_bytes(line[KIND], step, step)
    return 4 * k if line[BLOCK] else 0


@jit
def _header_size(kind, span, step, mixed):
    return header_bytes(kind, span, step) if mixed is not None and kind & 255 >= WITH_HEADER else 4


@jit
def _store_float(message, at, word, word_bytes, value):
    word[0] = value
    for i in range(4):
        message[at + i] = word_bytes[i]


@jit
def _load_float(message, at, word, word_bytes):
    for i in range(4):
        word_bytes[i] = message[at + i]
    return word[0]


@jit
def _load(x, gain, residual, stale, c):
    """c := gain · x + residual; the residual is absent (empty), plain (stale = 0) or lazy."""
    n = x.size
    if residual.size == 0:
        for i in range(n):
            c[i] = x[i] * gain
    elif stale == 0:
        for i in range(n):
            c[i] = x[i] * gain + residual[i]
    else:
        for i in range(n):
            c[i] = x[i] * gain + (residual[i] - (stale if residual[i] >= 0 else -stale))


@jit
def _decode_block(
    row,
    headers,
    scale_at,
    size,
    code_at,
    n,
    kind,
    gain,
    word,
    word_bytes,
    flags,
    work,
    out,
    add,
    mixed,
):
    codes = row[headers + code_at :]
    if is_cast(kind):
        uncast(codes, n, kind, gain, work, out, add)
        return
    if mixed is not None and kind & 255 >= WITH_HEADER:
        decode_with_header(row[scale_at : scale_at + size], codes, n, kind, gain, work, out, add)
        return
    scale = _load_float(row, scale_at, word, word_bytes) * gain
    if mixed is None or kind <= SIGN_RMS:
        unpack_signs(codes, n, scale, flags, out, add)
    else:
        dequantize(codes, n, kind, scale, out, add)


@jit
def _quantize(c, n, kind, step, first, key, tree, flags, work, left, whole_row, codes, mixed):
    """Codes of one block and ``left`` := what stays behind (the compensated value if the row is one
    block)."""
    if kind > SIGN_RMS:
        if is_cast(kind):
            return cast(c, n, kind, work, left, codes)
        if mixed is not None:
            if kind > BF16:
                return quantize_clipped(c, n, kind, step, first, key, tree, work, left, codes)
            return quantize_peak(c, n, kind, first, key, work, left, codes)
    for i in range(n, step):
        c[i] = np.float32(0)
    total = tree_sum(c, tree, step, kind == SIGN_RMS)
    pack_signs(c, n, flags, codes)
    if whole_row:
        for i in range(n):
            left[i] = c[i]
        return total
    mean = np.float64(total) / np.float64(n)
    scale = np.float32(np.sqrt(mean) if kind == SIGN_RMS else mean)
    for i in range(n):
        left[i] = c[i] - (scale if c[i] >= 0 else -scale)
    return scale


@kernel(
    x=(FLOATS, HALVES),
    gain=F32,
    received=OCTETS,
    in_stride=I64,
    senders=I64,
    rank=I64,
    residual=FLOATS,
    stale=FLOATS,
    new_residual=FLOATS,
    message=OCTETS,
    stride=I64,
    partial=FLOATS,
    table=TABLE,
    rows=I64,
    key=U32,
    mixed=(FLAG, NOTHING),
    start=I64,
    stop=I64,
)
@jit
def encode(
    x,
    gain,
    received,
    in_stride,
    senders,
    rank,
    residual,
    stale,
    new_residual,
    message,
    stride,
    partial,
    table,
    rows,
    key,
    mixed,
    start,
    stop,
):
    """Blocks ``start`` to ``stop`` of the table; returns False if one of them is not finite.

    senders = 0: rows of ``x``. senders > 0: row ``rank`` alone, of the sum of the senders' rows
    divided by ``gain``. ``stale`` (one per piece and row): lazy scales, the residual is v −
    stale·sgn(v). Where a row has one scale, the block leaves its chunk sum in ``partial`` and the
    compensated value as residual; ``finish_rows`` does the rest. Without ``mixed`` there are signs
    and casts only, and what the other kinds need is not compiled.
    """
    c, tree, left = (
        np.empty(CHUNK, np.float32),
        np.empty(CHUNK, np.float32),
        np.empty(CHUNK, np.float32),
    )
    work, flags = np.empty(CHUNK + 4, np.float32), np.empty(CHUNK + 8, np.uint8)
    word, scales = np.empty(1, np.float32), np.empty(senders, np.float32)
    word_bytes = word.view(np.uint8)
    finite = True
    done = 0
    for p in range(table.shape[0]):
        line = table[p]
        step, steps, headers = _geometry(line, mixed)
        width, kind, bits = line[WIDTH], line[KIND], line[BITS]
        whole_row = line[BLOCK] == 0 and kind <= SIGN_RMS
        has_header = mixed is not None and kind & 255 >= WITH_HEADER
        for b in range(max(start - done, 0), min(stop - done, rows * steps)):
            r, k = b // steps, b % steps
            row = message[
                r * stride + line[COLUMN] : r * stride + line[COLUMN] + headers + width * bits // 8
            ]
            at = (rank if senders > 0 else r) * width + k * step
            span = min(step, width - k * step)
            n = min(span, max(line[NUMEL] - at, 0))
            scale_at, code_at = _header_at(line, step, k, mixed), k * step * bits // 8
            size = _header_size(kind, min(step, width - k * step), step, mixed)
            codes = row[headers + code_at : headers + code_at + span * bits // 8]
            residual_at = line[SHARD] + k * step if senders > 0 else line[RESIDUAL] + at
            feedback = line[RESIDUAL] >= 0
            old = (
                residual[residual_at : residual_at + n]
                if residual.size and feedback
                else residual[:0]
            )
            lazy = stale[p * rows + r] if stale.size else np.float32(0)
            scale = np.float32(0)
            if n == step and kind <= SIGN_RMS and step >= 256:
                writes = new_residual.size > 0 and feedback
                new, new_at = (new_residual, residual_at) if writes else (left, 0)
                source, factor = work[:n], np.float32(1)
                if senders > 0:
                    for s in range(senders):
                        scales[s] = _load_float(
                            received[s * in_stride + line[COLUMN] :], scale_at, word, word_bytes
                        )
                    mean_signs(
                        received,
                        in_stride,
                        line[COLUMN] + headers + code_at,
                        scales,
                        gain,
                        n,
                        source,
                    )
                else:
                    source, factor = (
                        widened(x[line[SOURCE] + at : line[SOURCE] + at + n], work),
                        gain,
                    )
                scale = encode_signs(
                    source,
                    factor,
                    residual if old.size else residual[:0],
                    residual_at,
                    lazy,
                    new,
                    new_at,
                    message,
                    r * stride + line[COLUMN] + headers + code_at,
                    step,
                    kind == SIGN_RMS,
                    whole_row,
                    writes,
                    c,
                    tree,
                )
            elif n > 0:
                if senders > 0:
                    for s in range(senders):
                        sent = received[s * in_stride + line[COLUMN] : (s + 1) * in_stride]
                        _decode_block(
                            sent,
                            headers,
                            scale_at,
                            size,
                            code_at,
                            n,
                            kind,
                            np.float32(1),
                            word,
                            word_bytes,
                            flags,
                            work,
                            c,
                            s > 0,
                            mixed,
                        )
                    for i in range(n):
                        c[i] = c[i] / gain
                    if old.size:
                        for i in range(n):
                            c[i] = c[i] + (old[i] - (lazy if old[i] >= 0 else -lazy))
                else:
                    _load(
                        widened(x[line[SOURCE] + at : line[SOURCE] + at + n], work),
                        gain,
                        old,
                        lazy,
                        c,
                    )
                new = (
                    new_residual[residual_at : residual_at + n]
                    if new_residual.size and feedback
                    else left
                )
                noise = key ^ np.uint32(line[HASH])
                if mixed is not None and has_header:
                    first = row[scale_at : scale_at + size]
                    scale = encode_with_header(c, n, kind, at, noise, work, new, first, codes)
                else:
                    scale = _quantize(
                        c, n, kind, step, at, noise, tree, flags, work, new, whole_row, codes, mixed
                    )
            elif has_header:
                row[scale_at : scale_at + size] = 0
            for i in range((n * bits + 7) // 8, span * bits // 8):
                codes[i] = 0
            if not np.isfinite(scale):
                finite = False
            if whole_row:
                partial[done + b] = scale
            elif not has_header and not is_cast(kind):
                _store_float(row, scale_at, word, word_bytes, scale)
        done += rows * steps
    return finite


@kernel(
    partial=FLOATS,
    table=TABLE,
    rows=I64,
    senders=I64,
    rank=I64,
    message=OCTETS,
    stride=I64,
    new_scale=FLOATS,
)
@jit
def finish_rows(partial, table, rows, senders, rank, message, stride, new_scale):
    """Row scales from chunk sums by the float64 halving tree, into the message and into
    ``new_scale``."""
    word = np.empty(1, np.float32)
    word_bytes = word.view(np.uint8)
    finite = True
    done = 0
    for p in range(table.shape[0]):
        line = table[p]
        _, steps, _ = _geometry(line, True)
        whole_row = line[BLOCK] == 0 and line[KIND] <= SIGN_RMS
        size = 1
        while size < steps:
            size *= 2
        tree = np.empty(size if whole_row else 1, np.float64)
        for r in range(rows):
            new_scale[p * rows + r] = np.float32(0)
            if not whole_row:
                continue
            n = min(line[WIDTH], max(line[NUMEL] - (rank if senders > 0 else r) * line[WIDTH], 0))
            used = (n + CHUNK - 1) // CHUNK
            for i in range(size):
                tree[i] = partial[done + r * steps + i] if i < used else 0.0
            half = size
            while half > 1:
                half //= 2
                for i in range(half):
                    tree[i] = tree[i] + tree[half + i]
            mean = tree[0] / np.float64(max(n, 1))
            scale = np.float32(np.sqrt(mean) if line[KIND] == SIGN_RMS else mean)
            if not np.isfinite(scale):
                finite = False
            _store_float(message, r * stride + line[COLUMN], word, word_bytes, scale)
            new_scale[p * rows + r] = scale
        done += rows * steps
    return finite


@kernel(
    message=OCTETS,
    stride=I64,
    out=(FLOATS, HALVES),
    gain=F32,
    add=FLAG,
    past=FLAG,
    senders=I64,
    rank=I64,
    table=TABLE,
    rows=I64,
    mixed=(FLAG, NOTHING),
    start=I64,
    stop=I64,
)
@jit
def decode(message, stride, out, gain, add, past, senders, rank, table, rows, mixed, start, stop):
    """senders = 0: every row into the buffer, or added to it; senders > 0: the mean of row ``rank``
    into the shard.

    ``past``: nobody reads the buffer soon, signs may be stored past the caches.
    """
    flags, work = np.empty(CHUNK + 8, np.uint8), np.empty(CHUNK + 4, np.float32)
    wide = np.empty(CHUNK, np.float32)
    word = np.empty(1, np.float32)
    word_bytes = word.view(np.uint8)
    done = 0
    for p in range(table.shape[0]):
        line = table[p]
        step, steps, headers = _geometry(line, mixed)
        width, kind, bits = line[WIDTH], line[KIND], line[BITS]
        for b in range(max(start - done, 0), min(stop - done, rows * steps)):
            r, k = b // steps, b % steps
            at = (rank if senders > 0 else r) * width + k * step
            n = min(step, width - k * step, line[NUMEL] - at)
            if n <= 0:
                continue
            scale_at, code_at = _header_at(line, step, k, mixed), k * step * bits // 8
            size = _header_size(kind, min(step, width - k * step), step, mixed)
            if senders == 0:
                row = message[
                    r * stride + line[COLUMN] : r * stride
                    + line[COLUMN]
                    + headers
                    + width * bits // 8
                ]
                place = out[line[SOURCE] + at : line[SOURCE] + at + n]
                values = widened(place, wide)
                if past and kind <= SIGN_RMS and values.ctypes.data == place.ctypes.data:
                    scale = _load_float(row, scale_at, word, word_bytes) * gain
                    if stream_signs(row[headers + code_at :], n, scale, values):
                        continue
                _decode_block(
                    row,
                    headers,
                    scale_at,
                    size,
                    code_at,
                    n,
                    kind,
                    gain,
                    word,
                    word_bytes,
                    flags,
                    work,
                    values,
                    add,
                    mixed,
                )
                narrowed(values, place)
                continue
            place = out[line[SHARD] + k * step : line[SHARD] + k * step + n]
            part = widened(place, wide)
            for s in range(senders):
                row = message[s * stride + line[COLUMN] : (s + 1) * stride]
                _decode_block(
                    row,
                    headers,
                    scale_at,
                    size,
                    code_at,
                    n,
                    kind,
                    gain,
                    word,
                    word_bytes,
                    flags,
                    work,
                    part,
                    s > 0,
                    mixed,
                )
            count = np.float32(senders)
            for i in range(n):
                part[i] = part[i] / count
            narrowed(part, place)
        done += rows * steps


@kernel(value=FLOATS, scale=FLOATS, table=TABLE, rows=I64, shard=FLAG)
@jit
def settle(value, scale, table, rows, shard):
    for p in range(table.shape[0]):
        line = table[p]
        for r in range(rows):
            s = scale[p * rows + r]
            if s == 0 or line[RESIDUAL] < 0:
                continue
            first = line[SHARD] if shard else line[RESIDUAL] + r * line[WIDTH]
            last = (
                first + line[WIDTH]
                if shard
                else line[RESIDUAL] + min((r + 1) * line[WIDTH], line[NUMEL])
            )
            for i in range(first, last):
                value[i] = value[i] - (s if value[i] >= 0 else -s)
