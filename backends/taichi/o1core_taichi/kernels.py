"""A call as one kernel launch: the stages in order, for CPUs and for GPUs.

The five kernels of the plan are here under their names, and with them stages between: far_sums
(what each block of evicted keys adds), attend_logits and attend_weights. Several loops in one
kernel cost far less than several launches from Python.
"""

from o1core_taichi import cpu, gpu
from o1core_taichi.common import (
    ATTEND,
    F1,
    F3,
    F4,
    FAR_COMMIT,
    FAR_E,
    FAR_SUMS,
    I1,
    I2,
    TILE,
    U2,
    asked,
    far_commit,
    far_peaks,
    head_rows,
    sizes_of,
)
from o1core_taichi.language import ti


@ti.kernel
def call_on_cpu(
    first_row: ti.i32,
    rows: ti.i32,
    sizes: I1,
    meta_in: U2,
    state: F1,
    sealed: F1,
    meta_out: U2,
    next_state: F1,
    scratch: F1,
    q: F3,
    k: F3,
    v: F3,
    out: F3,
    held: U2,
):
    """Rows `first_row ..` of q, k, v and out: state into next_state, and its meta also to held."""
    # All loops' counts come first: in between, each would cost a launch of its own.
    g = sizes_of(sizes)
    landmark_rows = g.groups * g.landmark_rows
    e_rows = landmark_rows * asked(g, FAR_E)
    sum_rows = landmark_rows * asked(g, FAR_SUMS)
    peaks = sum_rows * ((rows + TILE - 1) // TILE)
    elements = landmark_rows * g.value_dim * asked(g, FAR_COMMIT)
    queries = g.groups * g.heads * rows * asked(g, ATTEND)
    items = g.groups * (g.ring + 1)
    cpu.far_e(e_rows, sizes, meta_in, state, sealed, scratch, k, first_row, rows)
    far_peaks(peaks, sizes, meta_in, scratch, rows)
    cpu.far_sums(sum_rows, sizes, meta_in, state, scratch, v, first_row, rows)
    far_commit(elements, sizes, meta_in, state, next_state, scratch, rows)
    cpu.attend_logits(queries, sizes, meta_in, state, sealed, scratch, q, k, first_row, rows)
    cpu.attend_weights(queries, sizes, meta_in, sealed, scratch, rows)
    cpu.attend(queries, sizes, meta_in, state, sealed, scratch, v, out, first_row, rows)
    cpu.commit_all(items, sizes, meta_in, state, meta_out, next_state, held, k, v, first_row, rows)


@ti.kernel
def call_on_gpu(
    first_row: ti.i32,
    rows: ti.i32,
    sizes: I1,
    meta_in: U2,
    state: F1,
    sealed: F1,
    meta_out: U2,
    next_state: F1,
    scratch: F1,
    q: F3,
    k: F3,
    v: F3,
    out: F3,
    held: U2,
):
    """As `call_on_cpu`."""
    g = sizes_of(sizes)
    blocks = (rows + TILE - 1) // TILE
    landmarks = (g.landmark_rows + TILE - 1) // TILE
    row_wides = (rows + gpu.WIDE - 1) // gpu.WIDE
    value_wides = (g.value_dim + gpu.WIDE - 1) // gpu.WIDE
    column_wides = (g.stride + gpu.WIDE - 1) // gpu.WIDE
    tiles = (g.heads * head_rows(rows) + TILE - 1) // TILE
    parts = TILE // gpu.rows_side_by_side(g.landmarks)
    far_groups = g.groups * asked(g, FAR_E)
    sum_groups = g.groups * asked(g, FAR_SUMS)
    attend_groups = g.groups * asked(g, ATTEND)
    gathers = ti.max(far_groups, ti.max(sum_groups, attend_groups)) * gpu.gathered(g, rows)
    moves = (gathers + g.groups * (g.ring + 1)) * gpu.THREADS
    e_threads = far_groups * row_wides * landmarks * gpu.THREADS
    peaks = sum_groups * g.landmark_rows * blocks
    sum_threads = sum_groups * blocks * landmarks * value_wides * gpu.THREADS
    elements = g.groups * asked(g, FAR_COMMIT) * g.landmark_rows * g.value_dim
    logit_threads = attend_groups * tiles * column_wides * gpu.THREADS
    weight_threads = attend_groups * tiles * parts * gpu.ROW_THREADS
    attend_threads = attend_groups * tiles * value_wides * gpu.THREADS
    gpu.move(
        moves,
        gathers,
        sizes,
        meta_in,
        state,
        sealed,
        meta_out,
        next_state,
        scratch,
        held,
        k,
        v,
        first_row,
        rows,
    )
    gpu.far_e(e_threads, sizes, meta_in, sealed, scratch, rows)
    far_peaks(peaks, sizes, meta_in, scratch, rows)
    gpu.far_sums(sum_threads, sizes, meta_in, scratch, rows)
    far_commit(elements, sizes, meta_in, state, next_state, scratch, rows)
    gpu.attend_logits(logit_threads, sizes, meta_in, scratch, q, first_row, rows)
    gpu.attend_weights(weight_threads, sizes, meta_in, sealed, scratch, rows)
    gpu.attend(attend_threads, sizes, meta_in, scratch, out, first_row, rows)


# Rows on the device -------------------------------------------------------------------------------

NO_FAULT = 2**31 - 1
A3 = ti.types.ndarray(ndim=3)
A4 = ti.types.ndarray(ndim=4)


@ti.func
def first_beyond(array: ti.template(), limit: ti.i32, found: ti.template(), at: ti.i32):
    """The first element whose size, as bits, is beyond the limit's: infinity and NaN are too."""
    heads, width = array.shape[1], array.shape[2]
    for i in range(array.shape[0] * heads * width):
        x = array[i // (heads * width), i // width % heads, i % width]
        # No arch need tell NaN from a number, but all keep its bits.
        if (ti.bit_cast(x, ti.i32) & 0x7FFFFFFF) > limit:
            ti.atomic_min(found[at], i)


@ti.kernel
def check_rows(q: F3, k: F3, v: F3, q_limit: ti.i32, k_limit: ti.i32, v_limit: ti.i32, found: I1):
    for i in range(4):
        found[i] = NO_FAULT
    first_beyond(q, q_limit, found, 0)
    first_beyond(k, k_limit, found, 1)
    first_beyond(v, v_limit, found, 2)


@ti.kernel
def report(out: F3, held: U2, found: I1, told: I2):
    """What the device holds, to the host: meta, then the faults found, fourth that of out."""
    first_beyond(out, 0x7F7FFFFF, found, 3)
    for i in range(held.shape[0] * 4):
        told[i // 4, i % 4] = ti.cast(held[i // 4, i % 4], ti.i32)
    for i in range(4):
        told[held.shape[0], i] = found[i]


@ti.kernel
def convert(array: A3, rows: F3):
    for i, j, t in array:
        rows[i, j, t] = ti.cast(array[i, j, t], ti.f32)


@ti.kernel
def fold(array: A4, rows: F3):
    """`[batch, rows, heads, width]` of any float to `[rows, batch * heads, width]`."""
    heads = array.shape[2]
    for sequence, i, j, t in array:
        rows[i, sequence * heads + j, t] = ti.cast(array[sequence, i, j, t], ti.f32)


@ti.kernel
def unfold(rows: F3, array: F4):
    heads = array.shape[2]
    for sequence, i, j, t in array:
        array[sequence, i, j, t] = rows[i, sequence * heads + j, t]
