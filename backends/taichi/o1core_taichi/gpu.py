"""The matrix products on GPUs: tiles of 64 x 128 results, a workgroup of 128 threads each.

Slices of terms are staged in workgroup memory; a thread makes 8 x 8 results, rows 4y.. and
32 + 4y.. of the tile, columns 4x.. and 64 + 4x.. of it. While it adds up one slice, the next is on
its way.
Every loop around a barrier has bounds that are equal in the whole workgroup.

Keys and values lie in several arrays, the ring's in an order of their own. `gather` puts those of a
group side by side in scratch, so that a product finds its terms by a number: landmark keys, sinks,
keys of the ring by age, rows of the call; for values the same without the landmarks.
"""

from o1core_taichi.common import (
    PART_AT,
    SHARED,
    TILE,
    commit,
    end_of,
    evicted_by,
    evictor_of,
    far_logits_at,
    far_weights_at,
    first_row_of,
    gone,
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
)
from o1core_taichi.language import has_quads, ti

THREADS = 128
WIDE = 128
"""Columns of a tile."""
DEPTH = 8
"""Terms of a slice: short ones leave room for more workgroups at a time."""
# Quads of a term, of rows and of columns, padded to spread the stores over the memory banks.
A_QUADS, B_QUADS = TILE // 4 + 1, WIDE // 4 + 1
ROW_THREADS = 256
"""Threads of a tile in attend_weights."""
row_weights = make_row_weights(True, TILE)


QUAD = ti.types.vector(4, ti.f32)
shared = ti.simt.block.SharedArray


@ti.func
def load_quad(array: ti.template(), at: ti.i32):
    """Four neighbouring numbers of workgroup memory."""
    quad = ti.Vector.zero(ti.f32, 4)
    if ti.static(has_quads()):
        quad = array[at]
    else:
        for i in ti.static(range(4)):
            quad[i] = array[4 * at + i]
    return quad


@ti.func
def store_quad(array: ti.template(), at: ti.i32, quad: ti.template(), first: ti.template()):
    """Four elements of a vector, from `first` on."""
    if ti.static(has_quads()):
        array[at] = ti.Vector([quad[first], quad[first + 1], quad[first + 2], quad[first + 3]])
    else:
        for i in ti.static(range(4)):
            array[4 * at + i] = quad[first + i]


# Numbers in what gather makes.


@ti.func
def key_at(g: ti.template(), group: ti.i32, number: ti.i32) -> ti.i32:
    """The terms of a key, which is numbered landmarks, sinks, keys."""
    each = g.landmarks + g.sinks + g.ring + g.room
    return g.keys + (group * each + number) * g.head_dim


@ti.func
def value_at(g: ti.template(), group: ti.i32, number: ti.i32) -> ti.i32:
    """The elements of a value, which is numbered sinks, keys."""
    return g.values + (group * (g.sinks + g.ring + g.room) + number) * g.value_dim


@ti.func
def tile_weights_at(g: ti.template(), group: ti.i32, tile: ti.i32, rows: ti.i32) -> ti.i32:
    """The columns of a tile, each with one number for each of 64 queries."""
    tiles = (g.heads * head_rows(rows) + TILE - 1) // TILE
    return g.weights + (group * tiles + tile) * g.stride * TILE


@ti.func
def share_at(g: ti.template(), group: ti.i32, tile: ti.i32, rows: ti.i32) -> ti.i32:
    """The shares of a tile's queries."""
    return g.shares + (group * ((g.heads * head_rows(rows) + TILE - 1) // TILE) + tile) * TILE


@ti.func
def gathered(g: ti.template(), rows: ti.i32) -> ti.i32:
    """Keys of a group that are put side by side."""
    return g.landmarks + g.sinks + g.ring + rows


@ti.func
def gather(
    g: ti.template(),
    meta: ti.template(),
    state: ti.template(),
    sealed: ti.template(),
    scratch: ti.template(),
    k: ti.template(),
    v: ti.template(),
    item: ti.i32,
    thread: ti.i32,
    first_row: ti.i32,
    rows: ti.i32,
):
    """A key and its value to where products look for them."""
    group = item // gathered(g, rows)
    number = item % gathered(g, rows)
    sink = number - g.landmarks
    key = sink - g.sinks
    ring = ring_of(meta, g, group)
    k_to = key_at(g, group, number) + thread
    v_to = value_at(g, group, sink) + thread
    k_steps = (g.head_dim - thread + THREADS - 1) // THREADS
    v_steps = (g.value_dim - thread + THREADS - 1) // THREADS
    if sink < 0:
        at = k_landmark_at(g, group, number) + thread
        for j in range(k_steps):
            scratch[k_to + j * THREADS] = sealed[at + j * THREADS]
    elif key < 0:
        at = sink_k_at(g, group, sink) + thread
        for j in range(k_steps):
            scratch[k_to + j * THREADS] = sealed[at + j * THREADS]
        at = sink_v_at(g, group, sink) + thread
        for j in range(v_steps):
            scratch[v_to + j * THREADS] = sealed[at + j * THREADS]
    elif key < ring.length:
        at = ring_k_at(g, group, slot_of(ring, key)) + thread
        for j in range(k_steps):
            scratch[k_to + j * THREADS] = state[at + j * THREADS]
        at = ring_v_at(g, group, slot_of(ring, key)) + thread
        for j in range(v_steps):
            scratch[v_to + j * THREADS] = state[at + j * THREADS]
    elif key < ring.length + rows:
        row = first_row + key - ring.length
        for j in range(k_steps):
            scratch[k_to + j * THREADS] = k[row, group, thread + j * THREADS]
        for j in range(v_steps):
            scratch[v_to + j * THREADS] = v[row, group, thread + j * THREADS]


@ti.func
def move(
    count: ti.template(),
    gathers: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    state: ti.template(),
    sealed: ti.template(),
    meta_out: ti.template(),
    next_state: ti.template(),
    scratch: ti.template(),
    held: ti.template(),
    k: ti.template(),
    v: ti.template(),
    first_row: ti.i32,
    rows: ti.i32,
):
    """Everything that is copied: gather, then ring_commit and meta, which nothing here reads."""
    ti.loop_config(block_dim=THREADS)
    for i in range(count):
        thread = i % THREADS
        item = i // THREADS
        if item < gathers:
            gather(
                sizes_of(sizes), meta, state, sealed, scratch, k, v, item, thread, first_row, rows
            )
        else:
            item -= gathers
            commit(
                sizes,
                meta,
                state,
                meta_out,
                next_state,
                held,
                k,
                v,
                thread,
                THREADS,
                item,
                first_row,
                rows,
            )


@ti.func
def put_far_logits(
    g: ti.template(),
    ring: ti.template(),
    scratch: ti.template(),
    quarter: ti.template(),
    group: ti.i32,
    first: ti.i32,
    row: ti.i32,
    rows: ti.i32,
):
    for i in ti.static(range(4)):
        for j in ti.static(range(4)):
            if first + i < g.landmark_rows and row + j < rows and evicted_by(ring, row + j) >= 0:
                to = far_logits_at(g, group * g.landmark_rows + first + i) + row + j
                scratch[to] = quarter[i, j] * g.scale


@ti.func
def put_numerators(
    g: ti.template(),
    scratch: ti.template(),
    quarter: ti.template(),
    block: ti.i32,
    group: ti.i32,
    first: ti.i32,
    column: ti.i32,
):
    for i in ti.static(range(4)):
        for j in ti.static(range(4)):
            if first + i < g.landmark_rows and column + j < g.value_dim:
                to = numerator_at(g, block, group * g.landmark_rows + first + i) + column + j
                scratch[to] = quarter[i, j]


@ti.func
def put_logits(
    g: ti.template(),
    scratch: ti.template(),
    quarter: ti.template(),
    weights: ti.i32,
    row: ti.i32,
    column: ti.i32,
    end: ti.i32,
):
    for j in ti.static(range(4)):
        if column + j < end:
            for i in ti.static(range(4)):
                scratch[weights + (column + j) * TILE + row + i] = quarter[i, j] * g.scale


@ti.func
def rows_side_by_side(landmarks: ti.i32) -> ti.i32:
    """Rows that a workgroup of attend_weights has, for all of which its memory has room."""
    side = TILE
    for _ in ti.static(range(3)):
        side = ti.select(landmarks * side > PART_AT, side // 2, side)
    return side


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
    ti.loop_config(block_dim=ROW_THREADS)
    for i in range(count):
        us = shared((SHARED,), ti.f32)
        powers = shared((SHARED,), ti.f32)
        mosts = shared((SHARED,), ti.f32)
        g = sizes_of(sizes)
        each = head_rows(rows)
        tiles = (g.heads * each + TILE - 1) // TILE
        side = rows_side_by_side(g.landmarks)
        r = i % ROW_THREADS % side
        lane = i % ROW_THREADS // side
        workgroup = i // ROW_THREADS
        in_tile = workgroup % (TILE // side) * side + r
        tile = workgroup // (TILE // side) % tiles
        group = workgroup // (TILE // side * tiles)
        query = tile * TILE + in_tile
        counts = ti.select(query < g.heads * each and query % each < rows, 1, 0)
        if counts == 0:
            # Another row of the tile, whose columns are there.
            query = tile * TILE
        at = tile_weights_at(g, group, tile, rows) + query % TILE
        row_weights(
            g,
            meta,
            sealed,
            scratch,
            us,
            powers,
            mosts,
            at,
            share_at(g, group, tile, rows) + query % TILE,
            0,
            r,
            side,
            lane,
            ROW_THREADS // side,
            tile,
            group * g.heads + query // each,
            query % each,
            counts,
            rows,
        )


@ti.func
def put_out(
    g: ti.template(),
    out: ti.template(),
    quarter: ti.template(),
    group: ti.i32,
    first: ti.i32,
    column: ti.i32,
    first_row: ti.i32,
    rows: ti.i32,
):
    each = head_rows(rows)
    for i in ti.static(range(4)):
        query = first + i
        row = query % each
        if query < g.heads * each and row < rows:
            for j in ti.static(range(4)):
                if column + j < g.value_dim:
                    head = group * g.heads + query // each
                    out[first_row + row, head, column + j] = quarter[i, j]


# A slice is loaded in two ways. Where the terms of a row lie side by side, a thread has one term of
# rows 4y.. with y = thread // DEPTH, and of columns 4y.. and 64 + 4y..; where the rows of a term
# do, it has those with y = thread % 16, of term thread // 16.


@ti.func
def add_staged(
    upper_left: ti.template(),
    upper_right: ti.template(),
    lower_left: ti.template(),
    lower_right: ti.template(),
    a: ti.template(),
    b: ti.template(),
    y: ti.i32,
    x: ti.i32,
):
    """Add the staged terms to the four quarters of a thread's results."""
    for term in range(DEPTH):
        upper = load_quad(a, term * A_QUADS + y)
        lower = load_quad(a, term * A_QUADS + TILE // 8 + y)
        left = load_quad(b, term * B_QUADS + x)
        right = load_quad(b, term * B_QUADS + WIDE // 8 + x)
        for i in ti.static(range(4)):
            for j in ti.static(range(4)):
                upper_left[i, j] += upper[i] * left[j]
                upper_right[i, j] += upper[i] * right[j]
                lower_left[i, j] += lower[i] * left[j]
                lower_right[i, j] += lower[i] * right[j]


@ti.func
def stage_rows(a: ti.template(), terms: ti.template(), thread: ti.i32):
    store_quad(a, thread % DEPTH * A_QUADS + thread // DEPTH, terms, 0)


@ti.func
def stage_columns(b: ti.template(), terms: ti.template(), thread: ti.i32):
    at = thread % DEPTH * B_QUADS + thread // DEPTH
    store_quad(b, at, terms, 0)
    store_quad(b, at + WIDE // 8, terms, 4)


@ti.func
def stage_rows_of_terms(a: ti.template(), terms: ti.template(), thread: ti.i32):
    store_quad(a, thread // 16 * A_QUADS + thread % 16, terms, 0)


@ti.func
def stage_columns_of_terms(b: ti.template(), terms: ti.template(), thread: ti.i32):
    at = thread // 16 * B_QUADS + thread % 16
    store_quad(b, at, terms, 0)
    store_quad(b, at + WIDE // 8, terms, 4)


@ti.func
def load_columns(terms: ti.template(), array: ti.template(), at: ti.i32, room: ti.i32):
    """Of one term: four neighbouring numbers, and four 64 further, as many as there are."""
    if room >= WIDE // 2 + 4:
        for i in ti.static(range(4)):
            terms[i] = array[at + i]
            terms[4 + i] = array[at + WIDE // 2 + i]
    else:
        for i in ti.static(range(4)):
            if i < room:
                terms[i] = array[at + i]
            if i + WIDE // 2 < room:
                terms[4 + i] = array[at + WIDE // 2 + i]


@ti.func
def far_e(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    sealed: ti.template(),
    scratch: ti.template(),
    rows: ti.i32,
):
    """Landmark logits of the keys that the call evicts. Rows are landmarks, columns evictors."""
    ti.loop_config(block_dim=THREADS)
    for i in range(count):
        a = shared((SHARED // 4,), QUAD) if ti.static(has_quads()) else shared((SHARED,), ti.f32)
        b = shared((SHARED // 4,), QUAD) if ti.static(has_quads()) else shared((SHARED,), ti.f32)
        g = sizes_of(sizes)
        thread = i % THREADS
        workgroup = i // THREADS
        tiles = (g.landmark_rows + TILE - 1) // TILE
        wides = (rows + WIDE - 1) // WIDE
        group = workgroup // (tiles * wides)
        top = workgroup % tiles * TILE
        start = workgroup // tiles % wides * WIDE
        ring = ring_of(meta, g, group)
        x = thread % 16
        y = thread // 16
        if evictor_of(ring, 0) < ti.min(rows, start + WIDE):
            queries = ti.Vector.zero(ti.i32, 4)
            keys = ti.Vector.zero(ti.i32, 8)
            for e in ti.static(range(4)):
                at = top + (thread // DEPTH + 16 * (e // 4)) * 4 + e % 4
                at = group * g.landmark_rows + ti.min(at, g.landmark_rows - 1)
                queries[e] = g.q_landmarks + at * g.head_dim
            for e in ti.static(range(8)):
                row = start + (thread // DEPTH + 16 * (e // 4)) * 4 + e % 4
                key = ti.max(evicted_by(ring, ti.min(row, rows - 1)), 0)
                keys[e] = key_at(g, group, g.landmarks + g.sinks + key)
            upper_left = ti.Matrix.zero(ti.f32, 4, 4)
            upper_right = ti.Matrix.zero(ti.f32, 4, 4)
            lower_left = ti.Matrix.zero(ti.f32, 4, 4)
            lower_right = ti.Matrix.zero(ti.f32, 4, 4)
            slices = (g.head_dim + DEPTH - 1) // DEPTH
            for j in range(slices + 1):
                left = ti.Vector.zero(ti.f32, 4)
                right = ti.Vector.zero(ti.f32, 8)
                t = j * DEPTH + thread % DEPTH
                if t < g.head_dim:
                    for e in ti.static(range(4)):
                        left[e] = sealed[queries[e] + t]
                    for e in ti.static(range(8)):
                        right[e] = scratch[keys[e] + t]
                if j > 0:
                    add_staged(upper_left, upper_right, lower_left, lower_right, a, b, y, x)
                ti.simt.block.sync()
                stage_rows(a, left, thread)
                stage_columns(b, right, thread)
                ti.simt.block.sync()
            high = top + y * 4
            low = high + TILE // 2
            row = start + x * 4
            far = row + WIDE // 2
            put_far_logits(g, ring, scratch, upper_left, group, high, row, rows)
            put_far_logits(g, ring, scratch, upper_right, group, high, far, rows)
            put_far_logits(g, ring, scratch, lower_left, group, low, row, rows)
            put_far_logits(g, ring, scratch, lower_right, group, low, far, rows)


@ti.func
def far_sums(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    scratch: ti.template(),
    rows: ti.i32,
):
    """The numerator that each block adds. Rows are landmarks, columns elements of values."""
    ti.loop_config(block_dim=THREADS)
    for i in range(count):
        a = shared((SHARED // 4,), QUAD) if ti.static(has_quads()) else shared((SHARED,), ti.f32)
        b = shared((SHARED // 4,), QUAD) if ti.static(has_quads()) else shared((SHARED,), ti.f32)
        g = sizes_of(sizes)
        thread = i % THREADS
        workgroup = i // THREADS
        tiles = (g.landmark_rows + TILE - 1) // TILE
        wides = (g.value_dim + WIDE - 1) // WIDE
        blocks = (rows + TILE - 1) // TILE
        top = workgroup % tiles * TILE
        column = workgroup // tiles % wides * WIDE
        block = workgroup // (tiles * wides) % blocks
        group = workgroup // (tiles * wides * blocks)
        ring = ring_of(meta, g, group)
        start = ti.max(block * TILE, evictor_of(ring, 0))
        end = ti.min(rows, block * TILE + TILE)
        x = thread % 16
        y = thread // 16
        if start < end:
            weights = ti.Vector.zero(ti.i32, 4)
            for e in ti.static(range(4)):
                at = top + (thread // DEPTH + 16 * (e // 4)) * 4 + e % 4
                at = group * g.landmark_rows + ti.min(at, g.landmark_rows - 1)
                weights[e] = far_weights_at(g, at)
            t = column + thread % 16 * 4
            upper_left = ti.Matrix.zero(ti.f32, 4, 4)
            upper_right = ti.Matrix.zero(ti.f32, 4, 4)
            lower_left = ti.Matrix.zero(ti.f32, 4, 4)
            lower_right = ti.Matrix.zero(ti.f32, 4, 4)
            slices = (end - start + DEPTH - 1) // DEPTH
            for j in range(slices + 1):
                left = ti.Vector.zero(ti.f32, 4)
                right = ti.Vector.zero(ti.f32, 8)
                row = start + j * DEPTH + thread % DEPTH
                if row < end:
                    for e in ti.static(range(4)):
                        left[e] = scratch[weights[e] + row]
                row = start + j * DEPTH + thread // 16
                if row < end:
                    at = value_at(g, group, g.sinks + evicted_by(ring, row)) + t
                    load_columns(right, scratch, at, g.value_dim - t)
                if j > 0:
                    add_staged(upper_left, upper_right, lower_left, lower_right, a, b, y, x)
                ti.simt.block.sync()
                stage_rows(a, left, thread)
                stage_columns_of_terms(b, right, thread)
                ti.simt.block.sync()
            high = top + y * 4
            low = high + TILE // 2
            to = column + x * 4
            far = to + WIDE // 2
            put_numerators(g, scratch, upper_left, block, group, high, to)
            put_numerators(g, scratch, upper_right, block, group, high, far)
            put_numerators(g, scratch, lower_left, block, group, low, to)
            put_numerators(g, scratch, lower_right, block, group, low, far)


@ti.func
def attend_logits(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    scratch: ti.template(),
    q: ti.template(),
    first_row: ti.i32,
    rows: ti.i32,
):
    """Logits of the rows with landmark keys, sinks, and the keys in reach of their tile."""
    ti.loop_config(block_dim=THREADS)
    for i in range(count):
        a = shared((SHARED // 4,), QUAD) if ti.static(has_quads()) else shared((SHARED,), ti.f32)
        b = shared((SHARED // 4,), QUAD) if ti.static(has_quads()) else shared((SHARED,), ti.f32)
        g = sizes_of(sizes)
        thread = i % THREADS
        workgroup = i // THREADS
        each = head_rows(rows)
        tiles = (g.heads * each + TILE - 1) // TILE
        wides = (g.stride + WIDE - 1) // WIDE
        first = workgroup % wides * WIDE
        tile = workgroup // wides % tiles
        group = workgroup // (wides * tiles)
        ring = ring_of(meta, g, group)
        start = start_of(ring, tile, rows)
        end = end_of(g, ring, tile, rows)
        # Rows are neighbours in what is written, so threads are too.
        y = thread % 8
        x = thread // 8
        if first < end:
            query_rows = ti.Vector.zero(ti.i32, 4)
            query_heads = ti.Vector.zero(ti.i32, 4)
            keys = ti.Vector.zero(ti.i32, 8)
            for e in ti.static(range(4)):
                query = tile * TILE + (thread // DEPTH + 16 * (e // 4)) * 4 + e % 4
                query = ti.min(query, g.heads * each - 1)
                query_rows[e] = first_row + ti.min(query % each, rows - 1)
                query_heads[e] = group * g.heads + query // each
            for e in ti.static(range(8)):
                number = first + (thread // DEPTH + 16 * (e // 4)) * 4 + e % 4
                number = ti.min(number, end - 1)
                if number >= g.landmarks + g.sinks:
                    number += start
                keys[e] = key_at(g, group, number)
            upper_left = ti.Matrix.zero(ti.f32, 4, 4)
            upper_right = ti.Matrix.zero(ti.f32, 4, 4)
            lower_left = ti.Matrix.zero(ti.f32, 4, 4)
            lower_right = ti.Matrix.zero(ti.f32, 4, 4)
            slices = (g.head_dim + DEPTH - 1) // DEPTH
            for j in range(slices + 1):
                left = ti.Vector.zero(ti.f32, 4)
                right = ti.Vector.zero(ti.f32, 8)
                t = j * DEPTH + thread % DEPTH
                if t < g.head_dim:
                    for e in ti.static(range(4)):
                        left[e] = q[query_rows[e], query_heads[e], t]
                    for e in ti.static(range(8)):
                        right[e] = scratch[keys[e] + t]
                if j > 0:
                    add_staged(upper_left, upper_right, lower_left, lower_right, a, b, y, x)
                ti.simt.block.sync()
                stage_rows(a, left, thread)
                stage_columns(b, right, thread)
                ti.simt.block.sync()
            weights = tile_weights_at(g, group, tile, rows)
            row = y * 4
            low = row + TILE // 2
            column = first + x * 4
            far = column + WIDE // 2
            put_logits(g, scratch, upper_left, weights, row, column, end)
            put_logits(g, scratch, upper_right, weights, row, far, end)
            put_logits(g, scratch, lower_left, weights, low, column, end)
            put_logits(g, scratch, lower_right, weights, low, far, end)


@ti.func
def attend(
    count: ti.template(),
    sizes: ti.template(),
    meta: ti.template(),
    scratch: ti.template(),
    out: ti.template(),
    first_row: ti.i32,
    rows: ti.i32,
):
    """Weights times values."""
    ti.loop_config(block_dim=THREADS)
    for i in range(count):
        a = shared((SHARED // 4,), QUAD) if ti.static(has_quads()) else shared((SHARED,), ti.f32)
        b = shared((SHARED // 4,), QUAD) if ti.static(has_quads()) else shared((SHARED,), ti.f32)
        g = sizes_of(sizes)
        thread = i % THREADS
        workgroup = i // THREADS
        each = head_rows(rows)
        tiles = (g.heads * each + TILE - 1) // TILE
        wides = (g.value_dim + WIDE - 1) // WIDE
        left_column = workgroup % wides * WIDE
        tile = workgroup // wides % tiles
        group = workgroup // (wides * tiles)
        ring = ring_of(meta, g, group)
        start = start_of(ring, tile, rows)
        end = end_of(g, ring, tile, rows)
        x = thread % 16
        y = thread // 16
        # What a thread stages of a term: four rows, which have a share each, and eight columns.
        query = tile * TILE + thread % 16 * 4
        weights = tile_weights_at(g, group, tile, rows) + thread % 16 * 4
        shares = ti.Vector.zero(ti.f32, 4)
        for e in ti.static(range(4)):
            shares[e] = scratch[share_at(g, group, tile, rows) + thread % 16 * 4 + e]
        t = left_column + thread % 16 * 4
        upper_left = ti.Matrix.zero(ti.f32, 4, 4)
        upper_right = ti.Matrix.zero(ti.f32, 4, 4)
        lower_left = ti.Matrix.zero(ti.f32, 4, 4)
        lower_right = ti.Matrix.zero(ti.f32, 4, 4)
        slices = (end - g.landmarks + DEPTH - 1) // DEPTH
        for j in range(slices + 1):
            left = ti.Vector.zero(ti.f32, 4)
            right = ti.Vector.zero(ti.f32, 8)
            number = j * DEPTH + thread // 16
            column = g.landmarks + number
            if column < end:
                for r in ti.static(range(4)):
                    left[r] = scratch[weights + column * TILE + r] * shares[r]
                if number >= g.sinks:
                    number += start
                at = value_at(g, group, number) + t
                load_columns(right, scratch, at, g.value_dim - t)
            if j > 0:
                add_staged(upper_left, upper_right, lower_left, lower_right, a, b, y, x)
            ti.simt.block.sync()
            stage_rows_of_terms(a, left, thread)
            stage_columns_of_terms(b, right, thread)
            ti.simt.block.sync()
        # Each head has far numerators of its own: the rows of other heads weigh them with 0.
        first_head = tile * TILE // each
        a_head = (g.landmarks + DEPTH - 1) // DEPTH
        slices = 0
        if gone(ring, last_row_of(tile, rows)) > 0:
            last_head = (ti.min(tile * TILE + TILE, g.heads * each) - 1) // each
            slices = a_head * (last_head - first_head + 1)
        block = first_row_of(tile, rows) // TILE
        for j in range(slices):
            head = first_head + j // a_head
            left = ti.Vector.zero(ti.f32, 4)
            right = ti.Vector.zero(ti.f32, 8)
            landmark = j % a_head * DEPTH + thread // 16
            if landmark < g.landmarks:
                for r in ti.static(range(4)):
                    if (query + r) // each == head:
                        at = weights + landmark * TILE + r
                        left[r] = scratch[at] * shares[r]
                landmark_row = group * g.landmark_rows + head * g.landmarks + landmark
                at = numerator_at(g, block, landmark_row) + t
                load_columns(right, scratch, at, g.value_dim - t)
            ti.simt.block.sync()
            stage_rows_of_terms(a, left, thread)
            stage_columns_of_terms(b, right, thread)
            ti.simt.block.sync()
            add_staged(upper_left, upper_right, lower_left, lower_right, a, b, y, x)
        high = tile * TILE + y * 4
        low = high + TILE // 2
        to = left_column + x * 4
        far = to + WIDE // 2
        put_out(g, out, upper_left, group, high, to, first_row, rows)
        put_out(g, out, upper_right, group, high, far, first_row, rows)
        put_out(g, out, lower_left, group, low, to, first_row, rows)
        put_out(g, out, lower_right, group, low, far, first_row, rows)
