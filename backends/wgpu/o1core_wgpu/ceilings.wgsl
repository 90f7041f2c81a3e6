// What an adapter can do at best, for `o1core bench`: a product of square matrices and a copy.

override SIZE: u32 = 4096u;  // rows of a matrix, a multiple of 128

// `a` is stored transposed, [k, rows], so that both operands are read along their rows.
@group(0) @binding(0) var<storage, read> a: array<vec4<f32>>;
@group(0) @binding(1) var<storage, read> b: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> c: array<vec4<f32>>;

const SLICE = 16u;
const TILE = 32u;  // in vec4, so 128 rows and 128 columns

var<workgroup> a_tile: array<vec4<f32>, 512>;  // [SLICE, TILE]
var<workgroup> b_tile: array<vec4<f32>, 512>;

@compute @workgroup_size(16, 16)
fn product(
    @builtin(workgroup_id) tile: vec3<u32>,
    @builtin(local_invocation_id) at: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let width = SIZE / 4u;
    // Eight rows and eight columns a thread, in two halves that lie 64 apart.
    var sums: array<array<vec4<f32>, 2>, 8>;
    for (var first = 0u; first < SIZE; first += SLICE) {
        for (var i = thread; i < SLICE * TILE; i += 256u) {
            let row = (first + i / TILE) * width;
            a_tile[i] = a[row + tile.y * TILE + i % TILE];
            b_tile[i] = b[row + tile.x * TILE + i % TILE];
        }
        workgroupBarrier();
        for (var k = 0u; k < SLICE; k += 1u) {
            let left = a_tile[k * TILE + at.y];
            let right = a_tile[k * TILE + 16u + at.y];
            let low = b_tile[k * TILE + at.x];
            let high = b_tile[k * TILE + 16u + at.x];
            for (var i = 0u; i < 4u; i += 1u) {
                sums[i][0] += left[i] * low;
                sums[i][1] += left[i] * high;
                sums[i + 4u][0] += right[i] * low;
                sums[i + 4u][1] += right[i] * high;
            }
        }
        workgroupBarrier();
    }
    for (var i = 0u; i < 8u; i += 1u) {
        let row = tile.y * 128u + (i / 4u) * 64u + at.y * 4u + i % 4u;
        c[row * width + tile.x * TILE + at.x] = sums[i][0];
        c[row * width + tile.x * TILE + 16u + at.x] = sums[i][1];
    }
}

@compute @workgroup_size(256)
fn copy(@builtin(global_invocation_id) at: vec3<u32>) {
    c[at.x] = a[at.x];
}
