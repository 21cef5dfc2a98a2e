/* Products of weights in GGUF's blocks with rows that are rounded to 8 bits a block.
 *
 * What it computes is said by reference.py, and this gives the same bits: sums of a block's integer
 * products are exact in any order, and float operations are few, in one order, without fused
 * multiply-add (-ffp-contract=off). Four rows of weights are multiplied at a time, one in each lane of
 * a vector of floats; a block of theirs is unpacked once for up to eight rows of x.
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __APPLE__
#include <dispatch/dispatch.h>
#endif

#if defined(DOMINO_SCALAR)
#elif defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#define DOMINO_AVX2
#endif

#define ALWAYS static inline __attribute__((always_inline))

typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));

enum { Q4_0, Q4_1, Q8_0 }; /* the order of reference.py's KINDS */
enum { BLOCK = 32, LANES = 4, TILE = 8, PAIRS = 4 };
static const size_t BYTES[] = {18, 20, 34}, HEADER[] = {2, 4, 2};

/* The bits of the float 1.5 * 2^23, in whose neighbourhood floats are the whole numbers: these bits plus an
 * integer are the bits of that float plus the integer, up to 2^22; sums are at most 32 * 128 * 127. */
#define MAGIC 0x4b400000
#define MAGIC_FLOAT 12582912.0f

typedef struct { /* 32 numbers of x; a tile of rows lies block by block: [blocks][rows of the tile] */
    i4 start; /* what sums begin with: MAGIC, and Q4_0's -8 for each number; the same in every lane, */
    f4 scale; /* as these are: a load is cheaper than spreading */
    f4 sum;   /* scale times the sum of numbers */
    int8_t numbers[BLOCK];
} x_block;

/* ---- a block of four rows of weights, unpacked; Q4's numbers are 0..15 here ---------------------- */

#if defined(DOMINO_SCALAR) || !(defined(__aarch64__) || defined(DOMINO_AVX2))

typedef struct { int8_t row[LANES][BLOCK]; } w_block;

ALWAYS float half(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, whole;
    float value;
    if (rest >= 0x7c00)
        whole = 0x7f800000u | (rest & 0x3ff) << 13;
    else if (rest >= 0x400)
        whole = (rest << 13) + 0x38000000u;
    else {
        value = (float)rest * 0x1p-24f; /* subnormal */
        memcpy(&whole, &value, 4);
    }
    whole |= sign;
    memcpy(&value, &whole, 4);
    return value;
}

ALWAYS f4 halves(uint64_t bits) {
    return (f4){half((uint16_t)bits), half((uint16_t)(bits >> 16)), half((uint16_t)(bits >> 32)),
                half((uint16_t)(bits >> 48))};
}

ALWAYS w_block unpack(int kind, const uint8_t *const from[LANES]) {
    w_block w;
    for (int r = 0; r < LANES; r++) {
        if (kind == Q8_0)
            memcpy(w.row[r], from[r], BLOCK);
        else
            for (int i = 0; i < BLOCK / 2; i++) {
                w.row[r][i] = from[r][i] & 15;
                w.row[r][i + BLOCK / 2] = from[r][i] >> 4;
            }
    }
    return w;
}

ALWAYS i4 dot(int kind, const w_block *w, const x_block *x) {
    i4 sums;
    (void)kind;
    for (int r = 0; r < LANES; r++) {
        int32_t sum = x->start[r];
        for (int i = 0; i < BLOCK; i++) sum += (int32_t)w->row[r][i] * x->numbers[i];
        sums[r] = sum;
    }
    return sums;
}

#elif defined(__aarch64__)

ALWAYS f4 halves(uint64_t bits) { return (f4)vcvt_f32_f16(vcreate_f16(bits)); }

#ifdef __ARM_FEATURE_DOTPROD

typedef struct { int8x16_t part[8]; } w_block; /* part i: numbers 4i..4i+3 of each of the four rows */

ALWAYS void transpose(int8x16_t *to, const uint8_t *const from[LANES], size_t at) {
    int32x4_t a = vreinterpretq_s32_u8(vld1q_u8(from[0] + at));
    int32x4_t b = vreinterpretq_s32_u8(vld1q_u8(from[1] + at));
    int32x4_t c = vreinterpretq_s32_u8(vld1q_u8(from[2] + at));
    int32x4_t d = vreinterpretq_s32_u8(vld1q_u8(from[3] + at));
    int64x2_t ab0 = vreinterpretq_s64_s32(vtrn1q_s32(a, b)), ab1 = vreinterpretq_s64_s32(vtrn2q_s32(a, b));
    int64x2_t cd0 = vreinterpretq_s64_s32(vtrn1q_s32(c, d)), cd1 = vreinterpretq_s64_s32(vtrn2q_s32(c, d));
    to[0] = vreinterpretq_s8_s64(vtrn1q_s64(ab0, cd0));
    to[1] = vreinterpretq_s8_s64(vtrn1q_s64(ab1, cd1));
    to[2] = vreinterpretq_s8_s64(vtrn2q_s64(ab0, cd0));
    to[3] = vreinterpretq_s8_s64(vtrn2q_s64(ab1, cd1));
}

ALWAYS w_block unpack(int kind, const uint8_t *const from[LANES]) {
    w_block w;
    transpose(w.part, from, 0);
    if (kind == Q8_0)
        transpose(w.part + 4, from, 16);
    else
        for (int i = 0; i < 4; i++) {
            uint8x16_t both = vreinterpretq_u8_s8(w.part[i]);
            w.part[i] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
            w.part[i + 4] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        }
    return w;
}

ALWAYS i4 dot(int kind, const w_block *w, const x_block *x) {
    int8x16_t low = vld1q_s8(x->numbers), high = vld1q_s8(x->numbers + 16);
    int32x4_t sum = (int32x4_t)x->start;
    sum = vdotq_laneq_s32(sum, w->part[0], low, 0);
    sum = vdotq_laneq_s32(sum, w->part[1], low, 1);
    sum = vdotq_laneq_s32(sum, w->part[2], low, 2);
    sum = vdotq_laneq_s32(sum, w->part[3], low, 3);
    sum = vdotq_laneq_s32(sum, w->part[4], high, 0);
    sum = vdotq_laneq_s32(sum, w->part[5], high, 1);
    sum = vdotq_laneq_s32(sum, w->part[6], high, 2);
    sum = vdotq_laneq_s32(sum, w->part[7], high, 3);
    (void)kind;
    return (i4)sum;
}

#else

typedef struct { int8x16_t low[LANES], high[LANES]; } w_block;

ALWAYS w_block unpack(int kind, const uint8_t *const from[LANES]) {
    w_block w;
    for (int r = 0; r < LANES; r++) {
        uint8x16_t both = vld1q_u8(from[r]);
        if (kind == Q8_0) {
            w.low[r] = vreinterpretq_s8_u8(both);
            w.high[r] = vreinterpretq_s8_u8(vld1q_u8(from[r] + 16));
        } else {
            w.low[r] = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
            w.high[r] = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
        }
    }
    return w;
}

ALWAYS int32x4_t dot_row(int8x16_t w_low, int8x16_t w_high, int8x16_t x_low, int8x16_t x_high) {
    /* two products of at most 128 * 127 fit into 16 bits */
    int16x8_t a = vmull_s8(vget_low_s8(w_low), vget_low_s8(x_low));
    int16x8_t b = vmull_s8(vget_low_s8(w_high), vget_low_s8(x_high));
    a = vmlal_s8(a, vget_high_s8(w_low), vget_high_s8(x_low));
    b = vmlal_s8(b, vget_high_s8(w_high), vget_high_s8(x_high));
    return vpadalq_s16(vpaddlq_s16(a), b);
}

ALWAYS i4 dot(int kind, const w_block *w, const x_block *x) {
    int8x16_t low = vld1q_s8(x->numbers), high = vld1q_s8(x->numbers + 16);
    int32x4_t sums[LANES];
    (void)kind;
    for (int r = 0; r < LANES; r++) sums[r] = dot_row(w->low[r], w->high[r], low, high);
    int32x4_t all = vpaddq_s32(vpaddq_s32(sums[0], sums[1]), vpaddq_s32(sums[2], sums[3]));
    return (i4)vaddq_s32(all, (int32x4_t)x->start);
}

#endif
#else /* DOMINO_AVX2 */

typedef struct { __m256i row[LANES]; } w_block;

ALWAYS f4 halves(uint64_t bits) {
    return (f4)_mm_cvtph_ps(_mm_set_epi64x(0, (long long)bits));
}

ALWAYS w_block unpack(int kind, const uint8_t *const from[LANES]) {
    w_block w;
    for (int r = 0; r < LANES; r++) {
        if (kind == Q8_0) {
            w.row[r] = _mm256_loadu_si256((const __m256i *)from[r]);
        } else {
            __m128i both = _mm_loadu_si128((const __m128i *)from[r]);
            __m256i shifted = _mm256_set_m128i(_mm_srli_epi16(both, 4), both);
            w.row[r] = _mm256_and_si256(shifted, _mm256_set1_epi8(15));
        }
    }
    return w;
}

/* Sums of four neighbours of u * s; u is at most 128 and s at least -127, so that two products fit
 * into 16 bits. */
ALWAYS __m256i dot_unsigned(__m256i u, __m256i s) {
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
    return _mm256_dpbusd_epi32(_mm256_setzero_si256(), u, s);
#elif defined(__AVXVNNI__)
    return _mm256_dpbusd_avx_epi32(_mm256_setzero_si256(), u, s);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1));
#endif
}

ALWAYS i4 dot(int kind, const w_block *w, const x_block *x) {
    __m256i numbers = _mm256_loadu_si256((const __m256i *)x->numbers), sums[LANES];
    for (int r = 0; r < LANES; r++) {
        __m256i row = w->row[r];
        sums[r] = kind == Q8_0 ? dot_unsigned(_mm256_abs_epi8(row), _mm256_sign_epi8(numbers, row))
                               : dot_unsigned(row, numbers);
    }
    __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(sums[0], sums[1]),
                                      _mm256_hadd_epi32(sums[2], sums[3]));
    __m128i all = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    return (i4)_mm_add_epi32(all, (__m128i)x->start);
}

#endif

/* ---- x ------------------------------------------------------------------------------------------ */

static void quantize_block(int kind, const float *from, x_block *to) {
    uint32_t most = 0, bits[BLOCK];
    float largest, inverse;
    int32_t sum = 0;
    memcpy(bits, from, sizeof bits);
    for (int i = 0; i < BLOCK; i++) { /* positive floats are ordered as their bits are */
        uint32_t size = bits[i] & 0x7fffffffu;
        most = size > most ? size : most;
    }
    memcpy(&largest, &most, 4);
    memset(to, 0, sizeof *to);
    to->start += MAGIC;
    if (most >= 0x7f800000u) { /* infinite or NaN: so is the row's result */
        to->scale = to->sum = (f4){0} + __builtin_nanf("");
        return;
    }
    if (largest < 0x1p-100f) return; /* nothing, or its inverse is not a float */
    inverse = 127.0f / largest;
    for (int i = 0; i < BLOCK; i++) { /* halves to even, as every float operation does */
        float rounded = (from[i] * inverse + MAGIC_FLOAT) - MAGIC_FLOAT;
        to->numbers[i] = (int8_t)rounded;
        sum += (int32_t)rounded;
    }
    to->scale += largest / 127.0f;
    to->sum = to->scale * (float)sum;
    to->start += kind == Q4_0 ? -8 * sum : 0;
}

static void quantize(int kind, const float *x, size_t m, size_t blocks, x_block *to) {
    for (size_t first = 0; first < m; first += TILE) {
        size_t rows = m - first < TILE ? m - first : TILE;
        for (size_t r = 0; r < rows; r++)
            for (size_t b = 0; b < blocks; b++)
                quantize_block(kind, x + ((first + r) * blocks + b) * BLOCK,
                               to + first * blocks + b * rows + r);
    }
}

/* ---- the product -------------------------------------------------------------------------------- */

typedef struct {
    int kind;
    const uint8_t *weight; /* [rows, blocks, BYTES] */
    size_t rows, blocks, m;
    const x_block *x;
    const float *bias; /* [rows] or NULL */
    float *out;        /* [m, rows] */
    size_t piece, next; /* rows of weights a thread takes at a time; the first that no thread has */
} work;

ALWAYS uint64_t gather(const uint8_t *const w[LANES], size_t at) { /* 16 bits of each row */
    uint16_t bits[LANES];
    for (int r = 0; r < LANES; r++) memcpy(&bits[r], w[r] + at, 2);
    return bits[0] | (uint64_t)bits[1] << 16 | (uint64_t)bits[2] << 32 | (uint64_t)bits[3] << 48;
}

/* What one block of four rows of weights adds to the sums of `count` rows of x; `ahead`: the
 * weights after them. */
ALWAYS void multiply_block(int kind, int count, const uint8_t *const w[LANES], size_t at,
                           const uint8_t *ahead, const x_block *x, f4 *terms) {
    const uint8_t *numbers[LANES];
    f4 scale = halves(gather(w, at)), minimum = {0};
    if (kind == Q4_1) minimum = halves(gather(w, at + 2));
    for (int r = 0; r < LANES; r++) numbers[r] = w[r] + at + HEADER[kind];
    for (size_t i = 0; i < LANES * BYTES[kind]; i += 64) __builtin_prefetch(ahead + LANES * at + i);
    w_block block = unpack(kind, numbers);
    for (int i = 0; i < count; i++) {
        f4 sum = (f4)dot(kind, &block, x + i) - MAGIC_FLOAT;
        terms[i] = scale * x[i].scale * sum;
        if (kind == Q4_1) terms[i] += minimum * x[i].sum;
    }
}

/* Four rows of weights from `row` on by `count` rows of x from `first` on. */
ALWAYS void multiply(int kind, int count, const work *job, size_t row, size_t first) {
    const x_block *x = job->x + first * job->blocks;
    const uint8_t *w[LANES];
    size_t left = job->rows - row, lanes = left < LANES ? left : LANES, b = 0;
    f4 sums[TILE], bias = {0}, here[TILE], next[TILE];
    for (size_t r = 0; r < LANES; r++) /* missing rows repeat the last; nothing is kept of them */
        w[r] = job->weight + (row + (r < lanes ? r : lanes - 1)) * job->blocks * BYTES[kind];
    const uint8_t *ahead = job->weight + (row + LANES) * job->blocks * BYTES[kind];
    for (int i = 0; i < count; i++) sums[i] = (f4){0};
    /* few rows of x: two blocks at a time, so that neither waits for the other's sums */
    for (; count <= PAIRS && b + 2 <= job->blocks; b += 2, x += 2 * count) {
        multiply_block(kind, count, w, b * BYTES[kind], ahead, x, here);
        multiply_block(kind, count, w, (b + 1) * BYTES[kind], ahead, x + count, next);
        for (int i = 0; i < count; i++) sums[i] = sums[i] + here[i] + next[i];
    }
    for (; b < job->blocks; b++, x += count) {
        multiply_block(kind, count, w, b * BYTES[kind], ahead, x, here);
        for (int i = 0; i < count; i++) sums[i] += here[i];
    }
    if (job->bias) memcpy(&bias, job->bias + row, lanes * sizeof(float));
    for (int i = 0; i < count; i++) {
        f4 done = job->bias ? sums[i] + bias : sums[i];
        float *to = job->out + (first + (size_t)i) * job->rows + row;
        if (lanes == LANES) memcpy(to, &done, sizeof done);
        else memcpy(to, &done, lanes * sizeof(float));
    }
}

#define MULTIPLY(kind, count) \
    static void multiply_##kind##_##count(const work *job, size_t row, size_t first) { \
        multiply(kind, count, job, row, first); \
    }
#define MULTIPLY_ALL(kind) \
    MULTIPLY(kind, 1) MULTIPLY(kind, 2) MULTIPLY(kind, 3) MULTIPLY(kind, 4) \
    MULTIPLY(kind, 5) MULTIPLY(kind, 6) MULTIPLY(kind, 7) MULTIPLY(kind, 8)
#define NAMES(kind) \
    {multiply_##kind##_1, multiply_##kind##_2, multiply_##kind##_3, multiply_##kind##_4, \
     multiply_##kind##_5, multiply_##kind##_6, multiply_##kind##_7, multiply_##kind##_8}

MULTIPLY_ALL(Q4_0)
MULTIPLY_ALL(Q4_1)
MULTIPLY_ALL(Q8_0)
static void (*const KERNELS[][TILE])(const work *, size_t, size_t) = {NAMES(Q4_0), NAMES(Q4_1), NAMES(Q8_0)};

static void run(work *job) {
    /* as many rows of x as stay in a core's own cache while weights pass by */
    size_t chunk = ((size_t)1 << 18) / (job->blocks * sizeof(x_block)) / TILE * TILE;
    if (chunk < TILE) chunk = TILE;
    for (;;) {
        size_t start = __atomic_fetch_add(&job->next, job->piece, __ATOMIC_RELAXED);
        if (start >= job->rows) return;
        size_t end = job->rows - start < job->piece ? job->rows : start + job->piece;
        for (size_t from = 0; from < job->m; from += chunk) {
            size_t to = job->m - from < chunk ? job->m : from + chunk;
            for (size_t row = start; row < end; row += LANES)
                for (size_t first = from; first < to; first += TILE) {
                    size_t count = to - first < TILE ? to - first : TILE;
                    KERNELS[job->kind][count - 1](job, row, first);
                }
        }
    }
}

static void run_in_team(void *job) { run(job); }
#ifdef __APPLE__
static void run_in_queue(void *job, size_t index) { (void)index, run(job); }
#endif

/* out = x @ weight.T + bias, 0; or -1 where there is no memory. `parallel` is GOMP_parallel of the OpenMP
 * that PyTorch runs, or NULL. */
int domino_linear(int kind, const uint8_t *weight, size_t rows, size_t blocks, const float *x, size_t m,
                  const float *bias, float *out, unsigned threads,
                  void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) {
    x_block *rounded = malloc(m * blocks * sizeof *rounded + 1);
    if (!rounded) return -1;
    quantize(kind, x, m, blocks, rounded);
    work job = {kind, weight, rows, blocks, m, rounded, bias, out, rows, 0};
    if (threads > 1) { /* pieces are small enough that a thread that is late keeps none waiting */
        size_t piece = (rows + threads * 4 - 1) / (threads * 4);
        job.piece = (piece + LANES - 1) / LANES * LANES;
    }
#ifdef __APPLE__
    (void)parallel;
    if (threads > 1) dispatch_apply_f(threads, DISPATCH_APPLY_AUTO, &job, run_in_queue);
#else
    if (threads > 1 && parallel) parallel(run_in_team, &job, threads, 0);
#endif
    run(&job); /* what is left: all of it, where no threads ran */
    free(rounded);
    return 0;
}
