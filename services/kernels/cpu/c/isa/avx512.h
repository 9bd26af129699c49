/* AVX-512 with VNNI: a step of sixteen channels is one vpdpbusd. */
#ifndef SSD_ISA_H
#define SSD_ISA_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "isa/halves_x86.h"

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

#endif
