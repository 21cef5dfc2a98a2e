/* What a forward over quantised weights computes on a CPU: products with rows that are rounded to 8 bits a
 * block, norms, and attention of each token alone.
 *
 * Products are what reference.py says, to the bit: sums of a block's integer products are exact in any
 * order, and float operations are few, in one order, without fused multiply-add (-ffp-contract=off). Weights
 * lie in tiles of sixteen rows (weight.py), so that a vector holds the same numbers of several rows: LANES of
 * them are multiplied at a time, one in each lane, and a tile is unpacked once for up to TILE rows of x.
 * Everything else is deterministic for a token, whatever else is computed at the same time.
 */
#include <math.h>
#include <sched.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __APPLE__
#include <dispatch/dispatch.h>
#endif

#if defined(DOMINO_SCALAR)
enum { LANES = 4, TILE = 4 };
#elif defined(__aarch64__)
#include <arm_neon.h>
enum { LANES = 4, TILE = 8 };
#elif defined(__AVX512BW__)
#include <immintrin.h>
#define DOMINO_AVX512
enum { LANES = 16, TILE = 8 };
#elif defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>
#define DOMINO_AVX2
enum { LANES = 8, TILE = 4 };
#else
enum { LANES = 4, TILE = 4 };
#define DOMINO_SCALAR
#endif

#define ALWAYS static inline __attribute__((always_inline))

enum { PREFETCH_BYTES = 2048 }; /* bytes of weights that are on their way while others are multiplied */
enum { ROWS = 16, BLOCK = 32, CHUNKS = 8, CHUNK = 64 }; /* a chunk: four numbers of each of a tile's rows */
typedef float fv __attribute__((vector_size(4 * LANES)));
typedef int32_t iv __attribute__((vector_size(4 * LANES)));
typedef uint8_t bv __attribute__((vector_size(4 * LANES)));
typedef int8_t lv __attribute__((vector_size(LANES))); /* a byte a row */
typedef uint8_t ulv __attribute__((vector_size(LANES)));

#define LOAD(type, from) ({ type value_; memcpy(&value_, from, sizeof value_); value_; })

#if defined(DOMINO_AVX512) && !defined(__AVX512VNNI__)
#define DOMINO_PAIRS
#elif defined(DOMINO_AVX2) && !defined(__AVXVNNI__) && !(defined(__AVX512VNNI__) && defined(__AVX512VL__))
#define DOMINO_PAIRS
#endif

typedef void (*task)(void *);
typedef void (*team)(task, void *, unsigned, unsigned);

/* What of a processor is used, in words. */
const char *domino_instructions(void) {
#if defined(DOMINO_SCALAR)
    return "plain C";
#elif defined(DOMINO_AVX512) && defined(__AVX512VNNI__)
    return "AVX-512 with VNNI";
#elif defined(DOMINO_AVX512)
    return "AVX-512";
#elif defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
    return "AVX2 with VNNI";
#elif defined(DOMINO_AVX2)
    return "AVX2";
#elif defined(__ARM_FEATURE_DOTPROD)
    return "NEON with dot products";
#else
    return "NEON";
#endif
}

/* ---- what differs between processors ------------------------------------------------------------ */

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

/* float16 of LANES rows */
ALWAYS fv halves(const uint8_t *from) {
#if defined(DOMINO_AVX512)
    return (fv)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(DOMINO_AVX2)
    return (fv)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(DOMINO_SCALAR)
    fv value;
    for (int r = 0; r < LANES; r++) value[r] = half(LOAD(uint16_t, from + 2 * r));
    return value;
#else
    return (fv)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from)));
#endif
}

/* Numbers of 8 bits are stored plus 128. Where a processor multiplies unsigned by signed ones they are
 * taken so, elsewhere without: what is left to take off from 128 times the sum of x. */
#if defined(DOMINO_AVX512) && defined(__AVX512VNNI__)
enum { SIGN_OFFSET = 128 };
#else
enum { SIGN_OFFSET = 0 };
#endif

#ifdef DOMINO_PAIRS
/* Such processors sum products of two neighbours up in 16 bits. Numbers below 64 are signed or not. */
typedef int16_t sv __attribute__((vector_size(4 * LANES)));

ALWAYS sv dot_pairs(sv sums, bv w, const int8_t *x) {
    int32_t four = LOAD(int32_t, x);
#if defined(DOMINO_AVX512)
    return sums + (sv)_mm512_maddubs_epi16((__m512i)w, _mm512_set1_epi32(four));
#else
    return sums + (sv)_mm256_maddubs_epi16((__m256i)w, _mm256_set1_epi32(four));
#endif
}

ALWAYS iv add_pairs(iv sums, sv pairs) {
#if defined(DOMINO_AVX512)
    return sums + (iv)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
#else
    return sums + (iv)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
#endif
}
#endif

/* sums + for each row its four numbers times x's; `wide` are of 8 bits, others below 64 */
ALWAYS iv dot(int wide, iv sums, bv w, const int8_t *x) {
#if defined(DOMINO_PAIRS)
    if (!wide) return add_pairs(sums, dot_pairs((sv){0}, w, x));
    int32_t four = LOAD(int32_t, x); /* two products of at most 128 * 127 fit into 16 bits */
#if defined(DOMINO_AVX512)
    __m512i s = _mm512_set1_epi32(four), signed_ = _mm512_xor_si512((__m512i)w, _mm512_set1_epi8((char)0x80));
    s = _mm512_mask_sub_epi8(s, _mm512_movepi8_mask(signed_), _mm512_setzero_si512(), s);
    return add_pairs(sums, (sv)_mm512_maddubs_epi16(_mm512_abs_epi8(signed_), s));
#else
    __m256i s = _mm256_set1_epi32(four), signed_ = _mm256_xor_si256((__m256i)w, _mm256_set1_epi8((char)0x80));
    return add_pairs(sums, (sv)_mm256_maddubs_epi16(_mm256_abs_epi8(signed_), _mm256_sign_epi8(s, signed_)));
#endif
#elif defined(DOMINO_AVX512)
    (void)wide; /* compilers would load the four of x into a register of their own first */
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums) : "v"(w), "m"(*(const int8_t(*)[4])x));
    return sums;
#elif defined(DOMINO_AVX2)
    __m256i u = (__m256i)w, s = _mm256_set1_epi32(LOAD(int32_t, x));
    if (wide) {
        __m256i signed_ = _mm256_xor_si256(u, _mm256_set1_epi8((char)0x80));
        u = _mm256_abs_epi8(signed_), s = _mm256_sign_epi8(s, signed_);
    }
#if defined(__AVXVNNI__)
    return (iv)_mm256_dpbusd_avx_epi32((__m256i)sums, u, s);
#else
    return (iv)_mm256_dpbusd_epi32((__m256i)sums, u, s);
#endif
#elif defined(DOMINO_SCALAR)
    for (int r = 0; r < LANES; r++)
        for (int i = 0; i < 4; i++) sums[r] += (wide ? (int8_t)(w[4 * r + i] ^ 128) : w[4 * r + i]) * x[i];
    return sums;
#else
    int8x16_t s = vreinterpretq_s8_s32(vdupq_n_s32(LOAD(int32_t, x)));
    int8x16_t u = vreinterpretq_s8_u8(wide ? veorq_u8((uint8x16_t)w, vdupq_n_u8(128)) : (uint8x16_t)w);
#ifdef __ARM_FEATURE_DOTPROD
    return (iv)vdotq_s32((int32x4_t)sums, u, s);
#else
    int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(u), vget_low_s8(s)));
    int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(u), vget_high_s8(s)));
    return sums + (iv)vpaddq_s32(low, high);
#endif
#endif
}

/* a * b + c of floats, rounded once where the processor can */
typedef float f16v __attribute__((vector_size(64))); /* sixteen numbers of one row: lanes are the same everywhere */
typedef int32_t i16v __attribute__((vector_size(64)));
ALWAYS f16v multiply_add(f16v a, f16v b, f16v c) {
#if defined(__AVX512F__) && !defined(DOMINO_SCALAR)
    return (f16v)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(DOMINO_AVX2)
    union { f16v v; __m256 part[2]; } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 2; i++) z.part[i] = _mm256_fmadd_ps(x.part[i], y.part[i], z.part[i]);
    return z.v;
#elif defined(__aarch64__) && !defined(DOMINO_SCALAR)
    union { f16v v; float32x4_t part[4]; } x = {a}, y = {b}, z = {c};
    for (int i = 0; i < 4; i++) z.part[i] = vfmaq_f32(z.part[i], x.part[i], y.part[i]);
    return z.v;
#else
    return a * b + c;
#endif
}

/* ---- x ------------------------------------------------------------------------------------------ */

typedef struct { /* 32 numbers of x; rows of a group lie block by block: [blocks][rows of the group] */
    float scale, sum; /* sum: scale times the sum of numbers */
    int32_t whole, first; /* sums of all numbers, and of the first half */
    int8_t numbers[BLOCK];
} x_block;

static void quantize_block(const float *from, x_block *to) {
    uint32_t most = 0, bits[BLOCK];
    float largest, inverse;
    int32_t sum[2] = {0, 0};
    memcpy(bits, from, sizeof bits);
    for (int i = 0; i < BLOCK; i++) { /* positive floats are ordered as their bits are */
        uint32_t size = bits[i] & 0x7fffffffu;
        most = size > most ? size : most;
    }
    memcpy(&largest, &most, 4);
    memset(to, 0, sizeof *to);
    if (most >= 0x7f800000u) { /* infinite or NaN: so is the row's result */
        to->scale = to->sum = __builtin_nanf("");
        return;
    }
    if (largest < 0x1p-100f) return; /* nothing, or its inverse is not a float */
    inverse = 127.0f / largest;
    for (int h = 0; h < 2; h++)
        for (int i = h * BLOCK / 2; i < (h + 1) * BLOCK / 2; i++) {
            /* 1.5 * 2^23: its neighbours are whole, and halves go to even */
            float rounded = (from[i] * inverse + 12582912.0f) - 12582912.0f;
            to->numbers[i] = (int8_t)rounded;
            sum[h] += (int32_t)rounded;
        }
    to->scale = largest / 127.0f;
    to->first = sum[0];
    to->whole = sum[0] + sum[1];
    to->sum = to->scale * (float)to->whole;
}

typedef float f4v __attribute__((vector_size(16)));
#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t i4v __attribute__((vector_size(16)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (i4v){__VA_ARGS__})
#endif

ALWAYS f4v quarters(f16v v) {
    typedef float f8v __attribute__((vector_size(32)));
    union { f16v whole; f8v half[2]; } all = {v};
    union { f8v whole; f4v half[2]; } eight = {all.half[0] + all.half[1]};
    return eight.half[0] + eight.half[1];
}

ALWAYS float total(f16v v) { /* always the same tree */
    f4v four = quarters(v);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

ALWAYS f4v totals(const f16v *v) { /* four, by that tree */
#ifdef DOMINO_AVX512
    __m512 half[2], four; /* halves of two, quarters of all */
    for (int i = 0; i < 2; i++) {
        __m512 one = (__m512)v[2 * i], other = (__m512)v[2 * i + 1];
        half[i] = _mm512_shuffle_f32x4(one, other, 0x44) + _mm512_shuffle_f32x4(one, other, 0xee);
    }
    four = _mm512_shuffle_f32x4(half[0], half[1], 0x88) + _mm512_shuffle_f32x4(half[0], half[1], 0xdd);
    four += _mm512_permute_ps(four, 0x4e);
    four += _mm512_permute_ps(four, 0xb1);
    return (f4v)_mm512_castps512_ps128(_mm512_maskz_compress_ps(0x1111, four));
#else
    f4v a = quarters(v[0]), b = quarters(v[1]), c = quarters(v[2]), d = quarters(v[3]);
    f4v first = SHUFFLE(a, b, 0, 4, 1, 5) + SHUFFLE(a, b, 2, 6, 3, 7);
    f4v second = SHUFFLE(c, d, 0, 4, 1, 5) + SHUFFLE(c, d, 2, 6, 3, 7);
    return SHUFFLE(first, second, 0, 1, 4, 5) + SHUFFLE(first, second, 2, 3, 6, 7);
#endif
}

/* Rows by their root mean square, times the weight. */
static void norm_row(const float *x, const float *weight, float eps, size_t width, float *out) {
    f16v squares = {0};
    size_t i = 0;
    float rest = 0;
    for (; i + 16 <= width; i += 16) {
        f16v part = LOAD(f16v, x + i);
        squares = multiply_add(part, part, squares);
    }
    for (; i < width; i++) rest += x[i] * x[i];
    float inverse = 1.0f / sqrtf((total(squares) + rest) / (float)width + eps);
    for (i = 0; i < width; i++) out[i] = weight[i] * (x[i] * inverse);
}

void domino_norm(const float *x, size_t m, size_t width, const float *weight, float eps, float *out) {
    for (size_t r = 0; r < m; r++) norm_row(x + r * width, weight, eps, width, out + r * width);
}

/* e^x, within two units of the last place; what a float cannot hold becomes the nearest it can */
ALWAYS f16v exponential(f16v x) {
    const f16v zero = {0};
    const f16v most = zero + 88.37f, least = zero - 87.33f, round = zero + 12582912.0f;
    i16v over = x > most, under = x < least;
    x = (f16v)((over & (i16v)most) | (~over & (i16v)x));
    x = (f16v)((under & (i16v)least) | (~under & (i16v)x)); /* NaN stays */
    f16v n = (x * 1.44269504088896341f + round) - round;
    f16v r = multiply_add(n, zero - 0.693359375f, x);
    r = multiply_add(n, zero + 2.12194440e-4f, r);
    f16v p = zero + 1.9875691500e-4f;
    p = multiply_add(p, r, zero + 1.3981999507e-3f);
    p = multiply_add(p, r, zero + 8.3334519073e-3f);
    p = multiply_add(p, r, zero + 4.1665795894e-2f);
    p = multiply_add(p, r, zero + 1.6666665459e-1f);
    p = multiply_add(p, r, zero + 5.0000001201e-1f);
    p = multiply_add(p, r * r, r) + 1.0f;
    i16v shift = (__builtin_convertvector(n, i16v) + 127) << 23;
    return p * (f16v)shift;
}

/* of each lane; what is not a number is never the larger one */
ALWAYS f16v larger(f16v a, f16v b) {
    i16v over = a > b;
    return (f16v)((over & (i16v)a) | (~over & (i16v)b));
}

ALWAYS f16v silu(f16v x) { return x / (1.0f + exponential(-x)); }

void domino_silu(const float *x, size_t count, float *out) {
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        f16v part = silu(LOAD(f16v, x + i));
        memcpy(out + i, &part, sizeof part);
    }
    if (i == count) return;
    f16v part = {0};
    memcpy(&part, x + i, (count - i) * sizeof(float));
    part = silu(part);
    memcpy(out + i, &part, (count - i) * sizeof(float));
}

/* ---- the product -------------------------------------------------------------------------------- */

enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, KINDS }; /* the order of reference.py's KINDS */
static const struct { int bits, offset, minimum, blocks, factors; } FORMATS[] = {
    {4, 8, 0, 1, 0}, {4, 0, 1, 1, 0}, {5, 16, 0, 1, 0}, {5, 0, 1, 1, 0},
    {8, 128, 0, 1, 0}, {4, 0, 1, 8, 2}, {5, 0, 1, 8, 2}, {6, 32, 0, 8, 2},
};

typedef struct {
    int kind;
    const uint8_t *weight; /* [tiles, size blocks, tile_bytes] */
    size_t rows, blocks, m;
    const x_block *x;
    const float *bias; /* [rows] or NULL */
    const float *residual; /* like out, or NULL */
    float *out; /* [m, stride], of which rows are written */
    size_t stride, chunk_tiles; /* chunk_tiles: tiles that a thread takes at a time */
    size_t *next; /* the first of them that no thread has */
} product;

ALWAYS size_t header_bytes(int kind) { return 2 * ROWS * (1 + FORMATS[kind].minimum); }
ALWAYS size_t block_bytes(int kind) { /* of 32 numbers of a tile's rows, without the header */
    return ROWS * (size_t)(FORMATS[kind].factors + BLOCK * FORMATS[kind].bits / 8);
}

/* Unrolled, or sums would lie in memory instead of registers. */
#define EACH_ROW _Pragma("GCC unroll 8") for (int i = 0; i < count; i++)

/* What one block of LANES rows of weights adds to the sums of `count` rows of x. `scale` and `minimum` are
 * the size block's; `from` is where the block begins, `lane` the first of the rows. */
ALWAYS void multiply_block(int kind, int count, const uint8_t *from, int lane, fv scale, fv minimum,
                           const x_block *x, fv *sums) {
    const int bits = FORMATS[kind].bits, wide = bits == 8, split = kind == Q6_K;
    iv acc[2][TILE];
    iv factor[2];
    if (FORMATS[kind].factors) {
        for (int i = 0; i < 2; i++) {
            const uint8_t *at = from + i * ROWS + lane;
            factor[i] = split ? __builtin_convertvector(LOAD(lv, at), iv)
                              : __builtin_convertvector(LOAD(ulv, at), iv);
        }
        from += 2 * ROWS;
    }
    if (FORMATS[kind].minimum && FORMATS[kind].factors) {
        scale *= __builtin_convertvector(factor[0], fv);
        minimum = -(minimum * __builtin_convertvector(factor[1], fv));
    }
    EACH_ROW acc[0][i] = acc[1][i] = (iv){0};
    from += 4 * lane;
    if (wide) {
#pragma GCC unroll 8
        for (int c = 0; c < CHUNKS; c++) {
            bv w = LOAD(bv, from + c * CHUNK);
            EACH_ROW acc[c & 1][i] = dot(wide, acc[c & 1][i], w, x[i].numbers + 4 * c);
        }
    } else {
        const uint8_t *high = from + 4 * CHUNK;
        bv fifth = {0}, top[2] = {{0}, {0}};
        if (bits == 5) fifth = LOAD(bv, high);
        if (bits == 6) top[0] = LOAD(bv, high), top[1] = LOAD(bv, high + CHUNK);
#ifdef DOMINO_PAIRS
        sv pairs[2][TILE]; /* of 4 bits a block's sums fit in, of 5 bits a half's, of 6 bits those of two chunks */
        EACH_ROW pairs[0][i] = pairs[1][i] = (sv){0};
#endif
#pragma GCC unroll 4
        for (int c = 0; c < 4; c++) { /* low halves: the first numbers of x; high halves: the others */
            bv both = LOAD(bv, from + c * CHUNK), w[2] = {both & 15, both >> 4};
            for (int h = 0; h < 2; h++) {
                if (bits == 5) w[h] |= (fifth >> (c + 4 * h) & 1) << 4;
                if (bits == 6) w[h] |= (top[h] >> (2 * c) & 3) << 4;
                EACH_ROW {
                    const int8_t *own = x[i].numbers + 4 * c + 16 * h;
#ifdef DOMINO_PAIRS
                    sv *sum = &pairs[bits == 4 ? 0 : h][i];
                    *sum = dot_pairs(*sum, w[h], own);
                    if (bits == 6 && c == 1) acc[h][i] = add_pairs(acc[h][i], *sum), *sum = (sv){0};
#else
                    acc[h][i] = dot(wide, acc[h][i], w[h], own);
#endif
                }
            }
        }
#ifdef DOMINO_PAIRS
        EACH_ROW
            for (int h = 0; h < (bits == 4 ? 1 : 2); h++) acc[h][i] = add_pairs(acc[h][i], pairs[h][i]);
#endif
    }
    const int offset = wide ? SIGN_OFFSET : FORMATS[kind].offset;
    EACH_ROW {
        iv sum;
        if (split) /* each half has its factor; at most 2^24 in all, which a float holds */
            sum = factor[0] * (acc[0][i] - offset * x[i].first) +
                  factor[1] * (acc[1][i] - offset * (x[i].whole - x[i].first));
        else
            sum = acc[0][i] + acc[1][i] - offset * x[i].whole;
        fv term = scale * x[i].scale * __builtin_convertvector(sum, fv);
        if (FORMATS[kind].minimum) term += minimum * x[i].sum;
        sums[i] += term;
    }
}

/* A tile of weights by `count` rows of x from `first` on. */
ALWAYS void multiply(int kind, int count, const product *job, size_t tile, size_t first) {
    const size_t sized = job->blocks / (size_t)FORMATS[kind].blocks, header = header_bytes(kind);
    const size_t bytes = header + (size_t)FORMATS[kind].blocks * block_bytes(kind);
    for (int lane = 0; lane < ROWS; lane += LANES) {
        const uint8_t *from = job->weight + tile * sized * bytes;
        const x_block *x = job->x + first * job->blocks;
        size_t row = tile * ROWS + (size_t)lane;
        if (row >= job->rows) return; /* rows that fill the last tile up */
        size_t left = job->rows - row, size = (left < LANES ? left : LANES) * sizeof(float);
        fv sums[TILE];
        EACH_ROW sums[i] = (fv){0};
        for (size_t b = 0; b < sized; b++, from += bytes) {
            for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + PREFETCH_BYTES + i);
            fv scale = halves(from + 2 * lane), minimum = {0};
            if (FORMATS[kind].minimum) minimum = halves(from + 2 * ROWS + 2 * lane);
            for (int s = 0; s < FORMATS[kind].blocks; s++, x += count)
                multiply_block(kind, count, from + header + (size_t)s * block_bytes(kind), lane, scale,
                               minimum, x, sums);
        }
        fv part = {0};
        if (job->bias) memcpy(&part, job->bias + row, size);
        EACH_ROW {
            size_t place = (first + (size_t)i) * job->stride + row;
            fv done = job->bias ? sums[i] + part : sums[i], before;
            if (job->residual) {
                before = (fv){0};
                memcpy(&before, job->residual + place, size);
                done = before + done;
            }
            memcpy(job->out + place, &done, size);
        }
    }
}

#define MULTIPLY(kind, count) \
    static void multiply_##kind##_##count(const product *job, size_t tile, size_t first) { \
        multiply(kind, count, job, tile, first); \
    }
#define MULTIPLY_ALL(kind) \
    MULTIPLY(kind, 1) MULTIPLY(kind, 2) MULTIPLY(kind, 3) MULTIPLY(kind, 4) \
    MULTIPLY(kind, 5) MULTIPLY(kind, 6) MULTIPLY(kind, 7) MULTIPLY(kind, 8)
#define NAMES(kind) \
    {multiply_##kind##_1, multiply_##kind##_2, multiply_##kind##_3, multiply_##kind##_4, \
     multiply_##kind##_5, multiply_##kind##_6, multiply_##kind##_7, multiply_##kind##_8}
#define SOME(kind) MULTIPLY(kind, 1) MULTIPLY(kind, 2) MULTIPLY(kind, 3) MULTIPLY(kind, 4)
#define SOME_NAMES(kind) \
    {multiply_##kind##_1, multiply_##kind##_2, multiply_##kind##_3, multiply_##kind##_4}
#if defined(DOMINO_AVX512) || (defined(__aarch64__) && !defined(DOMINO_SCALAR))
#define DEFINE MULTIPLY_ALL
#define LIST NAMES
#else
#define DEFINE SOME
#define LIST SOME_NAMES
#endif

DEFINE(Q4_0) DEFINE(Q4_1) DEFINE(Q5_0) DEFINE(Q5_1) DEFINE(Q8_0) DEFINE(Q4_K) DEFINE(Q5_K) DEFINE(Q6_K)
static void (*const KERNELS[KINDS][TILE])(const product *, size_t, size_t) = {
    LIST(Q4_0), LIST(Q4_1), LIST(Q5_0), LIST(Q5_1), LIST(Q8_0), LIST(Q4_K), LIST(Q5_K), LIST(Q6_K),
};

static void run_product(void *argument) {
    product *job = argument;
    /* as many rows of x as stay in a core's own cache while weights pass by */
    size_t chunk = ((size_t)1 << 18) / (job->blocks * sizeof(x_block)) / TILE * TILE;
    size_t tiles = (job->rows + ROWS - 1) / ROWS;
    if (chunk < TILE) chunk = TILE;
    for (;;) {
        size_t start = __atomic_fetch_add(job->next, job->chunk_tiles, __ATOMIC_RELAXED);
        if (start >= tiles) return;
        size_t end = tiles - start < job->chunk_tiles ? tiles : start + job->chunk_tiles;
        for (size_t from = 0; from < job->m; from += chunk) {
            size_t to = job->m - from < chunk ? job->m : from + chunk;
            for (size_t tile = start; tile < end; tile++)
                for (size_t first = from; first < to; first += TILE) {
                    size_t count = to - first < TILE ? to - first : TILE;
                    KERNELS[job->kind][count - 1](job, tile, first);
                }
        }
    }
}

#ifdef __APPLE__
typedef struct { task work; void *argument; } queued;
static void run_in_queue(void *argument, size_t index) {
    queued *own = argument;
    (void)index, own->work(own->argument);
}
#endif

/* On `threads` threads, each of which takes pieces until none is left. `parallel` is GOMP_parallel of the
 * OpenMP that PyTorch runs, or NULL. */
static void run_all(task work, void *argument, unsigned threads, team parallel) {
#ifdef __APPLE__
    queued own = {work, argument};
    (void)parallel;
    if (threads > 1) dispatch_apply_f(threads, DISPATCH_APPLY_AUTO, &own, run_in_queue);
#else
    if (threads > 1 && parallel) parallel(work, argument, threads, 0);
#endif
    work(argument); /* what is left: all of it, where no threads ran */
}

/* Rows of a weight, as they are: an embedding's. */
void domino_rows(int kind, const uint8_t *weight, size_t blocks, const int64_t *rows, size_t count, float *out) {
    const int bits = FORMATS[kind].bits, split = kind == Q6_K;
    const size_t sized = blocks / (size_t)FORMATS[kind].blocks, header = header_bytes(kind);
    const size_t bytes = header + (size_t)FORMATS[kind].blocks * block_bytes(kind);
    for (size_t r = 0; r < count; r++) {
        const size_t lane = (size_t)rows[r] % ROWS;
        const uint8_t *from = weight + (size_t)rows[r] / ROWS * sized * bytes;
        for (size_t b = 0; b < sized; b++, from += bytes) {
            const float whole = half(LOAD(uint16_t, from + 2 * lane));
            const float least = FORMATS[kind].minimum ? half(LOAD(uint16_t, from + 2 * ROWS + 2 * lane)) : 0;
            const uint8_t *block = from + header;
            for (int s = 0; s < FORMATS[kind].blocks; s++, block += block_bytes(kind), out += BLOCK) {
                float scale[2] = {whole, whole}, minimum = least;
                const uint8_t *numbers = block;
                if (FORMATS[kind].factors) {
                    uint8_t first = block[lane], second = block[ROWS + lane];
                    scale[0] *= split ? (float)(int8_t)first : (float)first;
                    scale[1] = split ? whole * (float)(int8_t)second : scale[0];
                    minimum = -(least * (float)second);
                    numbers += 2 * ROWS;
                }
                const uint8_t *high = numbers + 4 * CHUNK + 4 * lane;
                for (size_t i = 0; i < BLOCK; i++) {
                    size_t c = i / 4, place = (bits == 8 ? c : c % 4) * CHUNK + 4 * lane + i % 4;
                    int number = numbers[place];
                    if (bits < 8) number = c < 4 ? number & 15 : number >> 4;
                    if (bits == 5) number |= (high[i % 4] >> c & 1) << 4;
                    if (bits == 6) number |= (high[c / 4 * CHUNK + i % 4] >> (2 * (c % 4)) & 3) << 4;
                    float value = scale[i / 16] * (float)(number - FORMATS[kind].offset);
                    out[i] = FORMATS[kind].minimum ? value + minimum : value;
                }
            }
        }
    }
}

typedef struct { /* rows of x on their way into a product */
    const float *x, *norm; /* [m, width]; a norm's weights or NULL */
    float eps;
    int gated; /* x is [m, 2 * width], gates first: silu(gate) * the other half is what is read */
    size_t m, width;
    x_block *out;
    size_t *next;
    int failed;
} rounding;

static void run_rounding(void *argument) {
    rounding *job = argument;
    size_t blocks = job->width / BLOCK;
    float *row = NULL;
    for (;;) {
        size_t r = __atomic_fetch_add(job->next, 1, __ATOMIC_RELAXED);
        if (r >= job->m) break;
        if (!row && (job->norm || job->gated) && !(row = malloc(job->width * sizeof *row))) {
            __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
            break;
        }
        const float *from = job->x + r * job->width * (job->gated ? 2 : 1);
        size_t group = r / TILE * TILE, size = job->m - group < TILE ? job->m - group : TILE;
        if (job->norm) norm_row(from, job->norm, job->eps, job->width, row), from = row;
        if (job->gated) {
            domino_silu(from, job->width, row);
            for (size_t i = 0; i < job->width; i++) row[i] *= from[job->width + i];
            from = row;
        }
        for (size_t b = 0; b < blocks; b++)
            quantize_block(from + b * BLOCK, job->out + group * blocks + b * size + (r - group));
    }
    free(row);
}

static size_t chunk_of(size_t rows, unsigned threads) { /* small: a thread that is late keeps none waiting */
    size_t tiles = (rows + ROWS - 1) / ROWS;
    return threads > 1 ? (tiles + threads * 4 - 1) / (threads * 4) : tiles;
}

/* out = x @ weight.T + bias [+ residual], of normed x where a norm's weights are given. With `gated` the
 * first half of the weight's rows are gates: out [m, rows / 2] = silu(gate) * the other half [+ residual]. 0;
 * or -1 where there is no memory. */
int domino_linear(int kind, const uint8_t *weight, size_t rows, size_t blocks, const float *x, size_t m,
                  const float *norm, float eps, const float *bias, const float *residual, int gated,
                  float *out, unsigned threads, team parallel) {
    size_t width = blocks * BLOCK, next[2] = {0, 0};
    x_block *rounded = malloc(m * blocks * sizeof *rounded + 1);
    float *whole = gated ? malloc(m * rows * sizeof *whole + 1) : out;
    int failed = !rounded || (gated && !whole);
    if (!failed) {
        rounding rows_of_x = {x, norm, eps, 0, m, width, rounded, next, 0};
        run_rounding(&rows_of_x);
        failed = rows_of_x.failed;
    }
    if (!failed) {
        product job = {kind, weight, rows, blocks, m, rounded, bias, gated ? NULL : residual, whole, rows,
                    chunk_of(rows, threads), next + 1};
        run_all(run_product, &job, threads, parallel);
        for (size_t r = 0; gated && r < m; r++) {
            size_t half = rows / 2;
            const float *gate = whole + r * rows, *up = gate + half;
            float *to = out + r * half;
            domino_silu(gate, half, to);
            for (size_t i = 0; i < half; i++) to[i] *= up[i];
            for (size_t i = 0; residual && i < half; i++) to[i] = residual[r * half + i] + to[i];
        }
    }
    if (gated) free(whole);
    free(rounded);
    return failed ? -1 : 0;
}

/* ---- attention ---------------------------------------------------------------------------------- */

/* Rotary positions on new tokens' queries and keys [tokens, heads + 2 * kv_heads, size], normed before if
 * norms are given; keys and values go to their places in the caches [slots, kv heads, capacity, size], as far
 * as these reach. `places`: [tokens, 3], each one's slot, place there and position. */
typedef struct {
    const float *qkv; /* [tokens, stride], of which the first columns are meant */
    size_t tokens, stride, heads, kv_heads, size, capacity;
    const float *q_norm, *k_norm;
    float eps;
    const float *cos, *sin;
    const int64_t *places;
    float *query, *keys, *values;
    size_t *next;
} rotation;

static void rotate_token(const rotation *job, size_t t) {
    const size_t heads = job->heads, kv_heads = job->kv_heads, size = job->size, half = size / 2;
    float normed[size];
    const float *from = job->qkv + t * job->stride;
    const int64_t *own = job->places + 3 * t;
    const float *c = job->cos + (size_t)own[2] * size, *s = job->sin + (size_t)own[2] * size;
    size_t slot = (size_t)own[0], place = (size_t)own[1];
    for (size_t h = 0; h < heads + 2 * kv_heads; h++, from += size) {
        int value = h >= heads + kv_heads;
        size_t kv = h - heads - (value ? kv_heads : 0);
        if (h >= heads && place >= job->capacity) continue;
        float *to = h < heads ? job->query + (t * heads + h) * size
                              : (value ? job->values : job->keys) +
                                    ((slot * kv_heads + kv) * job->capacity + place) * size;
        if (value) {
            memcpy(to, from, size * sizeof(float));
            continue;
        }
        const float *norm = h < heads ? job->q_norm : job->k_norm, *x = from;
        if (norm) norm_row(from, norm, job->eps, size, normed), x = normed;
        for (size_t i = 0; i < half; i++) {
            to[i] = x[i] * c[i] + -x[i + half] * s[i];
            to[i + half] = x[i + half] * c[i + half] + x[i] * s[i + half];
        }
    }
}

static void run_rotation(void *argument) {
    rotation *job = argument;
    for (;;) {
        size_t t = __atomic_fetch_add(job->next, 1, __ATOMIC_RELAXED);
        if (t >= job->tokens) return;
        rotate_token(job, t);
    }
}

void domino_rotate(const float *qkv, size_t tokens, size_t heads, size_t kv_heads, size_t size,
                   const float *q_norm, const float *k_norm, float eps, const float *cos, const float *sin,
                   const int64_t *places, size_t capacity, float *query, float *keys, float *values) {
    size_t next = 0;
    rotation job = {qkv, tokens, (heads + 2 * kv_heads) * size, heads, kv_heads, size, capacity, q_norm, k_norm, eps,
                    cos, sin, places, query, keys, values, &next};
    run_rotation(&job);
}

typedef struct {
    const float *query; /* [tokens, heads, size] */
    const float *keys, *values; /* [slots, kv heads, places, size], with strides of slots and heads */
    size_t slot_stride, head_stride, tokens, heads, kv_heads, size;
    const int64_t *spans; /* [tokens, 5]: slot, first and end of what is seen, where extras begin, how many */
    const int32_t *extras; /* more places, after those */
    float scale, *out; /* [tokens, heads, size] */
    size_t longest; /* places that a token sees at most, and room */
    size_t near; /* tokens that a thread takes at once */
    size_t *next; /* the first of these and a key head that no thread has */
    int failed;
} attention;

enum { QUERIES = 4, PARTS = LANES == 16 ? 4 : 2 }; /* whose sums stay in registers */
enum { NEAR = 8, NEAR_BYTES = 1 << 14 }; /* tokens that read so many bytes of keys or values one after the other */

/* How many tokens read keys together: up to NEAR, or fewer where threads would have to wait for the last pairs. */
static size_t near_of(size_t tokens, size_t kv_heads, unsigned threads) {
    size_t groups = (tokens + NEAR - 1) / NEAR;
    while (groups * kv_heads % threads && groups * kv_heads < 4 * threads && 2 * groups < tokens) groups++;
    return (tokens + groups - 1) / groups;
}

typedef struct { /* what a token sees, which has `count` places */
    const int64_t *span;
    const int32_t *extras;
    size_t before, count;
} view;

static view view_of(const attention *job, size_t token) {
    const int64_t *span = job->spans + 5 * token;
    size_t before = (size_t)(span[2] - span[1]);
    return (view){span, job->extras + span[3], before, before + (size_t)span[4]};
}

ALWAYS size_t seen_place(const view *seen, size_t j) {
    return j < seen->before ? (size_t)seen->span[1] + j : (size_t)seen->extras[j - seen->before];
}

/* `parts` times `width` columns of some values, weighed by `queries` rows of scores, are added to out. */
ALWAYS void mix(int queries, int parts, size_t width, const attention *job, const view *seen, size_t from,
                size_t to, const float *scores, const float *values, float *out) {
    const f16v zero = {0};
    const size_t size = job->size;
    f16v mixed[QUERIES][PARTS];
    for (int g = 0; g < queries; g++)
        for (int p = 0; p < parts; p++) {
            mixed[g][p] = zero;
            memcpy(&mixed[g][p], out + (size_t)g * size + 16 * p, width * sizeof(float));
        }
    for (size_t j = from; j < to;) {
        size_t end = j >= seen->before ? j + 1 : to < seen->before ? to : seen->before;
        const float *value = values + seen_place(seen, j) * size;
        for (; j < end; j++, value += size) /* places that follow each other */
            for (int p = 0; p < parts; p++) {
                f16v own = zero;
                memcpy(&own, value + 16 * p, width * sizeof(float));
                for (int g = 0; g < queries; g++)
                    mixed[g][p] = multiply_add(zero + scores[(size_t)g * job->longest + j], own, mixed[g][p]);
            }
    }
    for (int g = 0; g < queries; g++)
        for (int p = 0; p < parts; p++)
            memcpy(out + (size_t)g * size + 16 * p, &mixed[g][p], width * sizeof(float));
}

/* All columns of these values: as many at a time as stay in registers. */
ALWAYS void mix_all(int queries, const attention *job, const view *seen, size_t from, size_t to,
                    const float *scores, const float *values, float *out) {
    for (size_t i = 0; i < job->size;) {
        size_t left = job->size - i, width = left >= 16 * PARTS ? 16 * PARTS : left >= 16 ? 16 : left;
        if (left >= 16 * PARTS) mix(queries, PARTS, 16, job, seen, from, to, scores, values + i, out + i);
        else if (left >= 16) mix(queries, 1, 16, job, seen, from, to, scores, values + i, out + i);
        else mix(queries, 1, left, job, seen, from, to, scores, values + i, out + i);
        i += width;
    }
}

/* Scores of some places that `queries` queries see, four keys at a time; their room ends behind the last four. */
ALWAYS void score(int queries, const attention *job, const view *seen, size_t from, size_t to,
                  const float *query, const float *keys, float *out) {
    const size_t size = job->size;
    for (size_t j = from; j < to; j += 4) {
        const float *key[4];
        f16v sums[QUERIES][4];
        f4v rest[QUERIES], done;
        size_t i = 0;
        for (size_t k = 0; k < 4; k++) /* behind the last one any will do */
            key[k] = keys + seen_place(seen, j + k < to ? j + k : j) * size;
        for (int g = 0; g < queries; g++) {
            rest[g] = (f4v){0};
            for (int k = 0; k < 4; k++) sums[g][k] = (f16v){0};
        }
        for (; i + 16 <= size; i += 16)
            for (int k = 0; k < 4; k++) {
                f16v own = LOAD(f16v, key[k] + i);
                for (int g = 0; g < queries; g++)
                    sums[g][k] = multiply_add(LOAD(f16v, query + (size_t)g * size + i), own, sums[g][k]);
            }
        for (; i < size; i++)
            for (int g = 0; g < queries; g++)
                for (int k = 0; k < 4; k++) rest[g][k] += query[(size_t)g * size + i] * key[k][i];
        for (int g = 0; g < queries; g++) {
            done = (totals(sums[g]) + rest[g]) * job->scale;
            memcpy(out + (size_t)g * job->longest + j, &done, sizeof done);
        }
    }
}

/* Scores of `count` places become their exponentials, whose sum is given. */
static float exponentials(float *row, size_t count) {
    f16v largest = (f16v){0} - INFINITY, parts = {0};
    float most = -INFINITY;
    for (size_t j = 0; j < count; j += 16) { /* behind the last ones lies room: they weigh nothing */
        for (size_t k = count; k < j + 16; k++) row[k] = -INFINITY;
        largest = larger(LOAD(f16v, row + j), largest);
    }
    for (int k = 0; k < 16; k++) most = largest[k] > most ? largest[k] : most;
    for (size_t j = 0; j < count; j += 16) {
        f16v part = exponential(LOAD(f16v, row + j) - most);
        for (size_t k = count; k < j + 16; k++) part[k - j] = 0;
        memcpy(row + j, &part, sizeof part);
        parts += part;
    }
    return total(parts);
}

/* One key head's queries of a few tokens, `group` of each; scores: as many rows of `longest`. What these tokens
 * see is mostly the same, so they go through it together, as far as a core's own cache holds it. */
static void attend_group(const attention *job, size_t first, size_t tokens, size_t kv, float *scores) {
    const size_t group = job->heads / job->kv_heads, size = job->size;
    const size_t near = NEAR_BYTES / (size * sizeof(float)) / 16 * 16, step = near ? near : 16;
    view seen[NEAR];
    size_t most = 0;
    for (size_t t = 0; t < tokens; t++) {
        seen[t] = view_of(job, first + t);
        most = seen[t].count > most ? seen[t].count : most;
    }
#define EACH_TOKEN \
    for (size_t t = 0, to; t < tokens; t++) \
        if ((to = seen[t].count < from + step ? seen[t].count : from + step) > from)
    for (size_t from = 0; from < most; from += step)
        EACH_TOKEN {
            size_t base = (size_t)seen[t].span[0] * job->slot_stride + kv * job->head_stride;
            const float *queries = job->query + ((first + t) * job->heads + kv * group) * size;
            for (size_t g = 0; g < group; g += QUERIES) {
                const float *query = queries + g * size, *key = job->keys + base;
                float *row = scores + (t * group + g) * job->longest;
                switch (group - g) {
                case 1: score(1, job, seen + t, from, to, query, key, row); break;
                case 2: score(2, job, seen + t, from, to, query, key, row); break;
                case 3: score(3, job, seen + t, from, to, query, key, row); break;
                default: score(QUERIES, job, seen + t, from, to, query, key, row);
                }
            }
        }
    float sums[tokens * group];
    for (size_t row = 0; row < tokens * group; row++)
        sums[row] = exponentials(scores + row * job->longest, seen[row / group].count);
    for (size_t t = 0; t < tokens; t++)
        memset(job->out + ((first + t) * job->heads + kv * group) * size, 0, group * size * sizeof(float));
    for (size_t from = 0; from < most; from += step)
        EACH_TOKEN {
            const float *values = job->values + (size_t)seen[t].span[0] * job->slot_stride + kv * job->head_stride;
            for (size_t g = 0; g < group; g += QUERIES) {
                const float *row = scores + (t * group + g) * job->longest;
                float *out = job->out + ((first + t) * job->heads + kv * group + g) * size;
                switch (group - g) {
                case 1: mix_all(1, job, seen + t, from, to, row, values, out); break;
                case 2: mix_all(2, job, seen + t, from, to, row, values, out); break;
                case 3: mix_all(3, job, seen + t, from, to, row, values, out); break;
                default: mix_all(QUERIES, job, seen + t, from, to, row, values, out);
                }
            }
        }
#undef EACH_TOKEN
    for (size_t row = 0; row < tokens * group; row++) {
        float *out = job->out + ((first + row / group) * job->heads + kv * group + row % group) * size;
        for (size_t i = 0; i < size; i++) out[i] /= sums[row];
    }
}

static void run_attention(void *argument) {
    attention *job = argument;
    const size_t near = job->near, groups = (job->tokens + near - 1) / near, rows = near * (job->heads / job->kv_heads);
    float *scores = NULL;
    for (;;) {
        size_t pair = __atomic_fetch_add(job->next, 1, __ATOMIC_RELAXED);
        if (pair >= groups * job->kv_heads) break;
        if (!scores) scores = malloc(rows * job->longest * sizeof *scores + 1);
        if (!scores) {
            __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
            break;
        }
        size_t first = pair / job->kv_heads * near, left = job->tokens - first;
        attend_group(job, first, left < near ? left : near, pair % job->kv_heads, scores);
    }
    free(scores);
}

static size_t longest_of(const int64_t *spans, size_t tokens) {
    size_t longest = 0;
    for (size_t t = 0; t < tokens; t++) {
        size_t count = (size_t)(spans[5 * t + 2] - spans[5 * t + 1] + spans[5 * t + 4]);
        longest = count > longest ? count : longest;
    }
    return (longest + 31) / 16 * 16;
}

int domino_attend(const float *query, const float *keys, const float *values, size_t slot_stride,
                  size_t head_stride, size_t tokens, size_t heads, size_t kv_heads, size_t size,
                  const int64_t *spans, const int32_t *extras, float scale, float *out, unsigned threads,
                  team parallel) {
    size_t next = 0;
    attention job = {query, keys, values, slot_stride, head_stride, tokens, heads, kv_heads, size,
                     spans, extras, scale, out, longest_of(spans, tokens), near_of(tokens, kv_heads, threads), &next, 0};
    run_all(run_attention, &job, threads, parallel);
    return job.failed ? -1 : 0;
}

/* ---- all layers of a model in one call ------------------------------------------------------------ */

typedef struct { int kind; const uint8_t *tiles; size_t rows; } matrix;

typedef struct { /* a pre-norm layer; what is NULL is not there, parts of no rows neither */
    const float *input_norm, *qkv_bias, *q_norm, *k_norm, *out_bias, *post_norm;
    matrix qkv[3], out, gate_up[2], down; /* whole ones are their first part */
    float *keys, *values;
    const int64_t *spans;
    const int32_t *extras;
    float *captured; /* where the layer's output is wanted too, or NULL */
} layer;

typedef struct {
    size_t layers, hidden, inner, heads, kv_heads, size, capacity, captured_stride;
    float eps, scale;
    const float *cos, *sin;
    const int64_t *places; /* [tokens, 3] */
    float *x; /* [tokens, hidden]: what goes in, and what comes out */
    size_t tokens;
} stack;

typedef struct { /* threads that go through the same steps */
    unsigned threads; /* asked for */
    team parallel;
    int (*size)(void); /* omp_get_num_threads, where `parallel` is given */
    size_t *counters; /* one a step */
    size_t joined, arrived, generation; /* joined: threads that have taken memory of their own */
} crew;

typedef struct {
    crew crew;
    const layer *layers;
    const stack *shape;
    size_t longest;
    x_block *rounded;
    float *qkv, *query, *mixed, *gates;
    int failed;
} forward;

static void wait_for_all(crew *run, size_t size) {
    size_t now = __atomic_load_n(&run->generation, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&run->arrived, 1, __ATOMIC_ACQ_REL) == size) {
        __atomic_store_n(&run->arrived, 0, __ATOMIC_RELAXED);
        __atomic_store_n(&run->generation, now + 1, __ATOMIC_RELEASE);
        return;
    }
    for (unsigned spins = 0; __atomic_load_n(&run->generation, __ATOMIC_ACQUIRE) == now; spins++) {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ volatile("yield");
#endif
        if (spins > 1 << 10) sched_yield(); /* it waits for a thread that the system has stopped */
    }
}

/* Each thread of a team runs the same steps and waits for the others after each; without a team each step
 * starts threads of its own. */
typedef struct {
    crew *crew;
    size_t team; /* its size, or 0 */
    size_t *next; /* the next step's counter */
} worker;

static void step(worker *self, task work, void *job) {
    if (!self->team) run_all(work, job, self->crew->threads, self->crew->parallel);
    else work(job), wait_for_all(self->crew, self->team);
}

/* The same work on each thread of a team, or on this one. */
static void run_together(crew *run, task work, void *argument) {
#ifndef __APPLE__
    if (run->threads > 1 && run->parallel && run->size) {
        run->parallel(work, argument, run->threads, 0);
        return;
    }
#endif
    run->size = NULL;
    work(argument);
}

static worker join(crew *run) { return (worker){run, run->size ? (size_t)run->size() : 0, run->counters}; }

static void round_rows(worker *self, forward *run, const float *x, const float *norm, int gated, size_t width) {
    const stack *shape = run->shape;
    rounding job = {x, norm, shape->eps, gated, shape->tokens, width, run->rounded, self->next++, 0};
    step(self, run_rounding, &job);
    if (job.failed) __atomic_store_n(&run->failed, 1, __ATOMIC_RELAXED);
}

/* Rounded rows [m, width] by matrices whose rows follow each other: out is [m, stride]. */
static void multiply_rows(worker *self, const matrix *parts, size_t count, size_t width, const x_block *rounded,
                          size_t m, const float *bias, const float *residual, float *out, size_t stride) {
    for (size_t p = 0, at = 0; p < count && parts[p].rows; at += parts[p++].rows) {
        int last = p + 1 == count || !parts[p + 1].rows;
        product job = {parts[p].kind, parts[p].tiles, parts[p].rows, width / BLOCK, m, rounded,
                    bias ? bias + at : NULL, residual, out + at, stride,
                    chunk_of(parts[p].rows, self->crew->threads), self->next++};
        if (self->team && !last) run_product(&job); /* nothing reads it before the others are done */
        else step(self, run_product, &job);
    }
}

static void run_layer(worker *self, forward *run, const layer *own) {
    const stack *shape = run->shape;
    const size_t m = shape->tokens, heads = shape->heads, kv_heads = shape->kv_heads, size = shape->size;
    const size_t width = heads * size, hidden = shape->hidden, slot = shape->capacity * size;
    round_rows(self, run, shape->x, own->input_norm, 0, hidden);
    multiply_rows(self, own->qkv, 3, hidden, run->rounded, m, own->qkv_bias, NULL, run->qkv, width + 2 * kv_heads * size);
    rotation turn = {run->qkv, m, width + 2 * kv_heads * size, heads, kv_heads, size, shape->capacity, own->q_norm, own->k_norm, shape->eps,
                     shape->cos, shape->sin, shape->places, run->query, own->keys, own->values, self->next++};
    step(self, run_rotation, &turn);
    attention attend = {run->query, own->keys, own->values, kv_heads * slot, slot, m, heads, kv_heads, size,
                        own->spans, own->extras, shape->scale, run->mixed, run->longest,
                        near_of(m, kv_heads, self->crew->threads), self->next++, 0};
    step(self, run_attention, &attend);
    if (attend.failed) __atomic_store_n(&run->failed, 1, __ATOMIC_RELAXED);
    round_rows(self, run, run->mixed, NULL, 0, width);
    multiply_rows(self, &own->out, 1, width, run->rounded, m, own->out_bias, shape->x, shape->x, hidden);
    round_rows(self, run, shape->x, own->post_norm, 0, hidden);
    multiply_rows(self, own->gate_up, 2, hidden, run->rounded, m, NULL, NULL, run->gates, 2 * shape->inner);
    round_rows(self, run, run->gates, NULL, 1, shape->inner);
    multiply_rows(self, &own->down, 1, shape->inner, run->rounded, m, NULL, shape->x, shape->x, hidden);
    size_t *next = self->next++;
    if (!own->captured) return;
    for (size_t r; (r = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < m;) /* what comes next reads x, too */
        memcpy(own->captured + r * shape->captured_stride, shape->x + r * hidden, hidden * sizeof(float));
}

static void run_layers(void *argument) {
    forward *run = argument;
    worker self = join(&run->crew);
    for (size_t i = 0; i < run->shape->layers; i++) run_layer(&self, run, run->layers + i);
}

/* The layers' output in place of their input; 0, or -1 where there is no memory. */
int domino_forward(const layer *layers, const stack *shape, unsigned threads, team parallel,
                   int (*team_size)(void)) {
    enum { STEPS = 16 };
    const size_t m = shape->tokens, width = shape->heads * shape->size;
    const size_t joined = width + 2 * shape->kv_heads * shape->size;
    size_t widest = shape->inner > width ? shape->inner : width;
    if (shape->hidden > widest) widest = shape->hidden;
    forward run = {.crew = {threads, parallel, team_size, NULL, 0, 0, 0}, .layers = layers, .shape = shape};
    for (size_t i = 0; i < shape->layers; i++) {
        size_t longest = longest_of(layers[i].spans, m);
        if (longest > run.longest) run.longest = longest;
    }
    run.crew.counters = calloc(shape->layers * STEPS + 1, sizeof *run.crew.counters);
    run.rounded = malloc(m * widest / BLOCK * sizeof *run.rounded + 1);
    run.qkv = malloc(m * joined * sizeof(float) + 1);
    run.query = malloc(m * width * sizeof(float) + 1);
    run.mixed = malloc(m * width * sizeof(float) + 1);
    run.gates = malloc(m * 2 * shape->inner * sizeof(float) + 1);
    run.failed = !run.crew.counters || !run.rounded || !run.qkv || !run.query || !run.mixed || !run.gates;
    if (!run.failed) run_together(&run.crew, run_layers, &run);
    free(run.crew.counters), free(run.rounded), free(run.qkv), free(run.query), free(run.mixed), free(run.gates);
    return run.failed ? -1 : 0;
}

/* ---- a drafter's context, in one call -------------------------------------------------------------- */

typedef struct {
    matrix project, kv; /* captured states -> features; features -> each layer's keys and values */
    size_t captured, width, layers, kv_heads, size;
    const float *norm, *k_norms; /* [width]; [layers, size] or NULL */
    float eps;
} context;

typedef struct {
    crew crew;
    const context *shape;
    const float *captured; /* [tokens, captured] */
    size_t tokens, capacity, layer_stride;
    const float *cos, *sin;
    const int64_t *places;
    float *keys, *values; /* of the first layer */
    x_block *rounded;
    float *features, *kv;
    int failed;
} storing;

static void run_storing(void *argument) {
    storing *run = argument;
    const context *own = run->shape;
    const size_t m = run->tokens, one = 2 * own->kv_heads * own->size;
    worker self = join(&run->crew);
    rounding first = {run->captured, NULL, 0, 0, m, own->captured, run->rounded, self.next++, 0};
    step(&self, run_rounding, &first);
    multiply_rows(&self, &own->project, 1, own->captured, run->rounded, m, NULL, NULL, run->features, own->width);
    rounding second = {run->features, own->norm, own->eps, 0, m, own->width, run->rounded, self.next++, 0};
    step(&self, run_rounding, &second);
    if (second.failed) __atomic_store_n(&run->failed, 1, __ATOMIC_RELAXED);
    multiply_rows(&self, &own->kv, 1, own->width, run->rounded, m, NULL, NULL, run->kv, own->layers * one);
    for (size_t layer = 0; layer < own->layers; layer++) {
        rotation turn = {run->kv + layer * one, m, own->layers * one, 0, own->kv_heads, own->size, run->capacity,
                         NULL, own->k_norms ? own->k_norms + layer * own->size : NULL, own->eps, run->cos,
                         run->sin, run->places, NULL, run->keys + layer * run->layer_stride,
                         run->values + layer * run->layer_stride, self.next++};
        if (self.team) run_rotation(&turn); /* the last thing that is done */
        else step(&self, run_rotation, &turn);
    }
}

/* Keys and values of captured states in all layers' caches; 0, or -1 where there is no memory. */
int domino_store(const context *shape, const float *captured, size_t tokens, const float *cos, const float *sin,
                 const int64_t *places, float *keys, float *values, size_t capacity, size_t layer_stride,
                 unsigned threads, team parallel, int (*team_size)(void)) {
    enum { STEPS = 4 };
    const size_t widest = shape->captured > shape->width ? shape->captured : shape->width;
    storing run = {.crew = {threads, parallel, team_size, NULL, 0, 0, 0}, .shape = shape, .captured = captured,
                   .tokens = tokens, .capacity = capacity, .layer_stride = layer_stride, .cos = cos, .sin = sin,
                   .places = places, .keys = keys, .values = values};
    run.crew.counters = calloc(STEPS + shape->layers + 1, sizeof *run.crew.counters);
    run.rounded = malloc(tokens * widest / BLOCK * sizeof *run.rounded + 1);
    run.features = malloc(tokens * shape->width * sizeof(float) + 1);
    run.kv = malloc(tokens * shape->layers * 2 * shape->kv_heads * shape->size * sizeof(float) + 1);
    run.failed = !run.crew.counters || !run.rounded || !run.features || !run.kv;
    if (!run.failed) run_together(&run.crew, run_storing, &run);
    free(run.crew.counters), free(run.rounded), free(run.features), free(run.kv);
    return run.failed ? -1 : 0;
}

/* ---- drafts one after the other, in one call ------------------------------------------------------- */

typedef struct { /* a Domino head over a target's vocabulary; all widths are whole blocks */
    matrix embedding, lm_head, input, carried, hidden, prefix, output;
    const float *bias; /* of the lm_head, or NULL */
    const int64_t *tokens; /* ids of the lm_head's rows, or NULL */
    size_t width, state, rank; /* of hidden states, of the GRU, of the correction */
    size_t uncorrected; /* drafts that are the backbone's alone */
} head;

typedef struct { float value; size_t column; } candidate;

typedef struct {
    crew crew;
    const head *head;
    size_t batch, depth;
    const float *x; /* [batch, depth, width] */
    const int64_t *anchors; /* [batch] */
    int64_t *drafts; /* [batch, depth] */
    x_block *rounded;
    float *base, *projected; /* [batch, depth, rows of the lm_head], [batch, depth, rank] */
    float *inputs, *kept; /* [batch, 3 * state]: what the GRU makes of a token, and of its state */
    candidate *best; /* [chunks, batch] */
    float *numbers; /* of all threads' own rows */
    x_block *blocks;
} rollout;

/* Rows [m, width] as products read them. */
static void round_own(const float *x, size_t m, size_t width, x_block *out) {
    size_t next = 0;
    rounding job = {x, NULL, 0, 0, m, width, out, &next, 0};
    run_rounding(&job);
}

ALWAYS f16v sigmoid(f16v x) { return 1.0f / (1.0f + exponential(-x)); }

/* The state [batch, state] after one more token. */
static void read_token(const rollout *run, float *state) {
    const size_t size = run->head->state;
    for (size_t r = 0; r < run->batch; r++)
        for (size_t i = 0; i < size; i += 16) {
            const float *input = run->inputs + r * 3 * size + i, *kept = run->kept + r * 3 * size + i;
            f16v reset = sigmoid(LOAD(f16v, input) + LOAD(f16v, kept));
            f16v update = sigmoid(LOAD(f16v, input + size) + LOAD(f16v, kept + size));
            f16v e = exponential(-2.0f * (LOAD(f16v, input + 2 * size) + reset * LOAD(f16v, kept + 2 * size)));
            f16v new = (1.0f - e) / (1.0f + e); /* tanh */
            f16v done = new + update * (LOAD(f16v, state + r * size + i) - new);
            memcpy(state + r * size + i, &done, sizeof done);
        }
}

/* What the correction is made of, [batch, rank]: of the projected hidden states of draft `index` and the state. */
static void activate(const rollout *run, size_t index, const x_block *states, float *out) {
    const head *own = run->head;
    size_t next = 0;
    product job = {own->prefix.kind, own->prefix.tiles, own->rank, own->state / BLOCK, run->batch, states, NULL,
                   NULL, out, own->rank, (own->rank + ROWS - 1) / ROWS, &next};
    run_product(&job);
    for (size_t r = 0; r < run->batch; r++)
        for (size_t i = 0; i < own->rank; i += 16) {
            const float *projected = run->projected + (r * run->depth + index) * own->rank + i;
            f16v done = silu(LOAD(f16v, projected) + LOAD(f16v, out + r * own->rank + i));
            memcpy(out + r * own->rank + i, &done, sizeof done);
        }
}

/* The first of the largest of `count` logits from a column on, if it is larger than what is known. */
static void find_best(const float *logits, size_t count, size_t column, candidate *best) {
    f16v largest = (f16v){0} - INFINITY;
    float most = -INFINITY;
    size_t i = 0;
    for (; i + 16 <= count; i += 16) largest = larger(LOAD(f16v, logits + i), largest);
    for (int k = 0; k < 16; k++) most = largest[k] > most ? largest[k] : most;
    for (; i < count; i++) most = logits[i] > most ? logits[i] : most;
    if (!(most > best->value)) return;
    for (i = 0; logits[i] != most;) i++;
    *best = (candidate){most, column + i};
}

typedef struct {
    product correction; /* added to the base logits, in place */
    int corrected;
    const rollout *run;
} choice;

static void run_choice(void *argument) {
    const choice *job = argument;
    const product *own = &job->correction;
    const size_t tiles = (own->rows + ROWS - 1) / ROWS;
    for (;;) {
        size_t start = __atomic_fetch_add(own->next, own->chunk_tiles, __ATOMIC_RELAXED);
        if (start >= tiles) return;
        size_t end = tiles - start < own->chunk_tiles ? tiles : start + own->chunk_tiles;
        for (size_t first = 0; job->corrected && first < own->m; first += TILE)
            for (size_t tile = start; tile < end; tile++) {
                size_t count = own->m - first < TILE ? own->m - first : TILE;
                KERNELS[own->kind][count - 1](own, tile, first);
            }
        size_t column = start * ROWS, last = end * ROWS < own->rows ? end * ROWS : own->rows;
        for (size_t r = 0; r < own->m; r++) {
            candidate *best = job->run->best + start / own->chunk_tiles * own->m + r;
            *best = (candidate){-INFINITY, column};
            find_best(own->out + r * own->stride + column, last - column, column, best);
        }
    }
}

static void run_drafts(void *argument) {
    rollout *run = argument;
    const head *head = run->head;
    const size_t batch = run->batch, depth = run->depth, m = batch * depth, rows = head->lm_head.rows;
    const size_t width = head->width, size = head->state, rank = head->rank;
    worker self = join(&run->crew);
    size_t place = __atomic_fetch_add(&run->crew.joined, 1, __ATOMIC_RELAXED);
    float *row = run->numbers + place * batch * (width + size + rank), *state = row + batch * width;
    float *activation = state + batch * size;
    x_block *read = run->blocks + place * batch * (width + size + rank) / BLOCK;
    x_block *states = read + batch * width / BLOCK, *activations = states + batch * size / BLOCK;
    rounding whole = {run->x, NULL, 0, 0, m, width, run->rounded, self.next++, 0};
    step(&self, run_rounding, &whole);
    multiply_rows(&self, &head->hidden, 1, width, run->rounded, m, NULL, NULL, run->projected, rank);
    multiply_rows(&self, &head->lm_head, 1, width, run->rounded, m, head->bias, NULL, run->base, rows);
    memset(state, 0, batch * size * sizeof *state);
    round_own(state, batch, size, states);
    for (size_t index = 0; index < depth; index++) {
        for (size_t r = 0; r < batch; r++) {
            int64_t token = index ? __atomic_load_n(run->drafts + r * depth + index - 1, __ATOMIC_RELAXED) : run->anchors[r];
            domino_rows(head->embedding.kind, head->embedding.tiles, width / BLOCK, &token, 1, row + r * width);
        }
        round_own(row, batch, width, read);
        multiply_rows(&self, &head->input, 1, width, read, batch, NULL, NULL, run->inputs, 3 * size);
        multiply_rows(&self, &head->carried, 1, size, states, batch, NULL, NULL, run->kept, 3 * size);
        read_token(run, state);
        round_own(state, batch, size, states);
        int corrected = index >= head->uncorrected;
        if (corrected) {
            activate(run, index, states, activation);
            round_own(activation, batch, rank, activations);
        }
        float *logits = run->base + index * rows; /* [batch, depth * rows] */
        choice job = {{head->output.kind, head->output.tiles, rows, rank / BLOCK, batch, activations, NULL, logits,
                       logits, depth * rows, chunk_of(rows, run->crew.threads), self.next++}, corrected, run};
        step(&self, run_choice, &job);
        size_t chunks = ((rows + ROWS - 1) / ROWS + job.correction.chunk_tiles - 1) / job.correction.chunk_tiles;
        for (size_t r = 0; r < batch; r++) {
            candidate best = run->best[r];
            for (size_t c = 1; c < chunks; c++)
                if (run->best[c * batch + r].value > best.value) best = run->best[c * batch + r];
            int64_t token = head->tokens ? head->tokens[best.column] : (int64_t)best.column;
            __atomic_store_n(run->drafts + r * depth + index, token, __ATOMIC_RELAXED); /* all store the same */
        }
    }
}

/* Greedy drafts [batch, depth] from the backbone's states; 0, or -1 where there is no memory. */
int domino_draft(const head *head, const float *x, size_t batch, size_t depth, const int64_t *anchors,
                 int64_t *drafts, unsigned threads, team parallel, int (*team_size)(void)) {
    enum { STEPS = 3, ONCE = 3 };
    const size_t m = batch * depth, own = batch * (head->width + head->state + head->rank);
    const size_t chunks = (head->lm_head.rows + ROWS - 1) / ROWS;
    rollout run = {.crew = {threads, parallel, team_size, NULL, 0, 0, 0}, .head = head, .batch = batch,
                   .depth = depth, .x = x, .anchors = anchors, .drafts = drafts};
    run.crew.counters = calloc(ONCE + depth * STEPS + 1, sizeof *run.crew.counters);
    run.rounded = malloc(m * head->width / BLOCK * sizeof *run.rounded + 1);
    run.base = malloc(m * head->lm_head.rows * sizeof(float) + 1);
    run.projected = malloc(m * head->rank * sizeof(float) + 1);
    run.inputs = malloc(batch * 3 * head->state * sizeof(float) + 1);
    run.kept = malloc(batch * 3 * head->state * sizeof(float) + 1);
    run.best = malloc(batch * chunks * sizeof *run.best + 1);
    run.numbers = malloc(threads * own * sizeof(float) + 1);
    run.blocks = malloc(threads * own / BLOCK * sizeof *run.blocks + 1);
    int failed = !run.crew.counters || !run.rounded || !run.base || !run.projected || !run.inputs || !run.kept ||
                 !run.best || !run.numbers || !run.blocks;
    if (!failed) run_together(&run.crew, run_drafts, &run);
    free(run.crew.counters), free(run.rounded), free(run.base), free(run.projected), free(run.inputs);
    free(run.kept), free(run.best), free(run.numbers), free(run.blocks);
    return failed ? -1 : 0;
}
