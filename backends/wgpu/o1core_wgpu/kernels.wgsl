// The kernels of the operator (docs/operator.md sections 3 to 6) for n rows of a call at once.
//
// Names: G groups, H heads a group, d and dv the widths, S sinks, W the ring's slots, w the group's
// window, m landmarks. The keys of a group are numbered: those of the ring, oldest first, then the
// rows of the call. Row i sees the last w of them up to itself; those before number `gone(i)` are
// evicted by then.
//
// Rows are computed in tiles of 64 queries, and what 64 rows evict goes far together, as a block. So
// the rows of a tile read the far sums from before their own block, and of that block, key by key,
// what is evicted by then. A far key is known by the row that evicts it: there is at most one a
// group.
//
//     gather     keys and values of a group side by side, in the order of their numbers
//     logits     of the evicted keys with the landmark queries, and of the rows with all they see
//     far_sums   what each block adds to the far sums
//     commit     running sums over the blocks, the last are the layer's; then the ring and meta
//     weights    the logits of the rows become the weights of their values
//     attend     weights times values
//
// The matrix products make tiles of 64 x 128 results, a workgroup of 128 threads each, from slices of
// 16 terms that are staged in workgroup memory.
//
// Every loop around a barrier has bounds that are equal in the whole workgroup.

const TILE = 64u;       // rows of a tile, and rows whose evicted keys make a block
const WIDE = 128u;      // columns of a tile
const DEPTH = 16u;      // terms staged at a time
const THREADS = 128u;   // of every workgroup but those that only move numbers

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
    // Where the parts of scratch begin, in quads.
    rings: u32,
    keys: u32,
    values: u32,
    far_logits: u32,
    far_peaks: u32,
    far_weights: u32,
    block_mass: u32,
    running: u32,
    numerators: u32,
    weights: u32,
    shares: u32,
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
@group(0) @binding(13) var<storage, read_write> scratch: array<vec4<f32>>;
@group(0) @binding(14) var<storage, read_write> result: array<f32>;
@group(0) @binding(15) var<uniform> call: Call;

const QUAD = vec4<u32>(0u, 1u, 2u, 3u);

fn quads(numbers: u32) -> u32 {
    return (numbers + 3u) / 4u;
}

fn sinks() -> u32 {
    return (call.sinks_rectifier & 255u) | ((call.sinks_rectifier >> 9u) << 8u);
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

// Keys -------------------------------------------------------------------------------------------

// Where a group's ring stands before the call.
struct Ring {
    length: u32,
    head: u32,
    window: u32,
    some: bool,     // whether there is a far field already
}

fn stored_ring(group: u32) -> Ring {
    let at = group * 4u;
    let window = select(group_meta[at + 3u], call.ring, group_meta[at + 3u] == 0u);
    return Ring(group_meta[at], group_meta[at + 1u], window, group_meta[at + 2u] > 0u);
}

// The kernels after gather have it from scratch, where meta may be written at the same time. Halves
// of 16 bits, since a float holds no more than 24.
fn put_ring(group: u32, ring: Ring) {
    let at = call.rings + 2u * group;
    let low = vec3<u32>(ring.length, ring.head, ring.window) & vec3<u32>(0xffffu);
    let high = vec3<u32>(ring.length, ring.head, ring.window) >> vec3<u32>(16u);
    scratch[at] = vec4<f32>(vec3<f32>(low), select(0.0, 1.0, ring.some));
    scratch[at + 1u] = vec4<f32>(vec3<f32>(high), 0.0);
}

fn gathered_ring(group: u32) -> Ring {
    let at = call.rings + 2u * group;
    let low = scratch[at];
    let numbers = vec3<u32>(low.xyz) + (vec3<u32>(scratch[at + 1u].xyz) << vec3<u32>(16u));
    return Ring(numbers.x, numbers.y, numbers.z, low.w > 0.0);
}

struct SharedRing {
    length: u32,
    head: u32,
    window: u32,
    some: u32,
}

var<workgroup> shared_ring: SharedRing;

// The same, known to be equal in the whole workgroup; a barrier.
fn ring_of(group: u32, thread: u32) -> Ring {
    if (thread == 0u) {
        let ring = gathered_ring(group);
        shared_ring = SharedRing(ring.length, ring.head, ring.window, select(0u, 1u, ring.some));
    }
    let ring = workgroupUniformLoad(&shared_ring);
    return Ring(ring.length, ring.head, ring.window, ring.some != 0u);
}

// The number of the first key that is still live once `rows` rows were pushed.
fn gone_by(ring: Ring, rows: u32) -> u32 {
    let held = ring.length + rows;
    return select(0u, held - ring.window, held > ring.window);
}

fn gone(ring: Ring, row: u32) -> u32 {
    return gone_by(ring, row + 1u);
}

// The row that evicts a key.
fn evictor_of(ring: Ring, key: u32) -> u32 {
    return key + ring.window - ring.length;
}

// The key that a row evicts; the first one for rows that evict none.
fn evicted_by(ring: Ring, row: u32) -> u32 {
    let first = evictor_of(ring, 0u);
    return max(row, first) - first;
}

// Keys that a group has among those side by side, and those for which there is room.
fn near_keys(ring: Ring) -> u32 {
    return sinks() + ring.length + call.rows;
}

fn room_for_keys() -> u32 {
    return sinks() + call.ring + call.rows;
}

fn key_at(group: u32, number: u32) -> u32 {
    return call.keys + (group * room_for_keys() + number) * quads(call.head_dim);
}

fn value_at(group: u32, number: u32) -> u32 {
    return call.values + (group * room_for_keys() + number) * quads(call.value_dim);
}

// gather -----------------------------------------------------------------------------------------
//
// Its quads end in zeros where a width is no multiple of four.

fn row_place(group: u32, row: u32) -> u32 {
    return (call.first_row + row) * call.groups + group;
}

fn sink_key(at: u32, left: u32) -> vec4<f32> {
    let i = at + min(QUAD, vec4<u32>(left - 1u));
    return select(vec4<f32>(), vec4<f32>(sink_k[i.x], sink_k[i.y], sink_k[i.z], sink_k[i.w]),
                  QUAD < vec4<u32>(left));
}

fn sink_value(at: u32, left: u32) -> vec4<f32> {
    let i = at + min(QUAD, vec4<u32>(left - 1u));
    return select(vec4<f32>(), vec4<f32>(sink_v[i.x], sink_v[i.y], sink_v[i.z], sink_v[i.w]),
                  QUAD < vec4<u32>(left));
}

fn ring_key(at: u32, left: u32) -> vec4<f32> {
    let i = at + min(QUAD, vec4<u32>(left - 1u));
    return select(vec4<f32>(), vec4<f32>(ring_k[i.x], ring_k[i.y], ring_k[i.z], ring_k[i.w]),
                  QUAD < vec4<u32>(left));
}

fn ring_value(at: u32, left: u32) -> vec4<f32> {
    let i = at + min(QUAD, vec4<u32>(left - 1u));
    return select(vec4<f32>(), vec4<f32>(ring_v[i.x], ring_v[i.y], ring_v[i.z], ring_v[i.w]),
                  QUAD < vec4<u32>(left));
}

fn row_key(at: u32, left: u32) -> vec4<f32> {
    let i = at + min(QUAD, vec4<u32>(left - 1u));
    return select(vec4<f32>(), vec4<f32>(k[i.x], k[i.y], k[i.z], k[i.w]), QUAD < vec4<u32>(left));
}

fn row_value(at: u32, left: u32) -> vec4<f32> {
    let i = at + min(QUAD, vec4<u32>(left - 1u));
    return select(vec4<f32>(), vec4<f32>(v[i.x], v[i.y], v[i.z], v[i.w]), QUAD < vec4<u32>(left));
}

// Workgroups: (sinks, slots and rows, G).
@compute @workgroup_size(64)
fn o1b_gather(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.y;
    let number = workgroup.x;
    let ring = stored_ring(group);
    let d = call.head_dim;
    let dv = call.value_dim;
    if (number == 0u && thread == 0u) {
        put_ring(group, ring);
    }
    if (number >= near_keys(ring)) {
        return;
    }
    let key = number - min(number, sinks());
    let slot = ring.head + key;
    let in_ring = group * call.ring + select(slot, slot - ring.window, slot >= ring.window);
    let row = row_place(group, key - min(key, ring.length));
    for (var i = thread; i < quads(d); i += 64u) {
        var quad = vec4<f32>();
        if (number < sinks()) {
            quad = sink_key((group * sinks() + number) * d + 4u * i, d - 4u * i);
        } else if (key < ring.length) {
            quad = ring_key(in_ring * d + 4u * i, d - 4u * i);
        } else {
            quad = row_key(row * d + 4u * i, d - 4u * i);
        }
        scratch[key_at(group, number) + i] = quad;
    }
    for (var i = thread; i < quads(dv); i += 64u) {
        var quad = vec4<f32>();
        if (number < sinks()) {
            quad = sink_value((group * sinks() + number) * dv + 4u * i, dv - 4u * i);
        } else if (key < ring.length) {
            quad = ring_value(in_ring * dv + 4u * i, dv - 4u * i);
        } else {
            quad = row_value(row * dv + 4u * i, dv - 4u * i);
        }
        scratch[value_at(group, number) + i] = quad;
    }
}

// Queries ----------------------------------------------------------------------------------------
//
// The queries of a group are numbered head by head. In long calls every head is given whole tiles; in
// shorter ones whole quads, so that several heads share a tile: they see the same keys. Numbers
// without a row stand for the last row of their head, and nobody asks what becomes of them.

// Numbers that a head takes up.
fn head_rows() -> u32 {
    return select((call.rows + TILE - 1u) / TILE * TILE, quads(call.rows) * 4u, call.rows < TILE);
}

fn all_queries() -> u32 {
    return call.heads_per_group * head_rows();
}

fn tiles() -> u32 {
    return (all_queries() + TILE - 1u) / TILE;
}

// What the rows of a tile have in common.
struct Span {
    first_row: u32,     // of the call
    last_row: u32,
    start: u32,         // the first key they see: those before were evicted by rows before
    end: u32,           // columns: landmarks, sinks, then keys from the start on
}

fn span_of(tile: u32, ring: Ring) -> Span {
    let first = select(tile * TILE % head_rows(), 0u, call.rows < TILE);
    let last = min(first + TILE, call.rows) - 1u;
    let start = gone_by(ring, first);
    return Span(first, last, start, call.landmarks + sinks() + ring.length + last + 1u - start);
}

// The columns of a tile, each with a quad for every four of its rows.
fn tile_weights_at(group: u32, tile: u32) -> u32 {
    let columns = call.landmarks + sinks() + call.ring + TILE;
    return call.weights + (group * tiles() + tile) * columns * 16u;
}

fn shares_at(group: u32, tile: u32) -> u32 {
    return call.shares + (group * tiles() + tile) * 16u;
}

// Far sums ---------------------------------------------------------------------------------------
//
// Marks are the landmarks of all heads of a group; a head's are filled up to whole quads, with copies
// of its last one.

fn mark_quads() -> u32 {
    return call.heads_per_group * quads(call.landmarks);
}

fn blocks() -> u32 {
    return (call.rows + TILE - 1u) / TILE;
}

// A quad of marks for each row that evicts a key, among far_logits, far_peaks and far_weights.
fn far_at(group: u32, row: u32) -> u32 {
    return (group * blocks() * TILE + row) * mark_quads();
}

// Likewise for each block.
fn block_mass_at(group: u32, block: u32) -> u32 {
    return call.block_mass + (group * blocks() + block) * mark_quads();
}

// Maximum and mass before a block.
fn running_at(group: u32, block: u32, mark: u32) -> u32 {
    return call.running + (group * blocks() + block) * mark_quads() * 4u + mark;
}

fn numerator_at(group: u32, block: u32, mark: u32) -> u32 {
    return call.numerators
        + ((group * blocks() + block) * mark_quads() * 4u + mark) * quads(call.value_dim);
}

// The landmark, counted over all heads of all groups, that a mark stands for.
fn landmark_of(group: u32, mark: u32) -> u32 {
    let each = quads(call.landmarks) * 4u;
    let head = min(mark / each, call.heads_per_group - 1u);
    let b = min(mark - head * each, call.landmarks - 1u);
    return (group * call.heads_per_group + head) * call.landmarks + b;
}

// Products ---------------------------------------------------------------------------------------

// A thread makes 8 x 8 results: rows 4y.. and 32 + 4y.. of the tile, columns 4x.. and 64 + 4x.. of it.
// The arrays hold four rows (columns) of one term in a quad; padding spreads the stores over the
// memory banks. Everything is written out, since registers cannot be indexed by a loop's variable.
const STRIDE_A = 17u;
const STRIDE_B = 33u;
var<workgroup> tile_a: array<vec4<f32>, 272>;
var<workgroup> tile_b: array<vec4<f32>, 528>;

struct Quarter {
    row0: vec4<f32>,
    row1: vec4<f32>,
    row2: vec4<f32>,
    row3: vec4<f32>,
}

struct Sums {
    upper_left: Quarter,
    upper_right: Quarter,
    lower_left: Quarter,
    lower_right: Quarter,
}

fn no_sums() -> Sums {
    let none = Quarter(vec4<f32>(), vec4<f32>(), vec4<f32>(), vec4<f32>());
    return Sums(none, none, none, none);
}

fn add_outer(sums: Quarter, a: vec4<f32>, b: vec4<f32>) -> Quarter {
    return Quarter(sums.row0 + a.x * b, sums.row1 + a.y * b, sums.row2 + a.z * b,
                   sums.row3 + a.w * b);
}

fn add_term(sums: Sums, a: u32, b: u32) -> Sums {
    let upper = tile_a[a];
    let lower = tile_a[a + 8u];
    let left = tile_b[b];
    let right = tile_b[b + 16u];
    return Sums(
        add_outer(sums.upper_left, upper, left),
        add_outer(sums.upper_right, upper, right),
        add_outer(sums.lower_left, lower, left),
        add_outer(sums.lower_right, lower, right),
    );
}

fn add_staged(start: Sums, y: u32, x: u32) -> Sums {
    var sums = start;
    for (var i = 0u; i < DEPTH; i += 2u) {
        sums = add_term(sums, i * STRIDE_A + y, i * STRIDE_B + x);
        sums = add_term(sums, (i + 1u) * STRIDE_A + y, (i + 1u) * STRIDE_B + x);
    }
    return sums;
}

// What a thread stages at a time: two quads of rows and four of columns.
struct Slice {
    a0: vec4<f32>,
    a1: vec4<f32>,
    b0: vec4<f32>,
    b1: vec4<f32>,
    b2: vec4<f32>,
    b3: vec4<f32>,
}

// Of a slice's 16 terms of four rows each: those of a term lie side by side.
fn stage_rows_of_terms(slice: Slice, thread: u32) {
    let at = thread / 16u * STRIDE_A + thread % 16u;
    tile_a[at] = slice.a0;
    tile_a[at + 8u * STRIDE_A] = slice.a1;
}

fn stage_columns_of_terms(slice: Slice, thread: u32) {
    let at = thread / 32u * STRIDE_B + thread % 32u;
    tile_b[at] = slice.b0;
    tile_b[at + 4u * STRIDE_B] = slice.b1;
    tile_b[at + 8u * STRIDE_B] = slice.b2;
    tile_b[at + 12u * STRIDE_B] = slice.b3;
}

// logits -----------------------------------------------------------------------------------------

const MARKS_TOGETHER = 16u;
// In place of a quad of scratch: an element of k_landmarks.
const OF_LANDMARK = 0x80000000u;

var<workgroup> block_part: array<vec4<f32>, 128>;

fn landmark_terms(at: vec4<u32>, term: u32) -> vec4<f32> {
    return vec4<f32>(q_landmarks[at.x + term], q_landmarks[at.y + term],
                     q_landmarks[at.z + term], q_landmarks[at.w + term]);
}

fn query_terms(at: vec4<u32>, term: u32) -> vec4<f32> {
    return vec4<f32>(q[at.x + term], q[at.y + term], q[at.z + term], q[at.w + term]);
}

// Four terms of a key.
fn key_terms(at: u32, quad: u32) -> vec4<f32> {
    if (at >= OF_LANDMARK) {
        let first = at - OF_LANDMARK + 4u * quad;
        return vec4<f32>(k_landmarks[first], k_landmarks[first + 1u],
                         k_landmarks[first + 2u], k_landmarks[first + 3u]);
    }
    return scratch[at + quad];
}

// Where the terms of two quads of rows and of four columns begin.
struct Places {
    a0: vec4<u32>,
    a1: vec4<u32>,
    b: vec4<u32>,
}

// One term of the rows, four of the columns. Past the last term the rows are 0, so what the keys hold
// there does not count.
fn logit_slice(at: Places, far: bool, base: u32, thread: u32) -> Slice {
    let term = base + thread % 16u;
    let t = min(term, call.head_dim - 1u);
    var a0 = vec4<f32>();
    var a1 = vec4<f32>();
    if (term < call.head_dim) {
        if (far) {
            a0 = landmark_terms(at.a0, t);
            a1 = landmark_terms(at.a1, t);
        } else {
            a0 = query_terms(at.a0, t);
            a1 = query_terms(at.a1, t);
        }
    }
    let quad = min(base / 4u + thread % 4u, quads(call.head_dim) - 1u);
    return Slice(a0, a1, key_terms(at.b.x, quad), key_terms(at.b.y, quad),
                 key_terms(at.b.z, quad), key_terms(at.b.w, quad));
}

fn stage_logit_slice(slice: Slice, thread: u32) {
    let a = thread % 16u * STRIDE_A + thread / 16u;
    let b = thread % 4u * 4u * STRIDE_B + thread / 4u;
    tile_a[a] = slice.a0;
    tile_a[a + 8u] = slice.a1;
    tile_b[b] = vec4<f32>(slice.b0.x, slice.b1.x, slice.b2.x, slice.b3.x);
    tile_b[b + STRIDE_B] = vec4<f32>(slice.b0.y, slice.b1.y, slice.b2.y, slice.b3.y);
    tile_b[b + 2u * STRIDE_B] = vec4<f32>(slice.b0.z, slice.b1.z, slice.b2.z, slice.b3.z);
    tile_b[b + 3u * STRIDE_B] = vec4<f32>(slice.b0.w, slice.b1.w, slice.b2.w, slice.b3.w);
}

// Where the queries of a quad of numbers begin.
fn queries_at(group: u32, quad: u32) -> vec4<u32> {
    let each = head_rows();
    let number = min(quad * 4u, all_queries() - 4u);
    let head = group * call.heads_per_group + number / each;
    let row = call.first_row + min(number % each + QUAD, vec4<u32>(call.rows - 1u));
    return (row * call.heads + head) * call.head_dim;
}

// Where the landmark queries of a quad of marks begin.
fn marks_at(group: u32, quad: u32) -> vec4<u32> {
    let mark = quad * 4u;
    return call.head_dim * vec4<u32>(landmark_of(group, mark), landmark_of(group, mark + 1u),
                                     landmark_of(group, mark + 2u), landmark_of(group, mark + 3u));
}

// Where the key of a column begins.
fn column_at(group: u32, span: Span, column: u32) -> u32 {
    if (column < call.landmarks) {
        return OF_LANDMARK + (group * call.landmarks + column) * call.head_dim;
    }
    let number = min(column, span.end - 1u) - call.landmarks;
    return key_at(group, number + select(0u, span.start, number >= sinks()));
}

// Where the key that a row evicts begins.
fn far_key_at(group: u32, ring: Ring, row: u32) -> u32 {
    return key_at(group, sinks() + evicted_by(ring, min(row, call.rows - 1u)));
}

// What a tile of logits is to write: quads of rows by columns, within bounds.
struct Target {
    at: u32,
    pitch: u32,
    rows: u32,      // quads
    low: u32,
    high: u32,
}

fn put_column(to: Target, quad: u32, column: u32, logits: vec4<f32>) {
    if (column >= to.low && column < to.high) {
        scratch[to.at + column * to.pitch + quad] = logits * call.scale;
    }
}

fn column_of(logits: Quarter, j: u32) -> vec4<f32> {
    return vec4<f32>(logits.row0[j], logits.row1[j], logits.row2[j], logits.row3[j]);
}

fn put_logits(to: Target, quad: u32, column: u32, logits: Quarter) {
    if (quad < to.rows) {
        put_column(to, quad, column, column_of(logits, 0u));
        put_column(to, quad, column + 1u, column_of(logits, 1u));
        put_column(to, quad, column + 2u, column_of(logits, 2u));
        put_column(to, quad, column + 3u, column_of(logits, 3u));
    }
}

// Of 64 marks and two blocks: running maxima of the logits within each block; at the last, weights
// and mass. A thread has four marks of 16 rows.
fn weigh_blocks(group: u32, ring: Ring, quad: u32, start: u32, thread: u32) {
    let mark = quad + thread % 16u;
    let part = thread / 16u % 4u;
    let block = start / TILE + thread / 64u;
    let first = max(block * TILE + part * 16u, evictor_of(ring, 0u));
    let end = min(block * TILE + part * 16u + 16u, call.rows);
    let there = mark < mark_quads();
    let at = far_at(group, 0u) + mark;
    var most = vec4<f32>(LOWEST);
    if (there) {
        for (var row = first; row < end; row++) {
            most = max(most, scratch[call.far_logits + at + row * mark_quads()]);
        }
    }
    workgroupBarrier();
    block_part[thread] = most;
    workgroupBarrier();
    let others = thread - part * 16u;
    var running = vec4<f32>(LOWEST);
    var peak = vec4<f32>(LOWEST);
    for (var i = 0u; i < 4u; i++) {
        running = select(running, max(running, block_part[others + i * 16u]), i < part);
        peak = max(peak, block_part[others + i * 16u]);
    }
    var mass = vec4<f32>();
    if (there) {
        for (var row = first; row < end; row++) {
            let to = at + row * mark_quads();
            let logit = scratch[call.far_logits + to];
            running = max(running, logit);
            scratch[call.far_peaks + to] = running;
            let weight = decays(logit - peak);
            scratch[call.far_weights + to] = weight;
            mass += weight;
        }
    }
    workgroupBarrier();
    block_part[thread] = mass;
    workgroupBarrier();
    if (there && part == 0u && block < blocks()) {
        scratch[block_mass_at(group, block) + mark] =
            (block_part[thread] + block_part[thread + 16u])
            + (block_part[thread + 32u] + block_part[thread + 48u]);
    }
}

// Rows of tiles are marks and columns rows that evict, or rows are queries and columns what they see.
// Workgroups: (tiles of marks x tiles of rows, then tiles of queries x tiles of columns, G).
@compute @workgroup_size(128)
fn o1b_logits(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.y;
    let ring = ring_of(group, thread);
    let mark_tiles = (mark_quads() + MARKS_TOGETHER - 1u) / MARKS_TOGETHER;
    let far_tiles = mark_tiles * ((call.rows + WIDE - 1u) / WIDE);
    let far = workgroup.x < far_tiles;
    var at: Places;
    var to: Target;
    var left = 0u;
    let row_quad = thread / 16u;
    let column = thread / 4u * 4u;
    if (far) {
        left = workgroup.x / mark_tiles * WIDE;
        let first = workgroup.x % mark_tiles * MARKS_TOGETHER;
        let evictor = evictor_of(ring, 0u);
        if (evictor >= min(call.rows, left + WIDE)) {
            return;
        }
        let row = left + column;
        at = Places(
            marks_at(group, first + row_quad),
            marks_at(group, first + row_quad + 8u),
            vec4<u32>(far_key_at(group, ring, row), far_key_at(group, ring, row + 1u),
                      far_key_at(group, ring, row + 2u), far_key_at(group, ring, row + 3u)),
        );
        to = Target(call.far_logits + far_at(group, 0u) + first, mark_quads(),
                    mark_quads() - first, evictor, call.rows);
    } else {
        let wides = (call.landmarks + sinks() + call.ring + TILE + WIDE - 1u) / WIDE;
        let tile = (workgroup.x - far_tiles) / wides;
        left = (workgroup.x - far_tiles) % wides * WIDE;
        let span = span_of(tile, ring);
        if (left >= span.end) {
            return;
        }
        let c = left + column;
        at = Places(
            queries_at(group, tile * 16u + row_quad),
            queries_at(group, tile * 16u + row_quad + 8u),
            vec4<u32>(column_at(group, span, c), column_at(group, span, c + 1u),
                      column_at(group, span, c + 2u), column_at(group, span, c + 3u)),
        );
        to = Target(tile_weights_at(group, tile), 16u, 16u, 0u, span.end);
    }
    // Rows are neighbours in what is written, so threads are too.
    let y = thread % 8u;
    let x = thread / 8u;
    var sums = no_sums();
    var slice = logit_slice(at, far, 0u, thread);
    for (var base = 0u; base < call.head_dim; base += DEPTH) {
        workgroupBarrier();
        stage_logit_slice(slice, thread);
        workgroupBarrier();
        // The next terms are on their way while these are worked on.
        if (base + DEPTH < call.head_dim) {
            slice = logit_slice(at, far, base + DEPTH, thread);
        }
        sums = add_staged(sums, y, x);
    }
    put_logits(to, y, left + 4u * x, sums.upper_left);
    put_logits(to, y, left + 64u + 4u * x, sums.upper_right);
    put_logits(to, y + 8u, left + 4u * x, sums.lower_left);
    put_logits(to, y + 8u, left + 64u + 4u * x, sums.lower_right);
    if (far) {
        storageBarrier();
        workgroupBarrier();
        weigh_blocks(group, ring, workgroup.x % mark_tiles * MARKS_TOGETHER, left, thread);
    }
}

// far_sums ---------------------------------------------------------------------------------------

fn block_slice(group: u32, ring: Ring, base: u32, end: u32, marks: u32, left: u32, thread: u32)
    -> Slice {
    let row = base + thread / 16u;
    let quad = min(marks + thread % 16u, mark_quads() - 1u);
    let at = call.far_weights + far_at(group, 0u) + quad;
    let last = end - 1u;
    let r = base + thread / 32u;
    let t = min(left + thread % 32u, quads(call.value_dim) - 1u);
    let s = sinks();
    return Slice(
        select(vec4<f32>(), scratch[at + min(row, last) * mark_quads()], row < end),
        select(vec4<f32>(), scratch[at + min(row + 8u, last) * mark_quads()], row + 8u < end),
        scratch[value_at(group, s + evicted_by(ring, min(r, last))) + t],
        scratch[value_at(group, s + evicted_by(ring, min(r + 4u, last))) + t],
        scratch[value_at(group, s + evicted_by(ring, min(r + 8u, last))) + t],
        scratch[value_at(group, s + evicted_by(ring, min(r + 12u, last))) + t],
    );
}

fn put_numerators(at: u32, mark: u32, quad: u32, values: Quarter) {
    let width = quads(call.value_dim);
    if (mark < mark_quads() * 4u && quad < width) {
        scratch[at + mark * width + quad] = values.row0;
        scratch[at + (mark + 1u) * width + quad] = values.row1;
        scratch[at + (mark + 2u) * width + quad] = values.row2;
        scratch[at + (mark + 3u) * width + quad] = values.row3;
    }
}

// Workgroups: (tiles of dv x tiles of marks, blocks, G).
@compute @workgroup_size(128)
fn o1b_far_sums(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.z;
    let block = workgroup.y;
    let ring = ring_of(group, thread);
    let start = max(block * TILE, evictor_of(ring, 0u));
    let end = min(block * TILE + TILE, call.rows);
    if (start >= end) {
        return;
    }
    let mark_tiles = (mark_quads() + MARKS_TOGETHER - 1u) / MARKS_TOGETHER;
    let marks = workgroup.x % mark_tiles * MARKS_TOGETHER;
    let left = workgroup.x / mark_tiles * (WIDE / 4u);
    let y = thread / 16u;
    let x = thread % 16u;
    var sums = no_sums();
    var slice = block_slice(group, ring, start, end, marks, left, thread);
    for (var base = start; base < end; base += DEPTH) {
        workgroupBarrier();
        stage_rows_of_terms(slice, thread);
        stage_columns_of_terms(slice, thread);
        workgroupBarrier();
        if (base + DEPTH < end) {
            slice = block_slice(group, ring, base + DEPTH, end, marks, left, thread);
        }
        sums = add_staged(sums, y, x);
    }
    let at = numerator_at(group, block, 0u);
    let mark = (marks + y) * 4u;
    put_numerators(at, mark, left + x, sums.upper_left);
    put_numerators(at, mark, left + 16u + x, sums.upper_right);
    put_numerators(at, mark + 32u, left + x, sums.lower_left);
    put_numerators(at, mark + 32u, left + 16u + x, sums.lower_right);
}

// commit -----------------------------------------------------------------------------------------

// A number of a quad of marks in scratch.
fn of_mark(part: u32, mark: u32) -> f32 {
    return scratch[part + mark / 4u][mark % 4u];
}

struct Running {
    most: f32,
    mass: f32,
    numerator: vec4<f32>,
}

// What a block makes of the sums before it.
fn with_block(
    before: Running, group: u32, block: u32, ring: Ring, mark: u32, added: vec4<f32>
) -> Running {
    let last = min(block * TILE + TILE, call.rows) - 1u;
    if (last < evictor_of(ring, 0u)) {
        return before;
    }
    let peak = of_mark(call.far_peaks + far_at(group, last), mark);
    let block_mass = of_mark(block_mass_at(group, block), mark);
    let most = max(before.most, peak);
    let carry = decay(before.most - most);
    let share = decay(peak - most);
    return Running(most, before.mass * carry + block_mass * share,
                   before.numerator * carry + added * share);
}

// A landmark of a head, which a workgroup has to itself: maximum and mass are read by all its threads
// before the first one writes them. A thread has every 64th quad of the numerator.
fn far_commit(group: u32, ring: Ring, item: u32, thread: u32) {
    let width = quads(call.value_dim);
    let head = item / call.landmarks;
    let b = item % call.landmarks;
    let mark = head * quads(call.landmarks) * 4u + b;
    let far = group * call.heads_per_group + head;
    let most_at = far * 2u * call.landmarks + b;
    // An empty far field has no maximum: what the buffers then hold is not looked at.
    var start = Running(LOWEST, 0.0, vec4<f32>());
    if (ring.some) {
        start = Running(far_max_mass[most_at], far_max_mass[most_at + call.landmarks], vec4<f32>());
    }
    workgroupBarrier();
    for (var t = thread; t < width; t += 64u) {
        let state = (far * call.landmarks + b) * call.value_dim + 4u * t;
        let left = call.value_dim - 4u * t;
        var sums = start;
        if (ring.some) {
            let i = state + min(QUAD, vec4<u32>(left - 1u));
            sums.numerator = vec4<f32>(far_num[i.x], far_num[i.y], far_num[i.z], far_num[i.w]);
        }
        let step = mark_quads() * 4u * width;
        let at = numerator_at(group, 0u, mark) + t;
        var coming = scratch[at];
        for (var block = 0u; block < blocks(); block++) {
            let added = coming;
            // Asked for before it is needed: the sums wait for little else.
            coming = scratch[at + min(block + 1u, blocks() - 1u) * step];
            scratch[at + block * step] = sums.numerator;
            if (t == 0u) {
                scratch[running_at(group, block, mark)] = vec4<f32>(sums.most, sums.mass, 0.0, 0.0);
            }
            sums = with_block(sums, group, block, ring, mark, added);
        }
        for (var j = 0u; j < min(left, 4u); j++) {
            far_num[state + j] = sums.numerator[j];
        }
        if (t == 0u) {
            far_max_mass[most_at] = sums.most;
            far_max_mass[most_at + call.landmarks] = sums.mass;
        }
    }
}

// The last rows take their slots: `item` counts those.
fn ring_commit(group: u32, ring: Ring, item: u32, thread: u32) {
    let due = min(call.rows, ring.window);
    if (item >= due) {
        return;
    }
    let row = call.rows - due + item;
    let to = group * call.ring + (ring.head + ring.length + row) % ring.window;
    let source = row_place(group, row);
    for (var t = thread; t < call.head_dim; t += 64u) {
        ring_k[to * call.head_dim + t] = k[source * call.head_dim + t];
    }
    for (var t = thread; t < call.value_dim; t += 64u) {
        ring_v[to * call.value_dim + t] = v[source * call.value_dim + t];
    }
}

// Length, head and far count after the call.
fn commit_meta(group: u32, ring: Ring) {
    let at = group * 4u;
    let evicted = gone_by(ring, call.rows);
    group_meta[at] = ring.length + call.rows - evicted;
    group_meta[at + 1u] = (ring.head + evicted) % ring.window;
    group_meta[at + 2u] += evicted;
}

// Workgroups: (1 for meta, then rows that stay, then landmarks of all heads, G).
@compute @workgroup_size(64)
fn o1b_commit(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.y;
    let ring = ring_of(group, thread);
    let slots = min(call.rows, call.ring);
    if (workgroup.x == 0u) {
        if (thread == 0u) {
            commit_meta(group, ring);
        }
    } else if (workgroup.x <= slots) {
        ring_commit(group, ring, workgroup.x - 1u, thread);
    } else if (gone_by(ring, call.rows) > 0u) {
        far_commit(group, ring, workgroup.x - 1u - slots, thread);
    }
}

// weights ----------------------------------------------------------------------------------------

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

// 2^-60
const LEAST_SIZE = 8.67361738e-19;
// How far the peak of a block may lie above a maximum for factors to stay within float32.
const MOST_LEAP = 60.0;
const MOST_POWER = 100;
// Quads that each of the stores has room for, which hold a quad of rows by landmark.
const STORE = 256u;

// u; the bits of its power, later of the factor of the block's weights; the weight of the landmark's
// key, later the maximum at the row.
var<workgroup> u_store: array<vec4<f32>, 256>;
var<workgroup> power_store: array<vec4<i32>, 256>;
var<workgroup> most_store: array<vec4<f32>, 256>;
var<workgroup> partial: array<vec4<f32>, 128>;

// Quads of rows that a workgroup has, side by side: as many as its memory has room for.
fn quads_side_by_side() -> u32 {
    let each = quads(call.landmarks) * 4u;
    var side = 8u;
    while (side > 1u && side * each > STORE) {
        side /= 2u;
    }
    return side;
}

// The largest of what the threads of a quad of rows pass.
fn largest(thread: u32, side: u32, x: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    partial[thread] = x;
    workgroupBarrier();
    var best = x;
    for (var i = thread % side; i < THREADS; i += side) {
        best = max(best, partial[i]);
    }
    return best;
}

fn total(thread: u32, side: u32, x: vec4<f32>) -> vec4<f32> {
    workgroupBarrier();
    partial[thread] = x;
    workgroupBarrier();
    var sum = vec4<f32>();
    for (var i = thread % side; i < THREADS; i += side) {
        sum += partial[i];
    }
    return sum;
}

// u of landmark b, for one of four rows, with all its terms, however far apart: each keeps a power of
// two of its own. The logits of the landmark keys begin at `logits`, and mix[., b] at `column`.
fn mix_apart(column: u32, logits: u32, row: u32, top_logit: f32) -> Scaled {
    var u = Scaled(0.0, -0x40000000);
    for (var a = 0u; a < call.landmarks; a++) {
        let x = split(bitcast<u32>(mixing[column + a * call.landmarks]));
        if (x.value != 0.0) {
            let f = scaled_exp(scratch[logits + a * 16u][row] - top_logit);
            u.power = max(u.power, f.power + x.power);
        }
    }
    for (var a = 0u; a < call.landmarks; a++) {
        let x = split(bitcast<u32>(mixing[column + a * call.landmarks]));
        let f = scaled_exp(scratch[logits + a * 16u][row] - top_logit);
        u.value += f.value * x.value * power_of_two(f.power + x.power - u.power);
    }
    return u;
}

// u of landmark b into the stores, at `to`; those of the weights begin at `stored`.
fn mix_landmark(
    column: u32, logits: u32, top_logit: vec4<f32>, stored: u32, side: u32, to: u32
) {
    let m = call.landmarks;
    var u = vec4<f32>();
    var sizes = vec4<f32>();
    var entry = 0.0;
    for (var a = 0u; a < m; a++) {
        let weight = most_store[stored + a * side];
        let x = mixing[column + a * m];
        u += weight * x;
        sizes += weight * abs(x);
        entry = max(entry, abs(x));
    }
    var powers = vec4<i32>();
    // Terms may be lost below float32, unless what is there dwarfs all that can be lost.
    let safe = (sizes > vec4<f32>(LEAST_SIZE)) & (sizes > vec4<f32>(entry * LEAST_SIZE));
    if (!all(safe)) {
        for (var r = 0u; r < 4u; r++) {
            let apart = mix_apart(column, logits, r, top_logit[r]);
            u[r] = apart.value;
            powers[r] = apart.power;
        }
    }
    if (clamps_weights()) {
        u = max(u, vec4<f32>());
    }
    u_store[to] = u;
    power_store[to] = powers;
}

// Whether a key is in the window, for each of four rows.
fn is_live(key: u32, near: vec4<u32>, coming: vec4<u32>) -> vec4<bool> {
    return (vec4<u32>(key) >= near) & (vec4<u32>(key) < coming);
}

// Logits of the rows of a head become the weights of their values (section 4 with its four rules), to
// be multiplied by the rows' shares. A thread has four rows, and of their columns each `lanes`th.
// Workgroups: (parts of tiles, G).
@compute @workgroup_size(128)
fn o1b_weights(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.y;
    let ring = ring_of(group, thread);
    let m = call.landmarks;
    let side = quads_side_by_side();
    let lane = thread / side;
    let lanes = THREADS / side;
    let parts = 16u / side;
    let tile = workgroup.x / parts;
    let quad = workgroup.x % parts * side + thread % side;
    let span = span_of(tile, ring);
    let number = min(tile * TILE + quad * 4u, all_queries() - 4u);
    let head = number / head_rows();
    let row = min(number % head_rows() + QUAD, vec4<u32>(call.rows - 1u));
    // Columns: landmarks; sinks; keys from the span's start on, evicted up to near, live up to coming,
    // of rows to come up to keys.
    let at = tile_weights_at(group, tile) + quad;
    let sinks_at = at + m * 16u;
    let keys_at = sinks_at + sinks() * 16u;
    let keys = span.end - m - sinks();
    let near = vec4<u32>(gone(ring, row.x), gone(ring, row.y), gone(ring, row.z), gone(ring, row.w))
        - span.start;
    let coming = ring.length + row + 1u - span.start;

    var shift = vec4<f32>(LOWEST);
    for (var c = lane; c < sinks(); c += lanes) {
        shift = max(shift, scratch[sinks_at + c * 16u]);
    }
    for (var c = lane; c < coming.w; c += lanes) {
        let logits = scratch[keys_at + c * 16u];
        shift = select(shift, max(shift, logits), is_live(c, near, coming));
    }
    shift = largest(thread, side, shift);

    var factor = vec4<f32>();
    var mass = vec4<f32>();
    if (m > 0u && gone(ring, span.last_row) > 0u) {
        let stored = thread % side;
        let first_mark = head * quads(m) * 4u;
        let block = span.first_row / TILE;
        let mix = (group * call.heads_per_group + head) * m * m;
        var top_logit = vec4<f32>(LOWEST);
        for (var a = lane; a < m; a += lanes) {
            top_logit = max(top_logit, scratch[at + a * 16u]);
        }
        top_logit = largest(thread, side, top_logit);
        for (var a = lane; a < m; a += lanes) {
            most_store[stored + a * side] = decays(scratch[at + a * 16u] - top_logit);
        }
        workgroupBarrier();
        for (var b = lane; b < m; b += lanes) {
            mix_landmark(mix + b, at, top_logit, stored, side, stored + b * side);
        }
        workgroupBarrier();
        // The scale of landmark b is log|u_b| + far_max_b, where far_max_b is that at the row: of the
        // blocks before, and of this one up to the row.
        let seen = near > vec4<u32>();
        var top = vec4<f32>(LOWEST);
        for (var b = lane; b < m; b += lanes) {
            let mark = first_mark + b;
            var most = vec4<f32>(scratch[running_at(group, block, mark)].x);
            if (near.w > 0u) {
                let peaks = vec4<f32>(
                    of_mark(call.far_peaks + far_at(group, row.x), mark),
                    of_mark(call.far_peaks + far_at(group, row.y), mark),
                    of_mark(call.far_peaks + far_at(group, row.z), mark),
                    of_mark(call.far_peaks + far_at(group, row.w), mark),
                );
                most = select(most, max(most, peaks), seen);
            }
            most_store[stored + b * side] = most;
            let u = u_store[stored + b * side];
            let size = log(max(abs(u), vec4<f32>(1e-37)));
            let scale = most + vec4<f32>(power_store[stored + b * side]) * LN2 + size;
            top = select(top, max(top, scale), u != vec4<f32>());
        }
        top = largest(thread, side, top);
        // Everything far is now relative to exp(top + top_logit). With the weights that far_sums has
        // used, relative to the peak of the block, those of the rows' evicted keys are a product; but
        // where that peak comes later than the row and is far above, a landmark's factor would
        // overflow, and each key has to be seen from the maximum at the row.
        var leap = vec4<f32>(LOWEST);
        for (var b = lane; b < quads(m) * 4u; b += lanes) {
            let to = stored + b * side;
            if (b >= m) {
                // Loops go on in fours: the copies of the last landmark do not count.
                u_store[to] = vec4<f32>();
                power_store[to] = vec4<i32>();
                most_store[to] = vec4<f32>();
                continue;
            }
            let u = u_store[to];
            let most = most_store[to];
            let powers = power_store[to];
            var peak = most;
            if (near.w > 0u) {
                let last = of_mark(call.far_peaks + far_at(group, span.last_row), first_mark + b);
                peak = select(most, vec4<f32>(last), seen);
                leap = select(leap, max(leap, peak - most), seen & (u != vec4<f32>()));
            }
            var gain = vec4<f32>();
            var product = vec4<f32>();
            for (var r = 0u; r < 4u; r++) {
                let e = scaled_exp(most[r] - top[r]);
                gain[r] = u[r] * e.value * power_of_two(e.power + powers[r]);
                // Of what is below the row's maximum, nothing can overflow.
                let p = scaled_exp(peak[r] - top[r]);
                product[r] = u[r] * p.value * power_of_two(min(p.power + powers[r], MOST_POWER));
            }
            u_store[to] = gain;
            power_store[to] = bitcast<vec4<i32>>(product);
            let before = scratch[running_at(group, block, first_mark + b)];
            let old = gain * decays(vec4<f32>(before.x) - most);
            mass += old * before.y;
            scratch[at + b * 16u] = old;
        }
        leap = largest(thread, side, leap);
        let near_leap = all(leap <= vec4<f32>(MOST_LEAP));
        for (var c = lane; c < near.w; c += lanes) {
            let evictor = evictor_of(ring, span.start + c);
            let far = far_at(group, evictor) + head * quads(m);
            var sum = vec4<f32>();
            if (near_leap) {
                for (var b = 0u; b < quads(m); b++) {
                    let weights = scratch[call.far_weights + far + b];
                    let place = stored + 4u * b * side;
                    sum += bitcast<vec4<f32>>(power_store[place]) * weights.x;
                    sum += bitcast<vec4<f32>>(power_store[place + side]) * weights.y;
                    sum += bitcast<vec4<f32>>(power_store[place + 2u * side]) * weights.z;
                    sum += bitcast<vec4<f32>>(power_store[place + 3u * side]) * weights.w;
                }
            } else {
                for (var b = 0u; b < m; b++) {
                    let logit = scratch[call.far_logits + far + b / 4u][b % 4u];
                    let place = stored + b * side;
                    sum += u_store[place] * decays(vec4<f32>(logit) - most_store[place]);
                }
            }
            sum = select(vec4<f32>(), sum, vec4<u32>(c) < near);
            mass += sum;
            // Of a row that has the key in its window, the logit is still needed.
            let held = scratch[keys_at + c * 16u];
            scratch[keys_at + c * 16u] = select(held, sum, vec4<u32>(c) < near);
        }
        mass = total(thread, side, mass);
        // A far field of negative mass, or of none, is dropped, and leaves the shift alone.
        let kept = mass > vec4<f32>();
        let far_shift = top + top_logit;
        shift = select(shift, max(shift, far_shift), kept);
        factor = select(vec4<f32>(), decays(far_shift - shift), kept);
    }

    // Columns are those that the thread has dealt with above, so it waits for no other.
    let far = factor > vec4<f32>();
    var sum = vec4<f32>();
    for (var c = lane; c < sinks(); c += lanes) {
        let weights = decays(scratch[sinks_at + c * 16u] - shift);
        sum += weights;
        scratch[sinks_at + c * 16u] = weights;
    }
    for (var c = lane; c < keys; c += lanes) {
        let held = scratch[keys_at + c * 16u];
        var weights = select(vec4<f32>(), held * factor, far & (vec4<u32>(c) < near));
        let live = is_live(c, near, coming);
        weights = select(weights, decays(held - shift), live);
        sum += select(vec4<f32>(), weights, live);
        scratch[keys_at + c * 16u] = weights;
    }
    for (var b = lane; b < m; b += lanes) {
        // Without a far field nobody computed these, so they may hold anything.
        let held = scratch[at + b * 16u];
        scratch[at + b * 16u] = select(vec4<f32>(), held * factor, far);
    }
    sum = total(thread, side, sum);
    sum = select(sum, sum + mass * factor, far);
    if (lane == 0u) {
        scratch[shares_at(group, tile) + quad] = 1.0 / max(sum, vec4<f32>(FLOOR));
    }
}

// attend -----------------------------------------------------------------------------------------

// Terms are sinks and keys.
fn near_slice(group: u32, tile: u32, span: Span, base: u32, left: u32, thread: u32) -> Slice {
    let end = span.end - call.landmarks;
    let last = end - 1u;
    let at = tile_weights_at(group, tile) + call.landmarks * 16u + thread % 16u;
    let a = base + thread / 16u;
    let b = base + thread / 32u;
    let t = min(left + thread % 32u, quads(call.value_dim) - 1u);
    return Slice(
        select(vec4<f32>(), scratch[at + min(a, last) * 16u], a < end),
        select(vec4<f32>(), scratch[at + min(a + 8u, last) * 16u], a + 8u < end),
        near_value(group, span, min(b, last), t),
        near_value(group, span, min(b + 4u, last), t),
        near_value(group, span, min(b + 8u, last), t),
        near_value(group, span, min(b + 12u, last), t),
    );
}

fn near_value(group: u32, span: Span, number: u32, t: u32) -> vec4<f32> {
    return scratch[value_at(group, number + select(0u, span.start, number >= sinks())) + t];
}

// Terms are landmarks of a head, whose far numerators the rows of other heads weigh with 0.
fn far_slice(group: u32, tile: u32, block: u32, head: u32, base: u32, left: u32, thread: u32)
    -> Slice {
    let m = call.landmarks;
    let last = m - 1u;
    let at = tile_weights_at(group, tile) + thread % 16u;
    let a = base + thread / 16u;
    let b = base + thread / 32u;
    let width = quads(call.value_dim);
    let t = min(left + thread % 32u, width - 1u);
    let num = numerator_at(group, block, head * quads(m) * 4u) + t;
    let own = (tile * TILE + thread % 16u * 4u) / head_rows() == head;
    return Slice(
        select(vec4<f32>(), scratch[at + min(a, last) * 16u], own && a < m),
        select(vec4<f32>(), scratch[at + min(a + 8u, last) * 16u], own && a + 8u < m),
        scratch[num + min(b, last) * width], scratch[num + min(b + 4u, last) * width],
        scratch[num + min(b + 8u, last) * width], scratch[num + min(b + 12u, last) * width],
    );
}

fn stage_quarter(y: u32, x: u32, shares: vec4<f32>, values: Quarter) {
    tile_b[y * 64u + x] = values.row0 * shares.x;
    tile_b[y * 64u + 16u + x] = values.row1 * shares.y;
    tile_b[y * 64u + 32u + x] = values.row2 * shares.z;
    tile_b[y * 64u + 48u + x] = values.row3 * shares.w;
}

// The staged 32 x 64 results, from this row and column on, by neighbouring threads side by side.
fn put_results(group: u32, first: u32, column: u32, thread: u32) {
    let c = column + thread % 64u;
    for (var i = thread / 64u; i < 32u; i += 2u) {
        let number = first + i;
        let row = number % head_rows();
        if (number < all_queries() && row < call.rows && c < call.value_dim) {
            let head = group * call.heads_per_group + number / head_rows();
            let at = ((call.first_row + row) * call.heads + head) * call.value_dim;
            result[at + c] = tile_b[i * 16u + thread % 64u / 4u][thread % 4u];
        }
    }
}

// Workgroups: (tiles of dv x tiles of queries, G).
@compute @workgroup_size(128)
fn o1b_attend(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let group = workgroup.y;
    let ring = ring_of(group, thread);
    let m = call.landmarks;
    let wides = (call.value_dim + WIDE - 1u) / WIDE;
    let tile = workgroup.x / wides;
    let left = workgroup.x % wides * (WIDE / 4u);
    let span = span_of(tile, ring);
    let end = span.end - m;
    let y = thread / 16u;
    let x = thread % 16u;
    var sums = no_sums();
    var slice = near_slice(group, tile, span, 0u, left, thread);
    for (var base = 0u; base < end; base += DEPTH) {
        workgroupBarrier();
        stage_rows_of_terms(slice, thread);
        stage_columns_of_terms(slice, thread);
        workgroupBarrier();
        if (base + DEPTH < end) {
            slice = near_slice(group, tile, span, base + DEPTH, left, thread);
        }
        sums = add_staged(sums, y, x);
    }
    if (m > 0u && gone(ring, span.last_row) > 0u) {
        let block = span.first_row / TILE;
        let first_head = tile * TILE / head_rows();
        let last_head = (min(tile * TILE + TILE, all_queries()) - 1u) / head_rows();
        for (var head = first_head; head <= last_head; head++) {
            for (var base = 0u; base < m; base += DEPTH) {
                let part = far_slice(group, tile, block, head, base, left, thread);
                workgroupBarrier();
                stage_rows_of_terms(part, thread);
                stage_columns_of_terms(part, thread);
                workgroupBarrier();
                sums = add_staged(sums, y, x);
            }
        }
    }
    let upper = scratch[shares_at(group, tile) + y];
    let lower = scratch[shares_at(group, tile) + y + 8u];
    let first = tile * TILE;
    let column = left * 4u;
    workgroupBarrier();
    stage_quarter(y, x, upper, sums.upper_left);
    workgroupBarrier();
    put_results(group, first, column, thread);
    workgroupBarrier();
    stage_quarter(y, x, upper, sums.upper_right);
    workgroupBarrier();
    put_results(group, first, column + 64u, thread);
    workgroupBarrier();
    stage_quarter(y, x, lower, sums.lower_left);
    workgroupBarrier();
    put_results(group, first + 32u, column, thread);
    workgroupBarrier();
    stage_quarter(y, x, lower, sums.lower_right);
    workgroupBarrier();
    put_results(group, first + 32u, column + 64u, thread);
}
