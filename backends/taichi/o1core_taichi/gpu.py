"""The matrix products on GPUs: tiles of 64 x 64 results, a workgroup of 256 threads each.

Slices of terms are staged in workgroup memory; a thread makes 4 x 4 results. While it adds up one
slice, the next is on its way. Every loop around a barrier has bounds that are equal in the whole
workgroup. Rows of a tile are numbered as `common` says.
"""

from o1core_taichi.common import (
    BLOCK,
    MAX_LANDMARKS,
    TILE,
    end_of,
    far_logits_at,
    far_weights_at,
    first_row_of,
    gone,
    gone_by,
    head_rows,
    k_landmark_at,
    last_row_of,
    make_row_weights,
    numerator_at,
    ring_k_at,
    ring_of,
    ring_v_at,
    sink_k_at,
    sink_v_at,
    sizes_of,
    slot_of,
    start_of,
    weights_at,
)
from o1core_taichi.language import ti

THREADS = 256
DEPTH = 32
"""Terms of a slice."""
LOADS = DEPTH * TILE // THREADS
"""What a thread stages of one, for rows and for columns."""
ROWS_APART = THREADS // DEPTH
TERMS_APART = THREADS // TILE
# Beyond 64, so that threads that store one term of neighbouring rows meet in few memory banks.
STRIDE = 68
LANES = 32
"""Threads a row in attend_weights."""
TOGETHER = 4
"""Rows of a workgroup there, all of one head."""

# Where the terms of a column lie, or there is none.
NOWHERE, SEALED, STATE, ROWS = 0, 1, 2, 3

row_weights = make_row_weights(LANES)


@ti.func
def add_staged(sums: ti.template(), a: ti.template(), b: ti.template(), thread: ti.i32):
    """Add the staged terms to a thread's results: rows 4y.. of the tile, columns 4x.. of it."""
    y = thread // 16 * 4
    x = thread % 16 * 4
    for term in range(DEPTH):
        left = ti.Vector([a[term, y + i] for i in ti.static(range(4))])
        right = ti.Vector([b[term, x + i] for i in ti.static(range(4))])
        for i in ti.static(range(4)):
            for j in ti.static(range(4)):
                sums[i, j] += left[i] * right[j]


@ti.func
def stage_rows(to: ti.template(), terms: ti.template(), thread: ti.i32):
    """What a thread loaded as one term of every so-manieth row."""
    for e in ti.static(range(LOADS)):
        to[thread % DEPTH, thread // DEPTH + ROWS_APART * e] = terms[e]


@ti.func
def stage_terms(to: ti.template(), terms: ti.template(), thread: ti.i32):
    """What a thread loaded as every so-manieth term of one row."""
    for e in ti.static(range(LOADS)):
        to[thread // TILE + TERMS_APART * e, thread % TILE] = terms[e]


@ti.func
def far_e(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    state: ti.template(),
    sealed: ti.template(),
    scratch: ti.template(),
    k: ti.template(),
    first_row: ti.i32,
    rows: ti.i32,
):
    """Landmark logits of the keys that the call evicts. Rows are landmarks, columns keys."""
    ti.loop_config(block_dim=THREADS)
    for i in range(count):
        a = ti.simt.block.SharedArray((DEPTH, STRIDE), ti.f32)
        b = ti.simt.block.SharedArray((DEPTH, STRIDE), ti.f32)
        g = sizes_of(sizes)
        thread = i % THREADS
        workgroup = i // THREADS
        tiles = (g.landmark_rows + TILE - 1) // TILE
        blocks = (rows + BLOCK - 1) // BLOCK
        group = workgroup // (tiles * blocks)
        top = workgroup % tiles * TILE
        start = workgroup // tiles % blocks * BLOCK
        ring = ring_of(meta, g, group)
        end = ti.min(gone_by(ring, rows), start + BLOCK)
        if start < end:
            queries = ti.Vector.zero(ti.i32, LOADS)
            keys = ti.Vector.zero(ti.i32, LOADS)
            for e in ti.static(range(LOADS)):
                at = thread // DEPTH + ROWS_APART * e
                x = group * g.landmark_rows + ti.min(top + at, g.landmark_rows - 1)
                queries[e] = g.q_landmarks + x * g.head_dim
                key = ti.min(start + at, end - 1)
                if key < ring.length:
                    keys[e] = ring_k_at(g, group, slot_of(ring, key))
                else:
                    keys[e] = -1 - (first_row + key - ring.length)
            sums = ti.Matrix.zero(ti.f32, 4, 4)
            slices = (g.head_dim + DEPTH - 1) // DEPTH
            for j in range(slices + 1):
                left = ti.Vector.zero(ti.f32, LOADS)
                right = ti.Vector.zero(ti.f32, LOADS)
                t = j * DEPTH + thread % DEPTH
                if t < g.head_dim:
                    for e in ti.static(range(LOADS)):
                        left[e] = sealed[queries[e] + t]
                        if keys[e] >= 0:
                            right[e] = state[keys[e] + t]
                        else:
                            right[e] = k[-1 - keys[e], group, t]
                if j > 0:
                    add_staged(sums, a, b, thread)
                ti.simt.block.sync()
                stage_rows(a, left, thread)
                stage_rows(b, right, thread)
                ti.simt.block.sync()
            for y in ti.static(range(4)):
                for x in ti.static(range(4)):
                    row = top + thread // 16 * 4 + y
                    key = start + thread % 16 * 4 + x
                    if row < g.landmark_rows and key < end:
                        to = far_logits_at(g, group * g.landmark_rows + row) + key
                        scratch[to] = sums[y, x] * g.scale


@ti.func
def far_sums(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    state: ti.template(),
    scratch: ti.template(),
    v: ti.template(),
    first_row: ti.i32,
    rows: ti.i32,
):
    """The numerator that each block adds. Rows are landmarks, columns elements of values."""
    ti.loop_config(block_dim=THREADS)
    for i in range(count):
        a = ti.simt.block.SharedArray((DEPTH, STRIDE), ti.f32)
        b = ti.simt.block.SharedArray((DEPTH, STRIDE), ti.f32)
        g = sizes_of(sizes)
        thread = i % THREADS
        workgroup = i // THREADS
        tiles = (g.landmark_rows + TILE - 1) // TILE
        columns = (g.value_dim + TILE - 1) // TILE
        blocks = (rows + BLOCK - 1) // BLOCK
        top = workgroup % tiles * TILE
        t = workgroup // tiles % columns * TILE + thread % TILE
        block = workgroup // (tiles * columns) % blocks
        group = workgroup // (tiles * columns * blocks)
        ring = ring_of(meta, g, group)
        start = block * BLOCK
        end = ti.min(gone_by(ring, rows), start + BLOCK)
        if start < end:
            weights = ti.Vector.zero(ti.i32, LOADS)
            for e in ti.static(range(LOADS)):
                at = ti.min(top + thread // DEPTH + ROWS_APART * e, g.landmark_rows - 1)
                weights[e] = far_weights_at(g, group * g.landmark_rows + at)
            sums = ti.Matrix.zero(ti.f32, 4, 4)
            slices = (end - start + DEPTH - 1) // DEPTH
            for j in range(slices + 1):
                left = ti.Vector.zero(ti.f32, LOADS)
                right = ti.Vector.zero(ti.f32, LOADS)
                first = start + j * DEPTH
                for e in ti.static(range(LOADS)):
                    key = first + thread % DEPTH
                    if key < end:
                        left[e] = scratch[weights[e] + key]
                    key = first + thread // TILE + TERMS_APART * e
                    if key < end and t < g.value_dim:
                        if key < ring.length:
                            right[e] = state[ring_v_at(g, group, slot_of(ring, key)) + t]
                        else:
                            right[e] = v[first_row + key - ring.length, group, t]
                if j > 0:
                    add_staged(sums, a, b, thread)
                ti.simt.block.sync()
                stage_rows(a, left, thread)
                stage_terms(b, right, thread)
                ti.simt.block.sync()
            for y in ti.static(range(4)):
                for x in ti.static(range(4)):
                    row = top + thread // 16 * 4 + y
                    to = t - thread % TILE + thread % 16 * 4 + x
                    if row < g.landmark_rows and to < g.value_dim:
                        at = numerator_at(g, block, group * g.landmark_rows + row)
                        scratch[at + to] = sums[y, x]


@ti.func
def attend_logits(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    state: ti.template(),
    sealed: ti.template(),
    scratch: ti.template(),
    q: ti.template(),
    k: ti.template(),
    first_row: ti.i32,
    rows: ti.i32,
):
    """Logits of the rows with sinks, keys in reach of their tile, and landmark keys."""
    ti.loop_config(block_dim=THREADS)
    for i in range(count):
        a = ti.simt.block.SharedArray((DEPTH, STRIDE), ti.f32)
        b = ti.simt.block.SharedArray((DEPTH, STRIDE), ti.f32)
        g = sizes_of(sizes)
        thread = i % THREADS
        workgroup = i // THREADS
        each = head_rows(rows)
        tiles = (g.heads * each + TILE - 1) // TILE
        most = (g.stride + TILE - 1) // TILE
        first = workgroup % most * TILE
        tile = workgroup // most % tiles
        group = workgroup // (most * tiles)
        ring = ring_of(meta, g, group)
        start = start_of(ring, tile, rows)
        end = end_of(g, ring, tile, rows)
        far = gone(ring, last_row_of(tile, rows)) > 0
        columns = end + ti.select(far, g.landmarks, 0)
        # Keys that all rows of the tile have evicted get their weights elsewhere.
        dead = g.sinks + gone(ring, first_row_of(tile, rows)) - start
        if first < columns and not (first >= g.sinks and first + TILE <= dead):
            query_rows = ti.Vector.zero(ti.i32, LOADS)
            query_heads = ti.Vector.zero(ti.i32, LOADS)
            kinds = ti.Vector.zero(ti.i32, LOADS)
            keys = ti.Vector.zero(ti.i32, LOADS)
            for e in ti.static(range(LOADS)):
                at = thread // DEPTH + ROWS_APART * e
                query = ti.min(tile * TILE + at, g.heads * each - 1)
                query_rows[e] = first_row + ti.min(query % each, rows - 1)
                query_heads[e] = group * g.heads + query // each
                column = first + at
                key = start + column - g.sinks
                if column < g.sinks:
                    kinds[e] = SEALED
                    keys[e] = sink_k_at(g, group, column)
                elif column >= end:
                    if column < columns:
                        kinds[e] = SEALED
                        keys[e] = k_landmark_at(g, group, column - end)
                elif key < ring.length:
                    kinds[e] = STATE
                    keys[e] = ring_k_at(g, group, slot_of(ring, key))
                else:
                    kinds[e] = ROWS
                    keys[e] = first_row + key - ring.length
            sums = ti.Matrix.zero(ti.f32, 4, 4)
            slices = (g.head_dim + DEPTH - 1) // DEPTH
            for j in range(slices + 1):
                left = ti.Vector.zero(ti.f32, LOADS)
                right = ti.Vector.zero(ti.f32, LOADS)
                t = j * DEPTH + thread % DEPTH
                if t < g.head_dim:
                    for e in ti.static(range(LOADS)):
                        left[e] = q[query_rows[e], query_heads[e], t]
                        if kinds[e] == ROWS:
                            right[e] = k[keys[e], group, t]
                        elif kinds[e] == STATE:
                            right[e] = state[keys[e] + t]
                        elif kinds[e] == SEALED:
                            right[e] = sealed[keys[e] + t]
                if j > 0:
                    add_staged(sums, a, b, thread)
                ti.simt.block.sync()
                stage_rows(a, left, thread)
                stage_rows(b, right, thread)
                ti.simt.block.sync()
            for y in ti.static(range(4)):
                for x in ti.static(range(4)):
                    query = tile * TILE + thread // 16 * 4 + y
                    column = first + thread % 16 * 4 + x
                    if query < g.heads * each and column < columns:
                        scratch[weights_at(g, group, query, rows) + column] = sums[y, x] * g.scale


@ti.func
def attend_weights(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    sealed: ti.template(),
    scratch: ti.template(),
    rows: ti.i32,
):
    """Logits of the rows become the weights of their values."""
    ti.loop_config(block_dim=TOGETHER * LANES)
    for i in range(count):
        store = ti.simt.block.SharedArray((TOGETHER * 3 * MAX_LANDMARKS,), ti.f32)
        part = ti.simt.block.SharedArray((TOGETHER * LANES,), ti.f32)
        g = sizes_of(sizes)
        lane = i % LANES
        r = i // LANES % TOGETHER
        quads = (rows + TOGETHER - 1) // TOGETHER
        quad = i // (LANES * TOGETHER)
        first = quad % quads * TOGETHER
        row = ti.min(first + r, rows - 1)
        last = ti.min(first + TOGETHER, rows) - 1
        counts = ti.select(first + r < rows, 1, 0)
        row_weights(
            g,
            meta,
            sealed,
            scratch,
            store,
            part,
            r * 3 * MAX_LANDMARKS,
            r * LANES,
            lane,
            quad // quads,
            row,
            last,
            counts,
            rows,
        )


@ti.func
def attend(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    state: ti.template(),
    sealed: ti.template(),
    scratch: ti.template(),
    v: ti.template(),
    out: ti.template(),
    first_row: ti.i32,
    rows: ti.i32,
):
    """Weights times values."""
    ti.loop_config(block_dim=THREADS)
    for i in range(count):
        a = ti.simt.block.SharedArray((DEPTH, STRIDE), ti.f32)
        b = ti.simt.block.SharedArray((DEPTH, STRIDE), ti.f32)
        g = sizes_of(sizes)
        thread = i % THREADS
        workgroup = i // THREADS
        each = head_rows(rows)
        tiles = (g.heads * each + TILE - 1) // TILE
        columns = (g.value_dim + TILE - 1) // TILE
        left_column = workgroup % columns * TILE
        t = left_column + thread % TILE
        tile = workgroup // columns % tiles
        group = workgroup // (columns * tiles)
        ring = ring_of(meta, g, group)
        start = start_of(ring, tile, rows)
        end = end_of(g, ring, tile, rows)
        weights = ti.Vector.zero(ti.i32, LOADS)
        heads = ti.Vector.zero(ti.i32, LOADS)
        for e in ti.static(range(LOADS)):
            query = tile * TILE + thread // DEPTH + ROWS_APART * e
            weights[e] = weights_at(g, group, query, rows)
            # Numbers that no row has, at the end of a head or of all, are of no head.
            heads[e] = ti.select(query < g.heads * each and query % each < rows, query // each, -1)
        sums = ti.Matrix.zero(ti.f32, 4, 4)
        slices = (end + DEPTH - 1) // DEPTH
        for j in range(slices + 1):
            left = ti.Vector.zero(ti.f32, LOADS)
            right = ti.Vector.zero(ti.f32, LOADS)
            for e in ti.static(range(LOADS)):
                column = j * DEPTH + thread % DEPTH
                if column < end and heads[e] >= 0:
                    left[e] = scratch[weights[e] + column]
                column = j * DEPTH + thread // TILE + TERMS_APART * e
                if column < end and t < g.value_dim:
                    key = start + column - g.sinks
                    if column < g.sinks:
                        right[e] = sealed[sink_v_at(g, group, column) + t]
                    elif key < ring.length:
                        right[e] = state[ring_v_at(g, group, slot_of(ring, key)) + t]
                    else:
                        right[e] = v[first_row + key - ring.length, group, t]
            if j > 0:
                add_staged(sums, a, b, thread)
            ti.simt.block.sync()
            stage_rows(a, left, thread)
            stage_terms(b, right, thread)
            ti.simt.block.sync()
        # Each head has far numerators of its own: the rows of other heads weigh them with 0.
        slices = 0
        first_head = tile * TILE // each
        if gone(ring, last_row_of(tile, rows)) > 0:
            last_head = (ti.min(tile * TILE + TILE, g.heads * each) - 1) // each
            slices = (g.landmarks + DEPTH - 1) // DEPTH * (last_head - first_head + 1)
        a_head = (g.landmarks + DEPTH - 1) // DEPTH
        for j in range(slices):
            head = first_head + j // a_head
            first = j % a_head * DEPTH
            left = ti.Vector.zero(ti.f32, LOADS)
            right = ti.Vector.zero(ti.f32, LOADS)
            for e in ti.static(range(LOADS)):
                landmark = first + thread % DEPTH
                if landmark < g.landmarks and heads[e] == head:
                    left[e] = scratch[weights[e] + end + landmark]
                landmark = first + thread // TILE + TERMS_APART * e
                if landmark < g.landmarks and t < g.value_dim:
                    x = group * g.landmark_rows + head * g.landmarks + landmark
                    right[e] = scratch[numerator_at(g, start // BLOCK, x) + t]
            ti.simt.block.sync()
            stage_rows(a, left, thread)
            stage_terms(b, right, thread)
            ti.simt.block.sync()
            add_staged(sums, a, b, thread)
        for y in ti.static(range(4)):
            for x in ti.static(range(4)):
                query = tile * TILE + thread // 16 * 4 + y
                to = left_column + thread % 16 * 4 + x
                row = query % each
                if query < g.heads * each and row < rows and to < g.value_dim:
                    out[first_row + row, group * g.heads + query // each, to] = sums[y, x]
