/* See tiles.h. Every kind of weight, for each set of instructions. */
#include "simd.h"
#include "tiles.h"

enum { AHEAD = 8192 }; /* bytes that the prefetch is ahead of the product */

/* The sums of four vectors. */
AVX2 static inline void add_lanes(float *to, eight a, eight b, eight c, eight d)
{
#if defined(__x86_64__)
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b),
                                  _mm256_hadd_ps((__m256)c, (__m256)d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    eight all[] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        eight v = all[i];
        to[i] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    }
#endif
}

#define NO_REST 0.0f /* of rows that are whole blocks */

#define LANES 8
#define SIMD AVX2
#define FMA FMA_8
#define HALVES(v) (v)
#include "tile_kinds.h"

#if defined(__x86_64__)
#define LANES 16
#define SIMD AVX512
#define FMA(a, b, c) ((__typeof__(c))_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define HALVES(v)                                                                               \
    ((eight)_mm256_add_ps(_mm512_castps512_ps256((__m512)(v)),                                  \
                          _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)(v), 1))))
#include "tile_kinds.h"
#endif

const struct tiles *tiles_for(enum weight_kind kind, int has_avx512)
{
#if defined(__x86_64__)
    return (has_avx512 ? kinds_16 : kinds_8)[kind];
#else
    (void)has_avx512;
    return kinds_8[kind];
#endif
}

struct weights weights_of(enum weight_kind kind, int k, const void *rows, const float *scales)
{
    static const float none;
    const size_t bits[KINDS] = {32, 8, 4, 8, 16, 16, 8};
    int columns = k, row_scales = 0, tile_scales;
    if (kind == TILED_INT8)
        columns = (k + TILED_BYTES - 1) / TILED_BYTES * TILED_BYTES;
    if (kind == ROUNDED_INT8 || kind == TILED_INT8)
        row_scales = 1;
    tile_scales = TILED_ROWS * row_scales;
    size_t row_bytes = columns * bits[kind] / 8, tile_bytes = TILED_ROWS * row_bytes;
    if (kind == FOUR_BITS || kind == EIGHT_BITS) {
        row_bytes = BLOCK_SIZE * bits[kind] / 8;
        row_scales = 2;
        tile_scales = TILED_ROWS * row_scales * (k / BLOCK_SIZE);
    }
    return (struct weights){rows,       row_bytes,  tile_bytes, row_scales > 0 ? scales : &none,
                            row_scales, tile_scales};
}

struct weights from_row(struct weights w, int row)
{
    w.rows += row / TILED_ROWS * w.tile_bytes + row % TILED_ROWS * w.row_bytes;
    w.scales += row / TILED_ROWS * (size_t)w.tile_scales + row % TILED_ROWS * w.row_scales;
    return w;
}
