/* See int8_rows.h. A drafter may round: what it drafts is verified. Four products of bytes a lane
 * and instruction take an eighth of the time that floats take, so that many rows cost as little
 * as the reading of the weights. All sums are whole numbers: they are the same in any order.
 */
#include "int8_rows.h"

#include <float.h>
#include <math.h>

#if defined(__x86_64__)
#include <immintrin.h>

#include "scratch.h"

#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))

enum {
    STEP = TILED_BYTES,
    LARGEST = 127,
    UNSIGNED = 128 /* the instruction takes unsigned bytes times signed ones */
};

int has_int8_rows(void)
{
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

/* The bits of floats without their signs are in the order of their sizes, with NaN as the largest. */
VNNI static float largest_of(int k, const float *x)
{
    const __m512i unsign = _mm512_set1_epi32(0x7fffffff);
    __m512i most = _mm512_setzero_si512();
    for (int i = 0; i < k; i += 16) {
        __mmask16 there = k - i >= 16 ? 0xffff : (__mmask16)((1u << (k - i)) - 1);
        __m512i bits = _mm512_maskz_loadu_epi32(there, x + i);
        most = _mm512_max_epi32(most, _mm512_and_si512(bits, unsign));
    }
    union {
        int bits;
        float size;
    } largest = {_mm512_reduce_max_epi32(most)};
    return largest.size;
}

/* One row; returns the sum of its bytes. */
VNNI static int round_row(int k, const float *x, float factor, int row_bytes, signed char *to)
{
    __m512i sum = _mm512_setzero_si512();
    for (int i = 0; i < row_bytes; i += 16) {
        int left = k - i;
        __mmask16 there = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
        __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(there, x + i), _mm512_set1_ps(factor));
        __m512i whole = _mm512_cvtps_epi32(scaled);
        sum = _mm512_add_epi32(sum, whole);
        _mm_storeu_si128((__m128i *)(to + i), _mm512_cvtsepi32_epi8(whole));
    }
    return _mm512_reduce_add_epi32(sum);
}

struct int8_rows int8_round_rows(int m, int k, const float *x, int ldx)
{
    int row_bytes = (k + STEP - 1) / STEP * STEP;
    char *room = scratch(ROUNDED_ROWS, (size_t)m * (row_bytes + sizeof(float) + sizeof(int)));
    signed char *bytes = (signed char *)room;
    float *scales = (float *)(void *)(room + (size_t)m * row_bytes);
    int *sums = (int *)(void *)(scales + m);
    for (int r = 0; r < m; r++) {
        const float *row = x + (size_t)r * ldx;
        float largest = largest_of(k, row);
        float factor = largest > FLT_MIN * LARGEST && isfinite(largest) ? LARGEST / largest : 0.0f;
        /* What is no number makes its row's products none either. */
        scales[r] = isfinite(largest) ? largest / LARGEST : NAN;
        sums[r] = round_row(k, row, factor, row_bytes, bytes + (size_t)r * row_bytes);
    }
    return (struct int8_rows){bytes, scales, sums, m, k, row_bytes};
}

/* Sixteen lanes of each of four vectors. */
VNNI static __m128i add_lanes(__m512i a, __m512i b, __m512i c, __m512i d)
{
    __m256i e = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m256i f = _mm256_add_epi32(_mm512_castsi512_si256(b), _mm512_extracti64x4_epi64(b, 1));
    __m256i g = _mm256_add_epi32(_mm512_castsi512_si256(c), _mm512_extracti64x4_epi64(c, 1));
    __m256i h = _mm256_add_epi32(_mm512_castsi512_si256(d), _mm512_extracti64x4_epi64(d, 1));
    __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(e, f), _mm256_hadd_epi32(g, h));
    return _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

/* ROWS rows of x from row `at` on times one tile of w, of which `left` rows count. */
#define TILE(ROWS)                                                                              \
    VNNI static void tile_##ROWS(const struct int8_rows *x, int at, float alpha,                \
                                 struct weights w, int left, float *y, int ldy)                 \
    {                                                                                           \
        const __m512i to_unsigned = _mm512_set1_epi8((char)UNSIGNED);                           \
        const signed char *from = x->bytes + (size_t)at * x->row_bytes;                         \
        const char *next = w.rows;                                                              \
        __m512i sum[ROWS][TILED_ROWS];                                                          \
        for (int r = 0; r < ROWS; r++)                                                          \
            for (int c = 0; c < TILED_ROWS; c++)                                                \
                sum[r][c] = _mm512_setzero_si512();                                             \
        for (int i = 0; i < x->row_bytes; i += STEP) {                                          \
            __m512i part[TILED_ROWS];                                                           \
            for (int c = 0; c < TILED_ROWS; c++, next += STEP)                                  \
                part[c] = _mm512_xor_si512(_mm512_loadu_si512(next), to_unsigned);              \
            for (int r = 0; r < ROWS; r++) {                                                    \
                __m512i own = _mm512_load_si512(from + (size_t)r * x->row_bytes + i);           \
                for (int c = 0; c < TILED_ROWS; c++)                                            \
                    sum[r][c] = _mm512_dpbusd_epi32(sum[r][c], part[c], own);                   \
            }                                                                                   \
        }                                                                                       \
        __mmask8 kept = (__mmask8)((1 << left) - 1);                                            \
        __m128 scales = _mm_maskz_loadu_ps(kept, w.scales);                                     \
        _Pragma("GCC unroll 8") /* or the sums would be stored at each step */                  \
        for (int r = 0; r < ROWS; r++) {                                                        \
            __m128i total = add_lanes(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);              \
            total = _mm_sub_epi32(total, _mm_set1_epi32(UNSIGNED * x->sums[at + r]));           \
            __m128 factors = _mm_mul_ps(scales, _mm_set1_ps(alpha * x->scales[at + r]));        \
            _mm_mask_storeu_ps(y + (size_t)(at + r) * ldy, kept,                                \
                               _mm_mul_ps(factors, _mm_cvtepi32_ps(total)));                    \
        }                                                                                       \
    }

TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)

typedef void tile_of_rows(const struct int8_rows *x, int at, float alpha, struct weights w,
                          int left, float *y, int ldy);
static tile_of_rows *const by_rows[1 + MOST_ROWS] = {NULL,   tile_1, tile_2, tile_3,
                                                     tile_4, tile_5, tile_6};

void int8_multiply(const struct int8_rows *x, int first, int end, float alpha, struct weights w,
                   float *y, int ldy)
{
    int passes = (x->m + MOST_ROWS - 1) / MOST_ROWS, rows = (x->m + passes - 1) / passes;
    for (int at = 0; at < x->m; at += rows) {
        if (rows > x->m - at)
            rows = x->m - at;
        for (int c = first; c < end; c += TILED_ROWS) {
            struct weights own = w;
            own.rows += (size_t)c * w.row_bytes;
            own.scales += (size_t)c * w.row_scales;
            by_rows[rows](x, at, alpha, own, end - c < TILED_ROWS ? end - c : TILED_ROWS, y + c, ldy);
        }
    }
}

#else

#include <stdlib.h>

int has_int8_rows(void)
{
    return 0;
}

struct int8_rows int8_round_rows(int m, int k, const float *x, int ldx)
{
    (void)m, (void)k, (void)x, (void)ldx;
    abort();
}

void int8_multiply(const struct int8_rows *x, int first, int end, float alpha, struct weights w,
                   float *y, int ldy)
{
    (void)x, (void)first, (void)end, (void)alpha, (void)w, (void)y, (void)ldy;
    abort();
}

#endif
