/* AVX-512 with VNNI: a step of sixteen channels is one vpdpbusd. */
#ifndef SSD_ISA_H
#define SSD_ISA_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define ISA avx512
#define TILE_ROWS 8
enum { LANES = 16 };

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef __m512i dot_sum;

static inline vf vf_fma(vf a, vf b, vf c) { return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

static inline vf vf_from_halves(const uint16_t *from)
{
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

static inline void vf_to_halves(vf from, uint16_t *to)
{
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)from, _MM_FROUND_TO_NEAREST_INT));
}

static inline vi vi_from_shorts(const uint16_t *from)
{
    return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
}

static inline vi vi_from_bytes(const uint8_t *from)
{
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
}

static inline void dot_step(dot_sum *sum, vi weights, int32_t activations)
{
    *sum = _mm512_dpbusd_epi32(*sum, (__m512i)weights, _mm512_set1_epi32(activations));
}

static inline void dot_step_nibbles(dot_sum *sum, vi weights, int32_t activations)
{
    dot_step(sum, weights, activations);
}

static inline vi dot_total(dot_sum sum) { return (vi)sum; }
static inline vi dot_total_nibbles(dot_sum sum) { return (vi)sum; }

/* LANES rows of LANES floats to columns; strides in floats. */
static inline void transpose(const float *from, long stride, float *to, long step)
{
    __m512 x[16], y[16];
    for (int i = 0; i < 16; i++)
        x[i] = _mm512_loadu_ps(from + i * stride);
    for (int i = 0; i < 16; i += 4) { /* in each quarter, four rows of a column */
        __m512 a = _mm512_unpacklo_ps(x[i], x[i + 1]), b = _mm512_unpackhi_ps(x[i], x[i + 1]);
        __m512 c = _mm512_unpacklo_ps(x[i + 2], x[i + 3]), d = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
        y[i] = _mm512_shuffle_ps(a, c, 0x44);
        y[i + 1] = _mm512_shuffle_ps(a, c, 0xee);
        y[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
        y[i + 3] = _mm512_shuffle_ps(b, d, 0xee);
    }
    for (int j = 0; j < 4; j++) { /* quarter q of y[4 * r + j] is column 4 * q + j of rows 4 * r... */
        __m512 a = _mm512_shuffle_f32x4(y[j], y[4 + j], 0x88), b = _mm512_shuffle_f32x4(y[8 + j], y[12 + j], 0x88);
        __m512 c = _mm512_shuffle_f32x4(y[j], y[4 + j], 0xdd), d = _mm512_shuffle_f32x4(y[8 + j], y[12 + j], 0xdd);
        _mm512_storeu_ps(to + j * step, _mm512_shuffle_f32x4(a, b, 0x88));
        _mm512_storeu_ps(to + (8 + j) * step, _mm512_shuffle_f32x4(a, b, 0xdd));
        _mm512_storeu_ps(to + (4 + j) * step, _mm512_shuffle_f32x4(c, d, 0x88));
        _mm512_storeu_ps(to + (12 + j) * step, _mm512_shuffle_f32x4(c, d, 0xdd));
    }
}

#endif
