"""The matrix products on CPUs: rows in parallel, and inner loops over neighbouring numbers.

Sixteen sums side by side let the compiler use vector registers, which it may not for a single one,
since that would change its order.
"""

from o1core_taichi.common import (
    TILE,
    commit,
    evictor_of,
    far_logits_at,
    far_weights_at,
    first_row_of,
    gone,
    gone_by,
    head_rows,
    k_landmark_at,
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
from o1core_taichi.language import ti

WIDTH = 16
"""Sums side by side."""

row_weights = make_row_weights(False, 1)


@ti.func
def weights_at(g: ti.template(), group: ti.i32, query: ti.i32, rows: ti.i32) -> ti.i32:
    """The columns of a query: landmarks, sinks, keys from the first that its tile sees."""
    return g.weights + (group * g.heads * head_rows(rows) + query) * g.stride


@ti.func
def share_at(g: ti.template(), group: ti.i32, query: ti.i32, rows: ti.i32) -> ti.i32:
    return g.shares + group * g.heads * head_rows(rows) + query


@ti.func
def element(array: ti.template(), at: ti.i32, head: ti.i32, t: ti.i32) -> ti.f32:
    """Of an array whose rows begin at `at`, or of rows of the caller's."""
    x = 0.0
    if ti.static(len(array.shape) == 3):  # noqa: SIM108 - the other does not compile
        x = array[at, head, t]
    else:
        x = array[at + t]
    return x


@ti.func
def dot(
    a: ti.template(),
    a_at: ti.i32,
    a_head: ti.i32,
    b: ti.template(),
    b_at: ti.i32,
    b_head: ti.i32,
    width: ti.i32,
) -> ti.f32:
    sums = ti.Vector.zero(ti.f32, WIDTH)
    for j in range(width // WIDTH):
        for x in ti.static(range(WIDTH)):
            t = j * WIDTH + x
            sums[x] += element(a, a_at, a_head, t) * element(b, b_at, b_head, t)
    total = sums.sum()
    for t in range(width // WIDTH * WIDTH, width):
        total += element(a, a_at, a_head, t) * element(b, b_at, b_head, t)
    return total


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
    """Landmark logits of the keys that the call evicts."""
    for x in range(count):
        g = sizes_of(sizes)
        group = x // g.landmark_rows
        ring = ring_of(meta, g, group)
        query = g.q_landmarks + x * g.head_dim
        to = far_logits_at(g, x)
        end = gone_by(ring, rows)
        to += evictor_of(ring, 0)
        for key in range(ti.min(end, ring.length)):
            at = ring_k_at(g, group, slot_of(ring, key))
            scratch[to + key] = dot(sealed, query, 0, state, at, 0, g.head_dim) * g.scale
        for key in range(ring.length, ti.max(end, ring.length)):
            row = first_row + key - ring.length
            scratch[to + key] = dot(sealed, query, 0, k, row, group, g.head_dim) * g.scale


@ti.func
def summed(
    g: ti.template(),
    ring: ti.template(),
    state: ti.template(),
    scratch: ti.template(),
    v: ti.template(),
    x: ti.i32,
    first: ti.i32,
    end: ti.i32,
    first_row: ti.i32,
    t: ti.i32,
    width: ti.template(),
):
    """So many neighbouring elements of a block's numerator, from t on."""
    group = x // g.landmark_rows
    weights = far_weights_at(g, x) + evictor_of(ring, 0)
    sums = ti.Vector.zero(ti.f32, width)
    for key in range(first, ti.min(end, ring.length)):
        weight = scratch[weights + key]
        value = ring_v_at(g, group, slot_of(ring, key)) + t
        for j in ti.static(range(width)):
            sums[j] += weight * state[value + j]
    for key in range(ti.max(first, ring.length), end):
        weight = scratch[weights + key]
        row = first_row + key - ring.length
        for j in ti.static(range(width)):
            sums[j] += weight * v[row, group, t + j]
    return sums


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
    """The numerator that each block adds."""
    for x in range(count):
        g = sizes_of(sizes)
        ring = ring_of(meta, g, x // g.landmark_rows)
        for block in range((rows + TILE - 1) // TILE):
            to = numerator_at(g, block, x)
            first = gone_by(ring, block * TILE)
            end = gone_by(ring, ti.min(rows, block * TILE + TILE))
            for i in range(g.value_dim // WIDTH):
                t = i * WIDTH
                sums = summed(g, ring, state, scratch, v, x, first, end, first_row, t, WIDTH)
                for j in ti.static(range(WIDTH)):
                    scratch[to + t + j] = sums[j]
            for t in range(g.value_dim // WIDTH * WIDTH, g.value_dim):
                one = summed(g, ring, state, scratch, v, x, first, end, first_row, t, 1)
                scratch[to + t] = one[0]


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
    """Logits of the rows with sinks, with the keys of their window, and with landmark keys."""
    for i in range(count):
        g = sizes_of(sizes)
        row = i % rows
        head = i // rows
        group = head // g.heads
        query = head % g.heads * head_rows(rows) + row
        tile = query // TILE
        to = weights_at(g, group, query, rows)
        ring = ring_of(meta, g, group)
        evicted = gone(ring, row)
        q_row = first_row + row
        if evicted > 0:
            for b in range(g.landmarks):
                at = k_landmark_at(g, group, b)
                scratch[to + b] = dot(q, q_row, head, sealed, at, 0, g.head_dim) * g.scale
        to += g.landmarks
        for c in range(g.sinks):
            at = sink_k_at(g, group, c)
            scratch[to + c] = dot(q, q_row, head, sealed, at, 0, g.head_dim) * g.scale
        near = to + g.sinks - start_of(ring, tile, rows)
        for key in range(evicted, ti.max(evicted, ring.length)):
            at = ring_k_at(g, group, slot_of(ring, key))
            scratch[near + key] = dot(q, q_row, head, state, at, 0, g.head_dim) * g.scale
        for key in range(ti.max(evicted, ring.length), ring.length + row + 1):
            k_row = first_row + key - ring.length
            scratch[near + key] = dot(q, q_row, head, k, k_row, group, g.head_dim) * g.scale


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
    for i in range(count):
        g = sizes_of(sizes)
        row = i % rows
        head = i // rows
        query = head % g.heads * head_rows(rows) + row
        at = weights_at(g, head // g.heads, query, rows)
        share = share_at(g, head // g.heads, query, rows)
        store = g.landmark_store + i * 3 * g.landmarks
        row_weights(
            g,
            meta,
            sealed,
            scratch,
            scratch,
            scratch,
            scratch,
            at,
            share,
            store,
            0,
            1,
            0,
            1,
            query // TILE,
            head,
            row,
            1,
            rows,
        )


@ti.func
def weighted(
    g: ti.template(),
    ring: ti.template(),
    state: ti.template(),
    sealed: ti.template(),
    scratch: ti.template(),
    v: ti.template(),
    head: ti.i32,
    row: ti.i32,
    first_row: ti.i32,
    rows: ti.i32,
    t: ti.i32,
    width: ti.template(),
):
    """So many neighbouring elements of a row's result, from t on."""
    group = head // g.heads
    query = head % g.heads * head_rows(rows) + row
    tile = query // TILE
    at = weights_at(g, group, query, rows)
    start = start_of(ring, tile, rows)
    sinks = at + g.landmarks
    near = sinks + g.sinks - start
    sums = ti.Vector.zero(ti.f32, width)
    for c in range(g.sinks):
        weight = scratch[sinks + c]
        value = sink_v_at(g, group, c) + t
        for x in ti.static(range(width)):
            sums[x] += weight * sealed[value + x]
    for key in range(start, ti.max(start, ring.length)):
        weight = scratch[near + key]
        value = ring_v_at(g, group, slot_of(ring, key)) + t
        for x in ti.static(range(width)):
            sums[x] += weight * state[value + x]
    for key in range(ti.max(start, ring.length), ring.length + row + 1):
        weight = scratch[near + key]
        v_row = first_row + key - ring.length
        for x in ti.static(range(width)):
            sums[x] += weight * v[v_row, group, t + x]
    # Before the first key is evicted there are no far numerators.
    if gone(ring, row) > 0:
        block = first_row_of(tile, rows) // TILE
        for b in range(g.landmarks):
            weight = scratch[at + b]
            value = numerator_at(g, block, head * g.landmarks + b) + t
            for x in ti.static(range(width)):
                sums[x] += weight * scratch[value + x]
    share = scratch[share_at(g, group, query, rows)]
    for x in ti.static(range(width)):
        sums[x] *= share
    return sums


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
    for i in range(count):
        g = sizes_of(sizes)
        row = i % rows
        head = i // rows
        ring = ring_of(meta, g, head // g.heads)
        to = first_row + row
        for j in range(g.value_dim // WIDTH):
            t = j * WIDTH
            sums = weighted(
                g, ring, state, sealed, scratch, v, head, row, first_row, rows, t, WIDTH
            )
            for x in ti.static(range(WIDTH)):
                out[to, head, t + x] = sums[x]
        for t in range(g.value_dim // WIDTH * WIDTH, g.value_dim):
            one = weighted(g, ring, state, sealed, scratch, v, head, row, first_row, rows, t, 1)
            out[to, head, t] = one[0]


@ti.func
def commit_all(
    count: ti.template(),
    sizes: ti.template(),
    meta_in: ti.template(),
    state: ti.template(),
    meta_out: ti.template(),
    next_state: ti.template(),
    held: ti.template(),
    k: ti.template(),
    v: ti.template(),
    first_row: ti.i32,
    rows: ti.i32,
):
    """ring_commit and meta."""
    for item in range(count):
        commit(sizes, meta_in, state, meta_out, next_state, held, k, v, 0, 1, item, first_row, rows)
