// The kernels of the operator (docs/operator.md sections 3 to 6) for n rows of a call at once.
//
// Names: G groups, H heads a group, d and dv the widths, S sinks, W the ring's slots, w the group's
// window, m landmarks. The keys of a group are numbered: those of the ring, oldest first, then the
// rows of the call. Row i sees the last w of them up to itself; those before number `gone(i)` are
// evicted by then. The first key has number `pad`, 0 to 3, so that the rows begin at a multiple of
// four: four neighbours then always lie in one buffer.
//
// Evicted keys go far in blocks of 64. A tile of rows reads the far sums as they are before its first
// row's block, and the keys evicted since then one by one; so all rows are computed together.
//
//     far_e         landmark logits of the evicted keys, and the largest of each block
//     far_sums      what each block adds to the far sums
//     far_commit    running sums over the blocks; the last are the layer's new state
//     attend_logits, attend_weights, attend      the rows: logits, softmax, values
//     ring_commit, meta                          the rest of the state
//
// The matrix products make tiles of 32 x 64 results, a workgroup each, from slices of 32 terms that
// are staged in workgroup memory. Rows of a tile are queries of one head, or of several where a call
// has less than 32 rows: all heads of a group share its keys.
//
// Every loop around a barrier has bounds that are equal in the whole workgroup.

const BLOCK = 64u;      // evicted keys that go far together
const ROWS = 32u;       // of a tile
const COLUMNS = 64u;    // of a tile
const DEPTH = 32u;      // terms staged at a time
const BAND = 100u;      // numbers that a tile of rows spans beyond W, at most

const LOWEST = -3.0e38;
const FLOOR = 1e-30;
const LOG2_E = 1.44269504;
const LN2 = 0.69314718;
// ln 2 in two parts, the first of so few bits that its product with a small integer is exact.
const LN2_HIGH = 0.693359375;
const LN2_LOW = -2.12194440e-4;

struct Call {
    heads_per_group: u32,
    landmarks: u32,
    ring: u32,
    sinks_rectifier: u32,   // bits 0..7 sinks, bit 8 the rectifier fm, bits 9.. the sinks beyond 255
    head_dim: u32,
    value_dim: u32,
    scale: f32,
    rows: u32,              // n
    heads: u32,             // G * H
    groups: u32,
    first_row: u32,         // of the n rows, in q, k, v and out
    unused: u32,
}

@group(0) @binding(0) var<storage, read_write> group_meta: array<u32>;
@group(0) @binding(1) var<storage, read_write> ring_k: array<f32>;
@group(0) @binding(2) var<storage, read_write> ring_v: array<f32>;
@group(0) @binding(3) var<storage, read> sink_k: array<f32>;
@group(0) @binding(4) var<storage, read> sink_v: array<f32>;
@group(0) @binding(5) var<storage, read> k_landmarks: array<f32>;
@group(0) @binding(6) var<storage, read> q_landmarks: array<f32>;
@group(0) @binding(7) var<storage, read> mixing: array<f32>;
@group(0) @binding(8) var<storage, read_write> far_max_mass: array<f32>;
@group(0) @binding(9) var<storage, read_write> far_num: array<f32>;
@group(0) @binding(10) var<storage, read> q: array<f32>;
@group(0) @binding(11) var<storage, read> k: array<f32>;
@group(0) @binding(12) var<storage, read> v: array<f32>;
@group(0) @binding(13) var<storage, read_write> scratch: array<f32>;
@group(0) @binding(14) var<storage, read_write> result: array<f32>;
@group(0) @binding(15) var<uniform> call: Call;

// Where a group's ring stands before the call, and the number of its first key.
struct Ring {
    length: u32,
    head: u32,
    far: u32,
    window: u32,
    pad: u32,
}

var<workgroup> shared_ring: Ring;

fn stored_ring(group: u32) -> Ring {
    let at = group * 4u;
    let length = group_meta[at];
    let window = select(group_meta[at + 3u], call.ring, group_meta[at + 3u] == 0u);
    return Ring(length, group_meta[at + 1u], group_meta[at + 2u], window, (4u - (length & 3u)) & 3u);
}

// The same, known to be equal in the whole workgroup; a barrier.
fn ring_of(group: u32, thread: u32) -> Ring {
    if (thread == 0u) {
        shared_ring = stored_ring(group);
    }
    return workgroupUniformLoad(&shared_ring);
}

// The number of the first key that is still live once `rows` rows were pushed.
fn gone_by(ring: Ring, rows: u32) -> u32 {
    let held = ring.length + rows;
    return ring.pad + select(0u, held - ring.window, held > ring.window);
}

fn gone(ring: Ring, row: u32) -> u32 {
    return gone_by(ring, row + 1u);
}

// The number of the first row.
fn row_key(ring: Ring) -> u32 {
    return ring.pad + ring.length;
}

fn sinks() -> u32 {
    return (call.sinks_rectifier & 255u) | ((call.sinks_rectifier >> 9u) << 8u);
}

// Columns of the sinks: a multiple of four.
fn sink_columns() -> u32 {
    return (sinks() + 3u) & ~3u;
}

fn clamps_weights() -> bool {
    return (call.sinks_rectifier & 256u) != 0u;
}

// exp of what is at most 0, up to rounding.
fn decay(x: f32) -> f32 {
    return exp(clamp(x, -200.0, 0.0));
}

fn decays(x: vec4<f32>) -> vec4<f32> {
    return exp(clamp(x, vec4<f32>(-200.0), vec4<f32>()));
}

// Scratch ----------------------------------------------------------------------------------------
//
// [n+3, G, H*m] twice   by key: landmark logits of the evicted ones, and the largest up to each in
//                       its block
// [G, H*m] twice        far maximum and mass before the call
// [blocks, G, H*m] thrice   the mass of a block; the running maximum and mass before it
// [blocks, G, H*m, dv]  the numerator of a block, then the running one before it
// [G, H*rows, stride]   logits of the rows, then their weights: sinks, keys, landmarks

fn landmark_rows() -> u32 {
    return call.heads_per_group * call.landmarks;
}

// Numbers that evicted keys can have, and their blocks.
fn old_keys() -> u32 {
    return call.rows + 3u;
}

fn blocks() -> u32 {
    return (old_keys() + BLOCK - 1u) / BLOCK;
}

// One number for each landmark row of each group.
fn plane() -> u32 {
    return call.groups * landmark_rows();
}

fn far_logit_at(group: u32, key: u32, row: u32) -> u32 {
    return key * plane() + group * landmark_rows() + row;
}

fn far_peak_at(group: u32, key: u32, row: u32) -> u32 {
    return (old_keys() + key) * plane() + group * landmark_rows() + row;
}

const BEFORE_MAX = 0u;
const BEFORE_MASS = 1u;

fn before_at(kind: u32, group: u32, row: u32) -> u32 {
    return (2u * old_keys() + kind) * plane() + group * landmark_rows() + row;
}

const BLOCK_MASS = 0u;
const RUNNING_MAX = 1u;
const RUNNING_MASS = 2u;

fn block_at(kind: u32, block: u32, group: u32, row: u32) -> u32 {
    return (2u * old_keys() + 2u + kind * blocks() + block) * plane()
        + group * landmark_rows() + row;
}

fn numerator_at(block: u32, group: u32, row: u32) -> u32 {
    return (2u * old_keys() + 2u + 3u * blocks()) * plane()
        + (block * plane() + group * landmark_rows() + row) * call.value_dim;
}

fn weight_at(group: u32, row: u32) -> u32 {
    let stride = sink_columns() + call.ring + BAND + call.landmarks;
    return (2u * old_keys() + 2u + (3u + call.value_dim) * blocks()) * plane()
        + (group * all_rows() + row) * stride;
}

// Rows that a head takes up among the rows of tiles: tiles of long calls belong to one head.
fn head_rows() -> u32 {
    return select((call.rows + ROWS - 1u) / ROWS * ROWS, call.rows, call.rows < ROWS);
}

fn all_rows() -> u32 {
    return call.heads_per_group * head_rows();
}

// What the rows of a tile have in common.
struct Span {
    last_row: u32,      // of the call
    first_head: u32,
    last_head: u32,
    block: u32,         // whose running far sums they read
    start: u32,         // its first key
    keys: u32,          // columns for keys, from that one on
}

fn span_of(tile: u32, ring: Ring) -> Span {
    let each = head_rows();
    let first = tile * ROWS;
    let last = min(first + ROWS, all_rows()) - 1u;
    let heads = vec2<u32>(first, last) / each;
    var rows = vec2<u32>(0u, call.rows - 1u);
    if (call.rows >= ROWS) {
        rows = vec2<u32>(first % each, min(last % each, call.rows - 1u));
    }
    let block = gone(ring, rows.x) / BLOCK;
    let start = block * BLOCK;
    let keys = (row_key(ring) + rows.y + 1u - start + 3u) & ~3u;
    return Span(rows.y, heads.x, heads.y, block, start, keys);
}

// Sources ----------------------------------------------------------------------------------------
//
// Keys and values lie in several buffers. A place is an element of one of them, with the buffer's
// number in the two highest bits; nothing bound is larger than 2^30 elements.

const FROM_SINKS = 0u;
const FROM_RING = 0x40000000u;
const FROM_ROWS = 0x80000000u;
const FROM_LANDMARKS = 0xc0000000u;
const PLACE = 0x3fffffffu;
const QUAD = vec4<u32>(0u, 1u, 2u, 3u);

// The slots of keys by their age; a remainder would cost more than the rest.
fn slots(ring: Ring, age: vec4<u32>) -> vec4<u32> {
    let slot = ring.head + age;
    return select(slot, slot - ring.window, slot >= vec4<u32>(ring.window));
}

// The places of four neighbouring keys or values, the first a multiple of four; where there is none,
// that of another.
fn places(group: u32, ring: Ring, first: u32, width: u32) -> vec4<u32> {
    let key = first + QUAD;
    if (first < row_key(ring)) {
        let age = max(key, vec4<u32>(ring.pad)) - ring.pad;
        return FROM_RING + (group * call.ring + slots(ring, age)) * width;
    }
    let row = min(key - row_key(ring), vec4<u32>(call.rows - 1u));
    return FROM_ROWS + ((call.first_row + row) * call.groups + group) * width;
}

// The place of one.
fn place(group: u32, ring: Ring, key: u32, width: u32) -> u32 {
    if (key < row_key(ring)) {
        let slot = ring.head + max(key, ring.pad) - ring.pad;
        let wrapped = select(slot, slot - ring.window, slot >= ring.window);
        return FROM_RING + (group * call.ring + wrapped) * width;
    }
    let row = min(key - row_key(ring), call.rows - 1u);
    return FROM_ROWS + ((call.first_row + row) * call.groups + group) * width;
}

// Tiles ------------------------------------------------------------------------------------------

// A thread makes 8 x 8 results of the tile's 32 x 64: rows 4y to 4y+3 and 16 further down, columns 4x
// to 4x+3 and 32 further right. Two halves of the workgroup do so, with half of the terms each, and
// join them at the end: small calls have few tiles, and need the threads. The arrays hold four rows
// (columns) of one term in a vec4; padding spreads the stores over the memory banks. Everything is
// written out, since registers cannot be indexed by a loop's variable.
const STRIDE_A = 9u;
const STRIDE_B = 17u;
var<workgroup> tile_a: array<vec4<f32>, 288>;
var<workgroup> tile_b: array<vec4<f32>, 544>;

struct Row {
    left: vec4<f32>,
    right: vec4<f32>,
}

struct Sums {
    row0: Row,
    row1: Row,
    row2: Row,
    row3: Row,
    row4: Row,
    row5: Row,
    row6: Row,
    row7: Row,
}

fn add_to_row(row: Row, a: f32, b: Row) -> Row {
    return Row(row.left + a * b.left, row.right + a * b.right);
}

fn add_term(sums: Sums, at_a: u32, at_b: u32) -> Sums {
    let upper = tile_a[at_a];
    let lower = tile_a[at_a + 4u];
    let b = Row(tile_b[at_b], tile_b[at_b + 8u]);
    return Sums(
        add_to_row(sums.row0, upper.x, b),
        add_to_row(sums.row1, upper.y, b),
        add_to_row(sums.row2, upper.z, b),
        add_to_row(sums.row3, upper.w, b),
        add_to_row(sums.row4, lower.x, b),
        add_to_row(sums.row5, lower.y, b),
        add_to_row(sums.row6, lower.z, b),
        add_to_row(sums.row7, lower.w, b),
    );
}

// Adds the staged terms of a thread's half; threads without results pass `terms` 0.
fn add_staged(start: Sums, thread: u32, terms: u32) -> Sums {
    let half = thread / 32u * 16u;
    let a = half * STRIDE_A + thread / 8u % 4u;
    let b = half * STRIDE_B + thread % 8u;
    var sums = start;
    for (var i = 0u; i < terms; i += 2u) {
        sums = add_term(sums, i * STRIDE_A + a, i * STRIDE_B + b);
        sums = add_term(sums, (i + 1u) * STRIDE_A + a, (i + 1u) * STRIDE_B + b);
    }
    return sums;
}

// Four rows of results: the first half of the workgroup has the upper ones, the second the lower.
struct Rows {
    row0: Row,
    row1: Row,
    row2: Row,
    row3: Row,
}

fn put_row(at: u32, row: Row) {
    tile_b[at] = row.left;
    tile_b[at + 32u] = row.right;
}

fn add_row(at: u32, row: Row) -> Row {
    return Row(row.left + tile_b[at], row.right + tile_b[at + 32u]);
}

// The results of both halves, added up.
fn joined(sums: Sums, thread: u32) -> Rows {
    let upper = thread < 32u;
    var own = Rows(sums.row0, sums.row1, sums.row2, sums.row3);
    var other = Rows(sums.row4, sums.row5, sums.row6, sums.row7);
    if (!upper) {
        own = Rows(sums.row4, sums.row5, sums.row6, sums.row7);
        other = Rows(sums.row0, sums.row1, sums.row2, sums.row3);
    }
    let to = thread % 32u + select(0u, 256u, upper);
    workgroupBarrier();
    put_row(to, other.row0);
    put_row(to + 64u, other.row1);
    put_row(to + 128u, other.row2);
    put_row(to + 192u, other.row3);
    workgroupBarrier();
    let at = thread % 32u + select(256u, 0u, upper);
    return Rows(add_row(at, own.row0), add_row(at + 64u, own.row1),
                add_row(at + 128u, own.row2), add_row(at + 192u, own.row3));
}

// Of the tile, where a thread's four rows and its columns begin.
fn first_row_of(thread: u32) -> u32 {
    return thread / 8u * 4u;
}

fn first_column_of(thread: u32) -> u32 {
    return thread % 8u * 4u;
}

// Terms that a thread adds at a time: its half of them, or none where the tile ends before it.
fn terms_of(thread: u32, rows: u32, columns: u32) -> u32 {
    return select(0u, DEPTH / 2u, thread / 8u % 4u * 4u < rows && first_column_of(thread) < columns);
}

fn no_sums() -> Sums {
    let none = Row(vec4<f32>(), vec4<f32>());
    return Sums(none, none, none, none, none, none, none, none);
}

// What a thread stages at a time: four rows in each vec4 of a, four columns in each of b.
struct Slice {
    a0: vec4<f32>,
    a1: vec4<f32>,
    a2: vec4<f32>,
    a3: vec4<f32>,
    b0: vec4<f32>,
    b1: vec4<f32>,
    b2: vec4<f32>,
    b3: vec4<f32>,
    b4: vec4<f32>,
    b5: vec4<f32>,
    b6: vec4<f32>,
    b7: vec4<f32>,
}

// The places of one, where its terms lie side by side.
struct Places {
    a0: vec4<u32>,
    a1: vec4<u32>,
    a2: vec4<u32>,
    a3: vec4<u32>,
    b0: vec4<u32>,
    b1: vec4<u32>,
    b2: vec4<u32>,
    b3: vec4<u32>,
    b4: vec4<u32>,
    b5: vec4<u32>,
    b6: vec4<u32>,
    b7: vec4<u32>,
}

// A thread has one term of every other quad of rows.
fn stage_rows(slice: Slice, thread: u32) {
    let at = thread % DEPTH * STRIDE_A + thread / DEPTH;
    tile_a[at] = slice.a0;
    tile_a[at + 2u] = slice.a1;
    tile_a[at + 4u] = slice.a2;
    tile_a[at + 6u] = slice.a3;
}

// Likewise of columns.
fn stage_columns(slice: Slice, thread: u32) {
    let at = thread % DEPTH * STRIDE_B + thread / DEPTH;
    tile_b[at] = slice.b0;
    tile_b[at + 2u] = slice.b1;
    tile_b[at + 4u] = slice.b2;
    tile_b[at + 6u] = slice.b3;
    tile_b[at + 8u] = slice.b4;
    tile_b[at + 10u] = slice.b5;
    tile_b[at + 12u] = slice.b6;
    tile_b[at + 14u] = slice.b7;
}

// A thread has every fourth term of one quad of columns.
fn stage_terms(slice: Slice, thread: u32) {
    let at = thread / 16u * STRIDE_B + thread % 16u;
    tile_b[at] = slice.b0;
    tile_b[at + 4u * STRIDE_B] = slice.b1;
    tile_b[at + 8u * STRIDE_B] = slice.b2;
    tile_b[at + 12u * STRIDE_B] = slice.b3;
    tile_b[at + 16u * STRIDE_B] = slice.b4;
    tile_b[at + 20u * STRIDE_B] = slice.b5;
    tile_b[at + 24u * STRIDE_B] = slice.b6;
    tile_b[at + 28u * STRIDE_B] = slice.b7;
}

fn scratch_terms(at: vec4<u32>, term: u32) -> vec4<f32> {
    return vec4<f32>(scratch[at.x + term], scratch[at.y + term],
                     scratch[at.z + term], scratch[at.w + term]);
}

// far_e ------------------------------------------------------------------------------------------

fn landmark_terms(at: vec4<u32>, term: u32) -> vec4<f32> {
    return vec4<f32>(q_landmarks[at.x + term], q_landmarks[at.y + term],
                     q_landmarks[at.z + term], q_landmarks[at.w + term]);
}

fn key_terms(at: vec4<u32>, term: u32) -> vec4<f32> {
    let i = (at & vec4<u32>(PLACE)) + term;
    if (at.x < FROM_ROWS) {
        return vec4<f32>(ring_k[i.x], ring_k[i.y], ring_k[i.z], ring_k[i.w]);
    }
    return vec4<f32>(k[i.x], k[i.y], k[i.z], k[i.w]);
}

fn far_slice(at: Places, term: u32) -> Slice {
    // Past the last term the rows are 0, so what the keys hold there does not count.
    let t = min(term, call.head_dim - 1u);
    let one = select(0.0, 1.0, term < call.head_dim);
    return Slice(
        landmark_terms(at.a0, t) * one, landmark_terms(at.a1, t) * one,
        landmark_terms(at.a2, t) * one, landmark_terms(at.a3, t) * one,
        key_terms(at.b0, t), key_terms(at.b1, t), key_terms(at.b2, t), key_terms(at.b3, t),
        key_terms(at.b4, t), key_terms(at.b5, t), key_terms(at.b6, t), key_terms(at.b7, t),
    );
}

fn put_far_logits(group: u32, row: u32, first: u32, end: u32, logits: Row) {
    if (row < landmark_rows()) {
        for (var i = 0u; i < 4u; i++) {
            if (first + i < end) {
                scratch[far_logit_at(group, first + i, row)] = logits.left[i] * call.scale;
            }
            if (first + 32u + i < end) {
                scratch[far_logit_at(group, first + 32u + i, row)] = logits.right[i] * call.scale;
            }
        }
    }
}

// Workgroups: (tiles of H*m landmark rows, blocks, G).
@compute @workgroup_size(64)
fn o1b_far_e(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.z;
    let block = workgroup.y;
    let ring = ring_of(group, thread);
    let start = block * BLOCK;
    let end = min(start + BLOCK, gone_by(ring, call.rows));
    if (start >= end || end == ring.pad) {
        return;
    }
    let d = call.head_dim;
    let rows = landmark_rows();
    let first = workgroup.x * ROWS;
    let terms = terms_of(thread, rows - first, end - start);
    let last_row = vec4<u32>(rows - 1u);
    let quads = first + thread / DEPTH * 4u + QUAD;
    let key = start + thread / DEPTH * 4u;
    let at = Places(
        (group * rows + min(quads, last_row)) * d,
        (group * rows + min(quads + 8u, last_row)) * d,
        (group * rows + min(quads + 16u, last_row)) * d,
        (group * rows + min(quads + 24u, last_row)) * d,
        places(group, ring, key, d), places(group, ring, key + 8u, d),
        places(group, ring, key + 16u, d), places(group, ring, key + 24u, d),
        places(group, ring, key + 32u, d), places(group, ring, key + 40u, d),
        places(group, ring, key + 48u, d), places(group, ring, key + 56u, d),
    );
    var sums = no_sums();
    var slice = far_slice(at, thread % DEPTH);
    for (var base = 0u; base < d; base += DEPTH) {
        workgroupBarrier();
        stage_rows(slice, thread);
        stage_columns(slice, thread);
        workgroupBarrier();
        // The next terms are on their way while these are worked on.
        if (base + DEPTH < d) {
            slice = far_slice(at, base + DEPTH + thread % DEPTH);
        }
        sums = add_staged(sums, thread, terms);
    }
    let results = joined(sums, thread);
    let row = first + first_row_of(thread);
    let column = start + first_column_of(thread);
    put_far_logits(group, row, column, end, results.row0);
    put_far_logits(group, row + 1u, column, end, results.row1);
    put_far_logits(group, row + 2u, column, end, results.row2);
    put_far_logits(group, row + 3u, column, end, results.row3);
    storageBarrier();
    workgroupBarrier();
    let r = first + thread;
    if (thread < ROWS && r < rows) {
        var most = LOWEST;
        for (var j = max(start, ring.pad); j < end; j++) {
            most = max(most, scratch[far_logit_at(group, j, r)]);
            scratch[far_peak_at(group, j, r)] = most;
        }
        if (block == 0u) {
            // An empty far field has no maximum: what the buffer then holds is not looked at.
            let at = far_state_at(group, r);
            scratch[before_at(BEFORE_MAX, group, r)] =
                select(LOWEST, far_max_mass[at], ring.far > 0u);
            scratch[before_at(BEFORE_MASS, group, r)] =
                select(0.0, far_max_mass[at + call.landmarks], ring.far > 0u);
        }
    }
}

// Where a landmark row has its maximum; its mass is m further on.
fn far_state_at(group: u32, row: u32) -> u32 {
    return (group * call.heads_per_group + row / call.landmarks) * 2u * call.landmarks
        + row % call.landmarks;
}

// far_sums ---------------------------------------------------------------------------------------

// Weights of one key for four landmark rows, relative to the block's maxima.
fn block_weights(group: u32, ring: Ring, key: u32, end: u32, first: u32) -> vec4<f32> {
    let row = min(first + QUAD, vec4<u32>(landmark_rows() - 1u));
    let bounded = clamp(key, ring.pad, end - 1u);
    let logits = far_logit_at(group, bounded, 0u) + row;
    let most = far_peak_at(group, end - 1u, 0u) + row;
    let weights = decays(scratch_terms(logits, 0u) - scratch_terms(most, 0u));
    return select(vec4<f32>(), weights, key == bounded);
}

fn block_values(group: u32, ring: Ring, key: u32, end: u32, first: u32) -> vec4<f32> {
    let at = place(group, ring, min(key, end - 1u), call.value_dim);
    let i = (at & PLACE) + min(first + QUAD, vec4<u32>(call.value_dim - 1u));
    if (at < FROM_ROWS) {
        return vec4<f32>(ring_v[i.x], ring_v[i.y], ring_v[i.z], ring_v[i.w]);
    }
    return vec4<f32>(v[i.x], v[i.y], v[i.z], v[i.w]);
}

fn block_slice(group: u32, ring: Ring, base: u32, end: u32, row: u32, column: u32, thread: u32)
    -> Slice {
    // Landmark rows lie side by side here, so neighbouring threads stage neighbouring rows.
    let a = base + thread / 8u;
    let b = base + thread / 16u;
    let r = row + thread % 8u * 4u;
    let t = column + thread % 16u * 4u;
    return Slice(
        block_weights(group, ring, a, end, r), block_weights(group, ring, a + 8u, end, r),
        block_weights(group, ring, a + 16u, end, r), block_weights(group, ring, a + 24u, end, r),
        block_values(group, ring, b, end, t), block_values(group, ring, b + 4u, end, t),
        block_values(group, ring, b + 8u, end, t), block_values(group, ring, b + 12u, end, t),
        block_values(group, ring, b + 16u, end, t), block_values(group, ring, b + 20u, end, t),
        block_values(group, ring, b + 24u, end, t), block_values(group, ring, b + 28u, end, t),
    );
}

fn put_numerators(block: u32, group: u32, row: u32, first: u32, values: Row) {
    if (row < landmark_rows()) {
        let at = numerator_at(block, group, row) + first;
        for (var i = 0u; i < 4u; i++) {
            if (first + i < call.value_dim) {
                scratch[at + i] = values.left[i];
            }
            if (first + 32u + i < call.value_dim) {
                scratch[at + 32u + i] = values.right[i];
            }
        }
    }
}

// Workgroups: (tiles of dv, tiles of H*m landmark rows, blocks * G).
@compute @workgroup_size(64)
fn o1b_far_sums(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.z % call.groups;
    let block = workgroup.z / call.groups;
    let ring = ring_of(group, thread);
    let start = block * BLOCK;
    let end = min(start + BLOCK, gone_by(ring, call.rows));
    if (start >= end || end == ring.pad) {
        return;
    }
    let rows = landmark_rows();
    let first = workgroup.y * ROWS;
    let left = workgroup.x * COLUMNS;
    let terms = terms_of(thread, rows - first, call.value_dim - left);
    var sums = no_sums();
    for (var base = start; base < end; base += DEPTH) {
        let slice = block_slice(group, ring, base, end, first, left, thread);
        let at = thread / 8u * STRIDE_A + thread % 8u;
        workgroupBarrier();
        tile_a[at] = slice.a0;
        tile_a[at + 8u * STRIDE_A] = slice.a1;
        tile_a[at + 16u * STRIDE_A] = slice.a2;
        tile_a[at + 24u * STRIDE_A] = slice.a3;
        stage_terms(slice, thread);
        workgroupBarrier();
        sums = add_staged(sums, thread, terms);
    }
    let results = joined(sums, thread);
    let row = first + first_row_of(thread);
    let column = left + first_column_of(thread);
    put_numerators(block, group, row, column, results.row0);
    put_numerators(block, group, row + 1u, column, results.row1);
    put_numerators(block, group, row + 2u, column, results.row2);
    put_numerators(block, group, row + 3u, column, results.row3);
    let r = first + thread;
    if (workgroup.x == 0u && thread < ROWS && r < rows) {
        let most = scratch[far_peak_at(group, end - 1u, r)];
        var mass = 0.0;
        for (var j = max(start, ring.pad); j < end; j++) {
            mass += decay(scratch[far_logit_at(group, j, r)] - most);
        }
        scratch[block_at(BLOCK_MASS, block, group, r)] = mass;
    }
}

// far_commit -------------------------------------------------------------------------------------

// One element of a landmark row's numerator a thread; the first also keeps maximum and mass.
// Workgroups: (64ths of dv, H*m landmark rows, G).
@compute @workgroup_size(64)
fn o1b_far_commit(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.z;
    let row = workgroup.y;
    let t = workgroup.x * 64u + thread;
    let ring = stored_ring(group);
    let end = gone_by(ring, call.rows);
    if (end == ring.pad || t >= call.value_dim) {
        return;
    }
    let state = (group * landmark_rows() + row) * call.value_dim + t;
    var most = scratch[before_at(BEFORE_MAX, group, row)];
    var mass = scratch[before_at(BEFORE_MASS, group, row)];
    var numerator = select(0.0, far_num[state], ring.far > 0u);
    for (var block = 0u; block <= end / BLOCK && block < blocks(); block++) {
        let element = numerator_at(block, group, row) + t;
        let added = scratch[element];
        scratch[element] = numerator;
        if (t == 0u) {
            scratch[block_at(RUNNING_MAX, block, group, row)] = most;
            scratch[block_at(RUNNING_MASS, block, group, row)] = mass;
        }
        if (block * BLOCK < end) {
            let last = min(block * BLOCK + BLOCK, end) - 1u;
            let block_max = scratch[far_peak_at(group, last, row)];
            let after = max(most, block_max);
            let carry = decay(most - after);
            let share = decay(block_max - after);
            numerator = numerator * carry + added * share;
            mass = mass * carry + scratch[block_at(BLOCK_MASS, block, group, row)] * share;
            most = after;
        }
    }
    far_num[state] = numerator;
    if (t == 0u) {
        far_max_mass[far_state_at(group, row)] = most;
        far_max_mass[far_state_at(group, row) + call.landmarks] = mass;
    }
}

// attend_logits ----------------------------------------------------------------------------------

// The places of what four columns hold: sinks, keys from the span's start on, landmarks.
fn columns_at(group: u32, ring: Ring, first: u32, span: Span) -> vec4<u32> {
    let s = sink_columns();
    if (first < s) {
        let sink = min(first + QUAD, vec4<u32>(sinks() - 1u));
        return FROM_SINKS + (group * sinks() + sink) * call.head_dim;
    }
    // Columns past the last stand for a landmark, or where there is none for some key.
    if (first < s + span.keys || call.landmarks == 0u) {
        return places(group, ring, span.start + first - s, call.head_dim);
    }
    let landmark = min(first - s - span.keys + QUAD, vec4<u32>(call.landmarks - 1u));
    return FROM_LANDMARKS + (group * call.landmarks + landmark) * call.head_dim;
}

fn column_terms(at: vec4<u32>, term: u32) -> vec4<f32> {
    let i = (at & vec4<u32>(PLACE)) + term;
    switch at.x & ~PLACE {
        case FROM_SINKS: {
            return vec4<f32>(sink_k[i.x], sink_k[i.y], sink_k[i.z], sink_k[i.w]);
        }
        case FROM_RING: {
            return vec4<f32>(ring_k[i.x], ring_k[i.y], ring_k[i.z], ring_k[i.w]);
        }
        case FROM_ROWS: {
            return vec4<f32>(k[i.x], k[i.y], k[i.z], k[i.w]);
        }
        default: {
            return vec4<f32>(k_landmarks[i.x], k_landmarks[i.y], k_landmarks[i.z], k_landmarks[i.w]);
        }
    }
}

// Where the queries of four rows begin.
fn queries_at(group: u32, first: u32) -> vec4<u32> {
    let each = head_rows();
    let row = min(first + QUAD, vec4<u32>(all_rows() - 1u));
    let head = group * call.heads_per_group + row / each;
    let i = call.first_row + min(row % each, vec4<u32>(call.rows - 1u));
    return (i * call.heads + head) * call.head_dim;
}

fn query_terms(at: vec4<u32>, term: u32) -> vec4<f32> {
    return vec4<f32>(q[at.x + term], q[at.y + term], q[at.z + term], q[at.w + term]);
}

fn logit_slice(at: Places, term: u32) -> Slice {
    let t = min(term, call.head_dim - 1u);
    let one = select(0.0, 1.0, term < call.head_dim);
    return Slice(
        query_terms(at.a0, t) * one, query_terms(at.a1, t) * one,
        query_terms(at.a2, t) * one, query_terms(at.a3, t) * one,
        column_terms(at.b0, t), column_terms(at.b1, t),
        column_terms(at.b2, t), column_terms(at.b3, t),
        column_terms(at.b4, t), column_terms(at.b5, t),
        column_terms(at.b6, t), column_terms(at.b7, t),
    );
}

fn put_logits(group: u32, row: u32, first: u32, columns: u32, logits: Row) {
    if (row < all_rows()) {
        let at = weight_at(group, row) + first;
        for (var i = 0u; i < 4u; i++) {
            if (first + i < columns) {
                scratch[at + i] = logits.left[i] * call.scale;
            }
            if (first + 32u + i < columns) {
                scratch[at + 32u + i] = logits.right[i] * call.scale;
            }
        }
    }
}

// Workgroups: (tiles of columns, tiles of H*rows, G).
@compute @workgroup_size(64)
fn o1b_attend_logits(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.z;
    let ring = ring_of(group, thread);
    let d = call.head_dim;
    let span = span_of(workgroup.y, ring);
    let far = gone(ring, span.last_row) > ring.pad;
    let columns = sink_columns() + span.keys + select(0u, call.landmarks, far);
    let left = workgroup.x * COLUMNS;
    if (left >= columns) {
        return;
    }
    let first = workgroup.y * ROWS;
    let terms = terms_of(thread, all_rows() - first, columns - left);
    let row_quad = first + thread / DEPTH * 4u;
    let quad = left + thread / DEPTH * 4u;
    let at = Places(
        queries_at(group, row_quad), queries_at(group, row_quad + 8u),
        queries_at(group, row_quad + 16u), queries_at(group, row_quad + 24u),
        columns_at(group, ring, quad, span), columns_at(group, ring, quad + 8u, span),
        columns_at(group, ring, quad + 16u, span), columns_at(group, ring, quad + 24u, span),
        columns_at(group, ring, quad + 32u, span), columns_at(group, ring, quad + 40u, span),
        columns_at(group, ring, quad + 48u, span), columns_at(group, ring, quad + 56u, span),
    );
    var sums = no_sums();
    var slice = logit_slice(at, thread % DEPTH);
    for (var base = 0u; base < d; base += DEPTH) {
        workgroupBarrier();
        stage_rows(slice, thread);
        stage_columns(slice, thread);
        workgroupBarrier();
        if (base + DEPTH < d) {
            slice = logit_slice(at, base + DEPTH + thread % DEPTH);
        }
        sums = add_staged(sums, thread, terms);
    }
    let results = joined(sums, thread);
    let row = first + first_row_of(thread);
    let column = left + first_column_of(thread);
    put_logits(group, row, column, columns, results.row0);
    put_logits(group, row + 1u, column, columns, results.row1);
    put_logits(group, row + 2u, column, columns, results.row2);
    put_logits(group, row + 3u, column, columns, results.row3);
}

// attend_weights ---------------------------------------------------------------------------------

// Sizes beyond float32 are kept apart as powers of two: a number is `value * 2^power`.
struct Scaled {
    value: f32,
    power: i32,
}

fn power_of_two(power: i32) -> f32 {
    return select(bitcast<f32>(u32(clamp(power, -126, 127) + 127) << 23u), 0.0, power < -126);
}

// A float32, denormals too, with a value between 1 and 2 in magnitude, or 0.
fn split(bits: u32) -> Scaled {
    var normal = bits;
    var power = -127;
    if ((bits & 0x7f800000u) == 0u) {
        let digits = bits & 0x007fffffu;
        if (digits == 0u) {
            return Scaled(0.0, 0);
        }
        normal = bitcast<u32>(f32(digits)) | (bits & 0x80000000u);
        power -= 149;
    }
    power += i32((normal >> 23u) & 255u);
    return Scaled(bitcast<f32>((normal & 0x807fffffu) | 0x3f800000u), power);
}

// exp(x), however large or small.
fn scaled_exp(x: f32) -> Scaled {
    let bounded = clamp(x, -1.0e9, 1.0e9);
    let power = ceil(bounded * LOG2_E);
    let rest = (bounded - power * LN2_HIGH) - power * LN2_LOW;
    return Scaled(exp(min(rest, 0.0)), i32(power));
}

const WEIGHT_THREADS = 64u;
// 2^-60
const LEAST_SIZE = 8.67361738e-19;

// By landmark, of four rows each: the weight of its key, u and its power, the maximum at the row.
// Loops go on in fours, so there is room for three landmarks that do not count.
var<workgroup> landmark_weight: array<vec4<f32>, 196>;
var<workgroup> u_value: array<vec4<f32>, 196>;
var<workgroup> u_power: array<vec4<i32>, 196>;
var<workgroup> far_max: array<vec4<f32>, 196>;
var<workgroup> partial: array<vec4<f32>, 64>;

// The largest of what the threads pass, for each of four rows.
fn largest(thread: u32, x: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    partial[thread] = x;
    workgroupBarrier();
    var best = x;
    if (thread < 8u) {
        for (var i = thread + 8u; i < WEIGHT_THREADS; i += 8u) {
            best = max(best, partial[i]);
        }
        partial[thread] = best;
    }
    workgroupBarrier();
    best = partial[0];
    for (var i = 1u; i < 8u; i++) {
        best = max(best, partial[i]);
    }
    return best;
}

fn total(thread: u32, x: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    partial[thread] = x;
    workgroupBarrier();
    var sum = x;
    if (thread < 8u) {
        for (var i = thread + 8u; i < WEIGHT_THREADS; i += 8u) {
            sum += partial[i];
        }
        partial[thread] = sum;
    }
    workgroupBarrier();
    sum = partial[0];
    for (var i = 1u; i < 8u; i++) {
        sum += partial[i];
    }
    return sum;
}

// u of landmark b with all its terms, however far apart: each keeps a power of two of its own. The
// logits of the landmark keys begin at `logits`, in scratch; `column` is where those of mix begin.
fn mix_apart(column: u32, logits: u32, top_logit: f32) -> Scaled {
    var u = Scaled(0.0, -0x40000000);
    for (var a = 0u; a < call.landmarks; a++) {
        let x = split(bitcast<u32>(mixing[column + a * call.landmarks]));
        if (x.value != 0.0) {
            u.power = max(u.power, scaled_exp(scratch[logits + a] - top_logit).power + x.power);
        }
    }
    for (var a = 0u; a < call.landmarks; a++) {
        let x = split(bitcast<u32>(mixing[column + a * call.landmarks]));
        let f = scaled_exp(scratch[logits + a] - top_logit);
        u.value += f.value * x.value * power_of_two(f.power + x.power - u.power);
    }
    return u;
}

// u of landmark b into u_value and u_power.
fn mix_landmark(head: u32, b: u32, logits: vec4<u32>, top_logit: vec4<f32>) {
    let m = call.landmarks;
    let column = head * m * m + b;
    var u = vec4<f32>();
    var sizes = vec4<f32>();
    var entry = 0.0;
    for (var a = 0u; a < m; a += 4u) {
        let at = column + min(a + QUAD, vec4<u32>(m - 1u)) * m;
        let x = vec4<f32>(mixing[at.x], mixing[at.y], mixing[at.z], mixing[at.w]);
        let t0 = landmark_weight[a] * x.x;
        let t1 = landmark_weight[a + 1u] * x.y;
        let t2 = landmark_weight[a + 2u] * x.z;
        let t3 = landmark_weight[a + 3u] * x.w;
        u += (t0 + t1) + (t2 + t3);
        sizes += (abs(t0) + abs(t1)) + (abs(t2) + abs(t3));
        entry = max(entry, max(max(abs(x.x), abs(x.y)), max(abs(x.z), abs(x.w))));
    }
    var powers = vec4<i32>();
    // Terms may be lost below float32, unless what is there dwarfs all that can be lost.
    let safe = (sizes > vec4<f32>(LEAST_SIZE)) & (sizes > vec4<f32>(entry * LEAST_SIZE));
    if (!all(safe)) {
        for (var r = 0u; r < 4u; r++) {
            let apart = mix_apart(column, logits[r], top_logit[r]);
            u[r] = apart.value;
            powers[r] = apart.power;
        }
    }
    if (clamps_weights()) {
        u = max(u, vec4<f32>());
    }
    u_value[b] = u;
    u_power[b] = powers;
}

fn put_scratch(at: vec4<u32>, column: u32, x: vec4<f32>, there: vec4<bool>) {
    for (var r = 0u; r < 4u; r++) {
        if (there[r]) {
            scratch[at[r] + column] = x[r];
        }
    }
}

// Logits of four rows of a head become the weights of their values: near keys, evicted keys, far
// numerators. Section 4 with its four rules. Workgroups: (quads of rows, H, G).
@compute @workgroup_size(64)
fn o1b_attend_weights(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.z;
    let head = workgroup.y;
    let ring = ring_of(group, thread);
    let m = call.landmarks;
    // Rows past the last repeat it, and write nothing.
    let first = workgroup.x * 4u;
    let row = min(first + QUAD, vec4<u32>(call.rows - 1u));
    let counts = first + QUAD == row;
    let first_row = head * head_rows() + row;
    let at = vec4<u32>(weight_at(group, first_row.x), weight_at(group, first_row.y),
                       weight_at(group, first_row.z), weight_at(group, first_row.w));
    let span = span_of(first_row.x / ROWS, ring);
    // Columns: sinks up to s; keys of the block, evicted up to near, live up to coming, of rows to
    // come up to end; landmarks.
    let s = sinks();
    let first_key = sink_columns();
    let evicted =
        vec4<u32>(gone(ring, row.x), gone(ring, row.y), gone(ring, row.z), gone(ring, row.w));
    let near = first_key + evicted - span.start;
    let coming = first_key + row_key(ring) + row + 1u - span.start;
    let end = first_key + span.keys;
    let older = ring.far > 0u || span.block > 0u;

    var shift = vec4<f32>(LOWEST);
    for (var c = thread; c < coming.w; c += WEIGHT_THREADS) {
        let live = is_live(c, s, near, coming);
        shift = max(shift, select(vec4<f32>(LOWEST), scratch_terms(at, c), live));
    }
    shift = largest(thread, shift);

    var factor = vec4<f32>();
    var mass = vec4<f32>();
    if (evicted.w > ring.pad && m > 0u) {
        let landmark_row = head * m;
        var top_logit = vec4<f32>(LOWEST);
        for (var a = thread; a < m; a += WEIGHT_THREADS) {
            top_logit = max(top_logit, scratch_terms(at, end + a));
        }
        top_logit = largest(thread, top_logit);
        for (var a = thread; a < m + 3u; a += WEIGHT_THREADS) {
            let weight = decays(scratch_terms(at, end + min(a, m - 1u)) - top_logit);
            landmark_weight[a] = select(vec4<f32>(), weight, a < m);
        }
        workgroupBarrier();
        // The scale of landmark b is log|u_b| + far_max_b, where far_max_b is that at the row: of the
        // blocks before, of the rest of this one, of the one that has begun since.
        var top = vec4<f32>(LOWEST);
        for (var b = thread; b < m; b += WEIGHT_THREADS) {
            mix_landmark(group * call.heads_per_group + head, b, at + end, top_logit);
            var running = vec4<f32>(LOWEST);
            if (older) {
                running =
                    vec4<f32>(scratch[block_at(RUNNING_MAX, span.block, group, landmark_row + b)]);
            }
            let recent = max(evicted, vec4<u32>(max(span.start, ring.pad) + 1u)) - 1u;
            let peaks = far_peak_at(group, 0u, landmark_row + b) + recent * plane();
            let seen = evicted > vec4<u32>(max(span.start, ring.pad));
            running = select(running, max(running, scratch_terms(peaks, 0u)), seen);
            let last = span.start + BLOCK - 1u;
            if (evicted.w > last + 1u) {
                let peak = vec4<f32>(scratch[far_peak_at(group, last, landmark_row + b)]);
                running = select(running, max(running, peak), evicted > vec4<u32>(last + 1u));
            }
            far_max[b] = running;
            let u = u_value[b];
            let size = log(max(abs(u), vec4<f32>(1e-37)));
            let scale = running + vec4<f32>(u_power[b]) * LN2 + size;
            top = select(top, max(top, scale), u != vec4<f32>());
        }
        top = largest(thread, top);
        // Everything far is now relative to exp(top + top_logit): the weight of each landmark at its
        // maximum, then the weights of the keys it has seen, in the blocks before and since.
        for (var b = thread; b < m + 3u; b += WEIGHT_THREADS) {
            if (b >= m) {
                u_value[b] = vec4<f32>();
                far_max[b] = vec4<f32>();
                continue;
            }
            var gain = vec4<f32>();
            for (var r = 0u; r < 4u; r++) {
                let e = scaled_exp(far_max[b][r] - top[r]);
                gain[r] = u_value[b][r] * e.value * power_of_two(u_power[b][r] + e.power);
            }
            u_value[b] = gain;
            var old = vec4<f32>();
            if (older) {
                let before = scratch[block_at(RUNNING_MAX, span.block, group, landmark_row + b)];
                old = gain * decays(before - far_max[b]);
                mass += old * scratch[block_at(RUNNING_MASS, span.block, group, landmark_row + b)];
            }
            put_scratch(at, end + b, old, counts);
        }
        workgroupBarrier();
        // Two neighbouring keys a thread: a tile sees at most 95 evicted ones.
        let key = span.start + thread * 2u;
        if (key < evicted.w) {
            let last = evicted.w - 1u;
            let k0 = far_logit_at(group, clamp(key, ring.pad, last), landmark_row);
            let k1 = far_logit_at(group, clamp(key + 1u, ring.pad, last), landmark_row);
            var w0 = vec4<f32>();
            var w1 = vec4<f32>();
            for (var b = 0u; b < m; b += 2u) {
                let next = min(b + 1u, m - 1u);
                let l = vec4<f32>(scratch[k0 + b], scratch[k1 + b],
                                  scratch[k0 + next], scratch[k1 + next]);
                w0 += u_value[b] * decays(l.x - far_max[b]);
                w1 += u_value[b] * decays(l.y - far_max[b]);
                w0 += u_value[b + 1u] * decays(l.z - far_max[b + 1u]);
                w1 += u_value[b + 1u] * decays(l.w - far_max[b + 1u]);
            }
            // The numbers below pad have no key, but columns of their own.
            let seen0 = vec4<u32>(key) < evicted;
            let seen1 = vec4<u32>(key + 1u) < evicted;
            w0 = select(vec4<f32>(), w0, seen0 & vec4<bool>(key >= ring.pad));
            w1 = select(vec4<f32>(), w1, seen1 & vec4<bool>(key + 1u >= ring.pad));
            mass += w0 + w1;
            let column = first_key + key - span.start;
            put_scratch(at, column, w0, counts & seen0);
            put_scratch(at, column + 1u, w1, counts & seen1);
        }
        mass = total(thread, mass);
        // A far field of negative mass, or of none, is dropped, and leaves the shift alone.
        let kept = mass > vec4<f32>();
        let far_shift = top + top_logit;
        shift = select(shift, max(shift, far_shift), kept);
        factor = select(vec4<f32>(), decays(far_shift - shift), kept);
    }
    // The weights of evicted keys were written by other threads than use them below.
    storageBarrier();
    workgroupBarrier();

    var sum = vec4<f32>();
    for (var c = thread; c < coming.w; c += WEIGHT_THREADS) {
        let weights = decays(scratch_terms(at, c) - shift);
        sum += select(vec4<f32>(), weights, is_live(c, s, near, coming));
    }
    sum = total(thread, sum);
    let far = factor > vec4<f32>();
    sum = select(sum, sum + mass * factor, far);
    let share = 1.0 / max(sum, vec4<f32>(FLOOR));
    for (var c = thread; c < end; c += WEIGHT_THREADS) {
        let held = scratch_terms(at, c);
        let gone_far = far & (vec4<u32>(c) < near) & vec4<bool>(c >= first_key);
        var weights = select(vec4<f32>(), held * (factor * share), gone_far);
        weights = select(weights, decays(held - shift) * share, is_live(c, s, near, coming));
        put_scratch(at, c, weights, counts);
    }
    for (var b = thread; b < m; b += WEIGHT_THREADS) {
        // Without a far field nobody computed these, so they may hold anything.
        let held = scratch_terms(at, end + b);
        put_scratch(at, end + b, select(vec4<f32>(), held * (factor * share), far), counts);
    }
}

// Whether a column is a sink, or a key in the window, for each of four rows.
fn is_live(column: u32, sinks: u32, near: vec4<u32>, coming: vec4<u32>) -> vec4<bool> {
    let c = vec4<u32>(column);
    return (c < vec4<u32>(sinks)) | ((c >= near) & (c < coming));
}

// attend -----------------------------------------------------------------------------------------

// Four elements of a column's value; past its end come some that nobody uses.
fn column_values(group: u32, ring: Ring, column: u32, span: Span, first: u32) -> vec4<f32> {
    let s = sink_columns();
    let i = min(first + QUAD, vec4<u32>(call.value_dim - 1u));
    if (column < s) {
        let at = (group * sinks() + min(column, sinks() - 1u)) * call.value_dim + i;
        return vec4<f32>(sink_v[at.x], sink_v[at.y], sink_v[at.z], sink_v[at.w]);
    }
    let key = span.start + min(column - s, span.keys - 1u);
    let origin = place(group, ring, key, call.value_dim);
    let at = (origin & PLACE) + i;
    if (origin < FROM_ROWS) {
        return vec4<f32>(ring_v[at.x], ring_v[at.y], ring_v[at.z], ring_v[at.w]);
    }
    return vec4<f32>(v[at.x], v[at.y], v[at.z], v[at.w]);
}

fn numerators(at: u32, landmark: u32, first: u32) -> vec4<f32> {
    let i = at + min(landmark, call.landmarks - 1u) * call.value_dim
        + min(first + QUAD, vec4<u32>(call.value_dim - 1u));
    return scratch_terms(i, 0u);
}

// Where the weights of four rows begin.
fn weights_at(group: u32, first: u32) -> vec4<u32> {
    let last = all_rows() - 1u;
    return vec4<u32>(
        weight_at(group, min(first, last)),
        weight_at(group, min(first + 1u, last)),
        weight_at(group, min(first + 2u, last)),
        weight_at(group, min(first + 3u, last)),
    );
}

// 1 for the rows that are the head's, 0 for the others.
fn rows_of_head(first: u32, head: u32) -> vec4<f32> {
    return select(vec4<f32>(), vec4<f32>(1.0), (first + QUAD) / head_rows() == vec4<u32>(head));
}

fn near_slice(group: u32, ring: Ring, span: Span, row: u32, base: u32, dims: u32, thread: u32)
    -> Slice {
    let end = sink_columns() + span.keys;
    let t = base + thread % DEPTH;
    let there = t < end;
    let bounded = min(t, end - 1u);
    let r = row + thread / DEPTH * 4u;
    let c = base + thread / 16u;
    let i = dims + thread % 16u * 4u;
    return Slice(
        select(vec4<f32>(), scratch_terms(weights_at(group, r), bounded), there),
        select(vec4<f32>(), scratch_terms(weights_at(group, r + 8u), bounded), there),
        select(vec4<f32>(), scratch_terms(weights_at(group, r + 16u), bounded), there),
        select(vec4<f32>(), scratch_terms(weights_at(group, r + 24u), bounded), there),
        column_values(group, ring, c, span, i), column_values(group, ring, c + 4u, span, i),
        column_values(group, ring, c + 8u, span, i), column_values(group, ring, c + 12u, span, i),
        column_values(group, ring, c + 16u, span, i), column_values(group, ring, c + 20u, span, i),
        column_values(group, ring, c + 24u, span, i), column_values(group, ring, c + 28u, span, i),
    );
}

fn head_slice(group: u32, span: Span, head: u32, row: u32, base: u32, dims: u32, thread: u32)
    -> Slice {
    let m = call.landmarks;
    let t = base + thread % DEPTH;
    let bounded = sink_columns() + span.keys + min(t, m - 1u);
    let one = select(0.0, 1.0, t < m);
    let r = row + thread / DEPTH * 4u;
    let b = base + thread / 16u;
    let i = dims + thread % 16u * 4u;
    let at = numerator_at(span.block, group, head * m);
    return Slice(
        scratch_terms(weights_at(group, r), bounded) * rows_of_head(r, head) * one,
        scratch_terms(weights_at(group, r + 8u), bounded) * rows_of_head(r + 8u, head) * one,
        scratch_terms(weights_at(group, r + 16u), bounded) * rows_of_head(r + 16u, head) * one,
        scratch_terms(weights_at(group, r + 24u), bounded) * rows_of_head(r + 24u, head) * one,
        numerators(at, b, i), numerators(at, b + 4u, i),
        numerators(at, b + 8u, i), numerators(at, b + 12u, i),
        numerators(at, b + 16u, i), numerators(at, b + 20u, i),
        numerators(at, b + 24u, i), numerators(at, b + 28u, i),
    );
}

fn put_result(group: u32, row: u32, first: u32, values: Row) {
    let i = row % head_rows();
    if (row < all_rows() && i < call.rows) {
        let head = group * call.heads_per_group + row / head_rows();
        let at = ((call.first_row + i) * call.heads + head) * call.value_dim + first;
        for (var j = 0u; j < 4u; j++) {
            if (first + j < call.value_dim) {
                result[at + j] = values.left[j];
            }
            if (first + 32u + j < call.value_dim) {
                result[at + 32u + j] = values.right[j];
            }
        }
    }
}

// Workgroups: (tiles of dv, tiles of H*rows, G).
@compute @workgroup_size(64)
fn o1b_attend(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.z;
    let ring = ring_of(group, thread);
    let m = call.landmarks;
    let span = span_of(workgroup.y, ring);
    let end = sink_columns() + span.keys;
    let first = workgroup.y * ROWS;
    let left = workgroup.x * COLUMNS;
    let terms = terms_of(thread, all_rows() - first, call.value_dim - left);
    var sums = no_sums();
    var slice = near_slice(group, ring, span, first, 0u, left, thread);
    for (var base = 0u; base < end; base += DEPTH) {
        workgroupBarrier();
        stage_rows(slice, thread);
        stage_terms(slice, thread);
        workgroupBarrier();
        if (base + DEPTH < end) {
            slice = near_slice(group, ring, span, first, base + DEPTH, left, thread);
        }
        sums = add_staged(sums, thread, terms);
    }
    // Each head has far numerators of its own: the rows of other heads weigh them with 0.
    if (gone(ring, span.last_row) > ring.pad) {
        for (var head = span.first_head; head <= span.last_head; head++) {
            for (var base = 0u; base < m; base += DEPTH) {
                let part = head_slice(group, span, head, first, base, left, thread);
                workgroupBarrier();
                stage_rows(part, thread);
                stage_terms(part, thread);
                workgroupBarrier();
                sums = add_staged(sums, thread, terms);
            }
        }
    }
    let results = joined(sums, thread);
    let row = first + first_row_of(thread);
    let column = left + first_column_of(thread);
    put_result(group, row, column, results.row0);
    put_result(group, row + 1u, column, results.row1);
    put_result(group, row + 2u, column, results.row2);
    put_result(group, row + 3u, column, results.row3);
}

// ring_commit ------------------------------------------------------------------------------------

// The last rows take their slots. Workgroups: (rows, G).
@compute @workgroup_size(64)
fn o1b_ring_commit(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.y;
    let at = group * 4u;
    let window = select(group_meta[at + 3u], call.ring, group_meta[at + 3u] == 0u);
    // Two rows of a slot apart by a window: only the later one stays.
    if (workgroup.x + window < call.rows) {
        return;
    }
    let to = group * call.ring + (group_meta[at + 1u] + group_meta[at] + workgroup.x) % window;
    let source = (call.first_row + workgroup.x) * call.groups + group;
    for (var t = thread; t < call.head_dim; t += 64u) {
        ring_k[to * call.head_dim + t] = k[source * call.head_dim + t];
    }
    for (var t = thread; t < call.value_dim; t += 64u) {
        ring_v[to * call.value_dim + t] = v[source * call.value_dim + t];
    }
}

// meta -------------------------------------------------------------------------------------------

// Length, head and far count after the call. Workgroups: (1).
@compute @workgroup_size(64)
fn o1b_meta(@builtin(local_invocation_index) thread: u32) {
    for (var group = thread; group < call.groups; group += 64u) {
        let at = group * 4u;
        let window = select(group_meta[at + 3u], call.ring, group_meta[at + 3u] == 0u);
        let held = group_meta[at] + call.rows;
        if (held > window) {
            let evicted = held - window;
            group_meta[at] = window;
            group_meta[at + 1u] = (group_meta[at + 1u] + evicted) % window;
            group_meta[at + 2u] += evicted;
        } else {
            group_meta[at] = held;
        }
    }
}
