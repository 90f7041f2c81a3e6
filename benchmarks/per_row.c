/*
 * A compiled per-row loop: the speed baseline that the batched backends have to beat.
 *
 * One call feeds rows, one after the other, to one KV group with H query heads. Every row is first
 * pushed (the oldest key of a full ring moves to the far field, the new key takes its slot) and
 * then read by all H heads, as a decoding loop would do it. Nothing is shared between two rows;
 * within a row everything that can be shared is:
 *
 *   - a key or value is loaded once for a block of up to six heads, whose sums stay in registers:
 *     6 heads x 2 vectors are 12 of the 16 registers of AVX2, and enough to hide the FMA latency;
 *   - the far numerator, the largest part of the state, is swept once per row: the pass that adds
 *     the evicted value also reads, and rescales a head only if one of its maxima moved;
 *   - exp works on a vector at a time, and memory is allocated once per call.
 *
 * The rectifier is "aggregate". The vectors are the extension that GCC 12 and Clang share, so speed
 * does not depend on -ffast-math. Do not use that flag: it breaks exp_vec, which relies on
 * rounding. -O3 matters: it unrolls the loops over heads, without which the sums live in memory.
 * Build: cc -std=gnu11 -O3 -march=native -ffp-contract=fast -fPIC -shared (see per_row.py).
 */
#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    LANES = 8,       /* floats per vector */
    HEAD_BLOCK = 6,  /* heads whose sums live in registers together */
    KEY_PAIR = 2,    /* keys per step of the dot-product kernel */
    MAX_COLUMNS = 4, /* vectors per step of the kernels over values */
    AHEAD = 8        /* rows between a value and the one fetched ahead of it */
};

typedef float vec __attribute__((vector_size(LANES * sizeof(float))));
typedef float vec4 __attribute__((vector_size(4 * sizeof(float))));
typedef float vec2 __attribute__((vector_size(2 * sizeof(float))));
typedef int32_t ivec __attribute__((vector_size(LANES * sizeof(int32_t))));
/* The same vectors at any float address. */
typedef vec vec_at __attribute__((aligned(4), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define SHUFFLE __builtin_shufflevector

/* Keeps a loaded vector in a register; GCC would rather load it again for every use. */
#if defined(__x86_64__) && defined(__AVX__)
#define IN_REGISTER(x) __asm__("" : "+x"(x))
#else
#define IN_REGISTER(x) ((void)0)
#endif

INLINE vec load(const float *p) { return *(const vec_at *)p; }
INLINE void store(float *p, vec x) { *(vec_at *)p = x; }
INLINE vec spread(float x) { return (vec){x, x, x, x, x, x, x, x}; }
/* The first n lanes, the others 0. */
INLINE vec load_some(const float *p, size_t n) {
    if (n >= LANES) return load(p);
    vec x = {0};
    memcpy(&x, p, n * sizeof *p);
    return x;
}
/* The sums of the lanes of x and of y. */
INLINE vec2 totals(vec x, vec y) {
    const vec4 a = SHUFFLE(x, x, 0, 1, 2, 3) + SHUFFLE(x, x, 4, 5, 6, 7);
    const vec4 b = SHUFFLE(y, y, 0, 1, 2, 3) + SHUFFLE(y, y, 4, 5, 6, 7);
    const vec4 ab = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
    return SHUFFLE(ab, ab, 0, 1) + SHUFFLE(ab, ab, 2, 3);
}
INLINE float total(vec x) { return totals(x, x)[0]; }
INLINE float larger(float a, float b) { return a > b ? a : b; }
INLINE size_t round_up(size_t n) { return (n + LANES - 1) / LANES * LANES; }

/* ------------------------------------------------------------------ exponentials */

/*
 * exp(x) for x <= 0, 2 ulp; exactly 0 below the normal range (and at -inf).
 * x = n ln2 + r with |r| <= ln2 / 2; a polynomial gives exp(r), n goes into the exponent bits.
 */
INLINE vec exp_vec(vec x) {
    const vec lowest = spread(-87.33f), to_int = spread(12582912.0f); /* 1.5 * 2^23 */
    const ivec in_range = x > lowest;
    x = (vec)(in_range & (ivec)x);
    const vec shifted = x * spread(1.44269504f) + to_int;
    const vec n = shifted - to_int;
    const vec r = (x - n * spread(0.693359375f)) - n * spread(-2.12194440e-4f);
    vec p = spread(1.0f / 5040);
    p = p * r + spread(1.0f / 720);
    p = p * r + spread(1.0f / 120);
    p = p * r + spread(1.0f / 24);
    p = p * r + spread(1.0f / 6);
    p = p * r + spread(0.5f);
    p = p * r + spread(1.0f);
    p = p * r + spread(1.0f);
    const ivec scaled = (ivec)p + (((ivec)shifted - (ivec)to_int) << 23);
    return (vec)(in_range & scaled);
}

static float exp_one(float x) { return exp_vec(spread(x))[0]; }

/* x[i] = exp(x[i] - shift), the padding up to a whole vector becomes 0; returns the sum. */
static float exp_all(float *x, size_t n, float shift) {
    for (size_t i = n; i < round_up(n); i++) x[i] = -INFINITY;
    vec sum = spread(0.0f);
    for (size_t i = 0; i < n; i += LANES) {
        const vec e = exp_vec(load(x + i) - spread(shift));
        store(x + i, e);
        sum += e;
    }
    return total(sum);
}

static float largest(const float *x, size_t n) {
    float best[LANES], top = -INFINITY;
    for (int l = 0; l < LANES; l++) best[l] = -INFINITY;
    size_t i = 0;
    for (; i + LANES <= n; i += LANES)
        for (int l = 0; l < LANES; l++) best[l] = larger(x[i + l], best[l]);
    for (; i < n; i++) top = larger(x[i], top);
    for (int l = 0; l < LANES; l++) top = larger(best[l], top);
    return top;
}

/* ------------------------------------------------------------------ the two dense kernels */

/* Expands to a call of `kernel` with the number of heads as a constant, so that it is unrolled. */
/* clang-format off */
#define FOR_HEADS(heads, kernel, ...)                 \
    switch (heads) {                                  \
    case 1: kernel(1, __VA_ARGS__); break;            \
    case 2: kernel(2, __VA_ARGS__); break;            \
    case 3: kernel(3, __VA_ARGS__); break;            \
    case 4: kernel(4, __VA_ARGS__); break;            \
    case 5: kernel(5, __VA_ARGS__); break;            \
    default: kernel(HEAD_BLOCK, __VA_ARGS__); break;  \
    }
/* clang-format on */

/* Heads of the block that starts at `first`, at most HEAD_BLOCK and as even as possible. */
static size_t block_of(size_t first, size_t heads) {
    const size_t left = heads - first, blocks = (left + HEAD_BLOCK - 1) / HEAD_BLOCK;
    return (left + blocks - 1) / blocks;
}

/* One step of LANES columns: sum[h][j] += q[h] * k[j]; `get` loads a vector. */
#define DOT_STEP(get)                                                      \
    do {                                                                   \
        vec key[KEY_PAIR];                                                 \
        for (size_t j = 0; j < keys; j++) key[j] = get(k + j * d + c);     \
        for (size_t h = 0; h < heads; h++) {                               \
            vec query = get(q + h * d + c);                                \
            IN_REGISTER(query);                                            \
            for (size_t j = 0; j < keys; j++) sum[h][j] += query * key[j]; \
        }                                                                  \
    } while (0)
#define GET_TAIL(p) load_some(p, d - c)

/* out[h][j] = scale * <q[h], k[j]> for a constant number of heads and of keys. */
INLINE void dot_tile(const size_t heads, const size_t keys, const float *q, const float *k,
                     size_t d, float scale, float *out, size_t stride) {
    vec sum[HEAD_BLOCK][KEY_PAIR];
    for (size_t h = 0; h < heads; h++)
        for (size_t j = 0; j < KEY_PAIR; j++) sum[h][j] = spread(0.0f);
    size_t c = 0;
    for (; c + LANES <= d; c += LANES) DOT_STEP(load);
    if (c < d) DOT_STEP(GET_TAIL);
    for (size_t h = 0; h < heads; h++) {
        const vec2 pair = scale * totals(sum[h][0], sum[h][1]);
        memcpy(out + h * stride, &pair, keys * sizeof(float));
    }
}

INLINE void dot_block(const size_t heads, const float *q, const float *k, size_t n, size_t d,
                      float scale, float *out, size_t stride) {
    size_t j = 0;
    for (; j + KEY_PAIR <= n; j += KEY_PAIR)
        dot_tile(heads, KEY_PAIR, q, k + j * d, d, scale, out + j, stride);
    for (; j < n; j++) dot_tile(heads, 1, q, k + j * d, d, scale, out + j, stride);
}

/* out[h][j] = scale * <q[h], k[j]>: q is [heads, d], k is [n, d]. */
static void dots(const float *q, size_t heads, const float *k, size_t n, size_t d, float scale,
                 float *out, size_t stride) {
    for (size_t h = 0, block; h < heads; h += block) {
        block = block_of(h, heads);
        FOR_HEADS(block, dot_block, q + h * d, k, n, d, scale, out + h * stride, stride)
    }
}

/* `vectors` columns of out[h] += sum over j of weight[h][j] * v[j]; both counts are constant. */
INLINE void blend_columns(const size_t heads, const size_t vectors, const float *weight,
                          size_t stride, const float *v, size_t n, size_t dv, float *out) {
    vec sum[HEAD_BLOCK][MAX_COLUMNS];
    for (size_t h = 0; h < heads; h++)
        for (size_t i = 0; i < vectors; i++) sum[h][i] = load(out + h * dv + i * LANES);
    for (size_t j = 0; j < n; j++, v += dv) {
        vec value[MAX_COLUMNS];
        for (size_t i = 0; i < vectors; i++) value[i] = load(v + i * LANES);
        /* The stride defeats the hardware. A fetch past the end is ignored. */
        __builtin_prefetch(v + AHEAD * dv);
        for (size_t h = 0; h < heads; h++) {
            const vec w = spread(weight[h * stride + j]);
            for (size_t i = 0; i < vectors; i++) sum[h][i] += w * value[i];
        }
    }
    for (size_t h = 0; h < heads; h++)
        for (size_t i = 0; i < vectors; i++) store(out + h * dv + i * LANES, sum[h][i]);
}

INLINE void blend_block(const size_t heads, const float *weight, size_t stride, const float *v,
                        size_t n, size_t dv, float *out) {
    const size_t vectors = heads > 3 ? 2 : MAX_COLUMNS;
    size_t c = 0;
    for (; c + vectors * LANES <= dv; c += vectors * LANES)
        blend_columns(heads, vectors, weight, stride, v + c, n, dv, out + c);
    for (; c + LANES <= dv; c += LANES)
        blend_columns(heads, 1, weight, stride, v + c, n, dv, out + c);
    for (; c < dv; c++)
        for (size_t h = 0; h < heads; h++)
            for (size_t j = 0; j < n; j++)
                out[h * dv + c] += weight[h * stride + j] * v[j * dv + c];
}

/* out[h] += sum over j of weight[h][j] * v[j]: v is [n, dv], out is [heads, dv]. */
static void blend(const float *weight, size_t stride, size_t heads, const float *v, size_t n,
                  size_t dv, float *out) {
    for (size_t h = 0, block; h < heads; h += block) {
        block = block_of(h, heads);
        FOR_HEADS(block, blend_block, weight + h * stride, stride, v, n, dv, out + h * dv)
    }
}

/* ------------------------------------------------------------------ the far field */

/*
 * The evicted key meets every landmark of every head (count = H * m): maxima and masses are
 * updated, and what the sweep over far_num has to do is left in `gain` (weight of the evicted
 * value) and `keep` (factor on the old sum, 1 unless the maximum moved).
 */
static void far_absorb(const float *q_landmarks, const float *key, size_t count, size_t d,
                       float scale, float *far_max, float *far_mass, float *gain, float *keep) {
    dots(q_landmarks, count, key, 1, d, scale, gain, 1);
    for (size_t i = 0; i < count; i++) {
        const float old = far_max[i], top = larger(gain[i], old);
        far_max[i] = top;
        gain[i] -= top;
        keep[i] = old - top;
    }
    exp_all(gain, count, 0.0f);
    exp_all(keep, count, 0.0f);
    for (size_t i = 0; i < count; i++) far_mass[i] = far_mass[i] * keep[i] + gain[i];
}

/*
 * What one head reads from the landmarks: `logits` holds its m landmark logits and becomes the
 * weight of every row of far_num. Weights and the returned denominator are relative to exp(*shift).
 * A far field to be dropped returns 0 with *shift = -inf.
 *
 * Landmark b carries the scale f + far_max_b + log|u_b|. Splitting u_b = mantissa * 2^exponent,
 * with the mantissa in [0.5, 1), gives that scale to within ln 2 without a logarithm, and a
 * landmark with u_b = 0 never enters the shift.
 */
static float far_weights(float *logits, const float *mix, const float *far_max,
                         const float *far_mass, size_t m, float *u, float *shift) {
    const size_t padded = round_up(m);
    const float f = largest(logits, m);
    exp_all(logits, m, f);
    memset(u, 0, padded * sizeof *u);
    blend(logits, padded, 1, mix, m, m, u);

    for (size_t b = 0; b < m; b += LANES) {
        const ivec bits = (ivec)load(u + b), exponent = ((bits >> 23) & 0xff) - 126;
        const vec size = f + load_some(far_max + b, m - b) +
                         0.69314718f * __builtin_convertvector(exponent, vec);
        const ivec used = exponent > -126; /* 0 and subnormal numbers count as 0 */
        store(logits + b, (vec)((used & (ivec)size) | (~used & (ivec)spread(-INFINITY))));
        store(u + b, (vec)((bits & (int32_t)0x807fffff) | 0x3f000000));
    }
    const float top = largest(logits, m);
    *shift = -INFINITY;
    if (top == -INFINITY) return 0.0f;
    exp_all(logits, m, top);
    vec masses = spread(0.0f);
    for (size_t b = 0; b < m; b += LANES) {
        const vec weight = load(logits + b) * load(u + b);
        store(logits + b, weight);
        masses += weight * load_some(far_mass + b, m - b);
    }
    const float mass = total(masses);
    if (!(mass >= 0.0f)) return 0.0f;
    *shift = top;
    return mass;
}

/* `vectors` columns (a constant) of num = num * keep + gain * value and out += weight * num. */
INLINE void sweep_columns(const size_t vectors, const int rescale, const float *keep,
                          const float *gain, const float *weight, const float *value, size_t m,
                          size_t dv, float *num, float *out) {
    vec sum[MAX_COLUMNS], v[MAX_COLUMNS];
    for (size_t i = 0; i < vectors; i++) {
        sum[i] = load(out + i * LANES);
        v[i] = load(value + i * LANES);
    }
    for (size_t b = 0; b < m; b++, num += dv) {
        for (size_t i = 0; i < vectors; i++) {
            vec x = load(num + i * LANES);
            if (rescale) x *= spread(keep[b]);
            x += spread(gain[b]) * v[i];
            store(num + i * LANES, x);
            sum[i] += spread(weight[b]) * x;
        }
    }
    for (size_t i = 0; i < vectors; i++) store(out + i * LANES, sum[i]);
}

/* One pass over the far numerator of one head: absorbs the evicted value and reads. */
static void far_sweep(const float *keep, const float *gain, const float *weight, const float *value,
                      size_t m, size_t dv, float *num, float *out) {
    int moved = 0;
    for (size_t b = 0; b < m; b++) moved |= keep[b] != 1.0f;
    size_t c = 0;
    for (; c + MAX_COLUMNS * LANES <= dv; c += MAX_COLUMNS * LANES)
        if (moved)
            sweep_columns(MAX_COLUMNS, 1, keep, gain, weight, value + c, m, dv, num + c, out + c);
        else
            sweep_columns(MAX_COLUMNS, 0, keep, gain, weight, value + c, m, dv, num + c, out + c);
    for (; c + LANES <= dv; c += LANES)
        sweep_columns(1, 1, keep, gain, weight, value + c, m, dv, num + c, out + c);
    for (; c < dv; c++)
        for (size_t b = 0; b < m; b++) {
            const float x = num[b * dv + c] * keep[b] + gain[b] * value[c];
            num[b * dv + c] = x;
            out[c] += weight[b] * x;
        }
}

/* ------------------------------------------------------------------ rows */

/* A run of consecutive near keys. */
typedef struct {
    const float *keys, *values;
    size_t count;
} span;

/*
 * Feeds `rows` rows to one group and writes what its heads read; the state advances in place.
 * Shapes: q [rows,H,d], k [rows,d], v [rows,dv], ring_k [w,d], ring_v [w,dv], sink_k [S,d],
 * sink_v [S,dv], k_landmarks [m,d], q_landmarks [H,m,d], mix [H,m,m], far_max and far_mass [H,m],
 * far_num [H,m,dv], meta {len, head, far}, out [rows,H,dv]. m = 0 is sinks and window alone.
 * Returns 0, or 1 without having done anything when there is no memory for the scratch.
 */
int o1_rows(int64_t rows, int64_t H, int64_t d, int64_t dv, int64_t S, int64_t w, int64_t m,
            float scale, const float *q, const float *k, const float *v, float *ring_k,
            float *ring_v, const float *sink_k, const float *sink_v, const float *k_landmarks,
            const float *q_landmarks, const float *mix, float *far_max, float *far_mass,
            float *far_num, int64_t *meta, float *out) {
    const size_t heads = (size_t)H, near_stride = round_up((size_t)(S + w));
    const size_t far_stride = round_up((size_t)m), landmarks = round_up((size_t)(H * m));
    const size_t floats =
        heads * (near_stride + far_stride) + 2 * landmarks + far_stride + (size_t)dv;
    float *const scratch = calloc(floats + LANES, sizeof *scratch);
    if (!scratch) return 1;
    float *const near = scratch;                   /* [H, near_stride] logits, then weights */
    float *const far = near + heads * near_stride; /* [H, far_stride] the same for landmarks */
    float *const gain = far + heads * far_stride;  /* [H, m] weight of the evicted value */
    float *const keep = gain + landmarks;          /* [H, m] factor on the old numerator */
    float *const u = keep + landmarks;             /* [m] */
    float *const gone = u + far_stride;            /* [dv] the evicted value */
    int64_t len = meta[0], head = meta[1], absorbed = meta[2];

    for (int64_t row = 0; row < rows; row++, q += H * d, k += d, v += dv, out += H * dv) {
        /* Push: what falls out of the ring goes to the far field, the new key takes its slot. */
        int64_t slot = (head + len) % w;
        if (len == w) {
            slot = head;
            if (m)
                far_absorb(q_landmarks, ring_k + slot * d, (size_t)(H * m), (size_t)d, scale,
                           far_max, far_mass, gain, keep);
            memcpy(gone, ring_v + slot * dv, (size_t)dv * sizeof *gone);
            head = (head + 1) % w;
            absorbed++;
        } else {
            len++;
            for (int64_t i = 0; i < H * m; i++) gain[i] = 0.0f, keep[i] = 1.0f;
        }
        memcpy(ring_k + slot * d, k, (size_t)d * sizeof *k);
        memcpy(ring_v + slot * dv, v, (size_t)dv * sizeof *v);

        /* Logits. The order of the near keys does not matter: a full ring is one run of slots. */
        const int64_t start = len == w ? 0 : head, upper = len < w - start ? len : w - start;
        const span spans[3] = {{sink_k, sink_v, (size_t)S},
                               {ring_k + start * d, ring_v + start * dv, (size_t)upper},
                               {ring_k, ring_v, (size_t)(len - upper)}};
        const size_t n = (size_t)(S + len);
        const int has_far = m && absorbed;
        for (size_t i = 0, at = 0; i < 3; at += spans[i++].count)
            dots(q, heads, spans[i].keys, spans[i].count, (size_t)d, scale, near + at, near_stride);
        if (has_far) dots(q, heads, k_landmarks, (size_t)m, (size_t)d, scale, far, far_stride);

        /* Weights, with the common denominator already divided out. */
        for (size_t h = 0; h < heads; h++) {
            float *const e = near + h * near_stride, *const c = far + h * far_stride;
            const int64_t at = (int64_t)h * m;
            float far_shift = -INFINITY, mass = 0.0f;
            if (has_far)
                mass = far_weights(c, mix + at * m, far_max + at, far_mass + at, (size_t)m, u,
                                   &far_shift);
            const float shift = larger(far_shift, largest(e, n));
            const float far_scale = exp_one(far_shift - shift);
            const float sum = exp_all(e, n, shift) + far_scale * mass;
            const float inverse = 1.0f / larger(sum, 1e-30f);
            for (size_t j = 0; j < n; j++) e[j] *= inverse;
            for (int64_t b = 0; b < m; b++)
                c[b] = far_scale > 0.0f ? c[b] * far_scale * inverse : 0.0f;
        }

        /* Values. */
        memset(out, 0, (size_t)(H * dv) * sizeof *out);
        for (size_t i = 0, at = 0; i < 3; at += spans[i++].count)
            blend(near + at, near_stride, heads, spans[i].values, spans[i].count, (size_t)dv, out);
        if (has_far)
            for (int64_t h = 0; h < H; h++)
                far_sweep(keep + h * m, gain + h * m, far + (size_t)h * far_stride, gone, (size_t)m,
                          (size_t)dv, far_num + h * m * dv, out + h * dv);
    }
    meta[0] = len, meta[1] = head, meta[2] = absorbed;
    free(scratch);
    return 0;
}
