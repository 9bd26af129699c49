/* AVX2: products of bytes are summed in 16 bits over a group of 32, which 15 * 127 * 2 * 8 fits;
 * weights of eight bits are two of four. With AVX-VNNI a step is one vpdpbusd of eight channels. */
#ifndef SSD_ISA_H
#define SSD_ISA_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "isa/halves_x86.h"

#ifdef __AVXVNNI__
#define ISA avxvnni
#else
#define ISA avx2
#endif
#define TILE_ROWS 4
/* Sums stay in the order and the registers that they are written in: of sixteen, the compiler would
 * put some into memory to add several products at once. */
#define KEEP(sum) __asm__("" : "+x"(sum))
enum { LANES = 8 };

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vf vf_fma(vf a, vf b, vf c) { return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }

static inline vf vf_from_halves(const uint16_t *from)
{
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}

static inline void vf_to_halves(vf from, uint16_t *to)
{
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)from, _MM_FROUND_TO_NEAREST_INT));
}

static inline vi vi_from_shorts(const uint16_t *from)
{
    return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
}

static inline vi vi_from_bytes(const uint8_t *from)
{
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
}

#ifdef __AVXVNNI__

typedef __m256i dot_sum;

static inline void dot_step(dot_sum *sum, vi weights, int32_t activations)
{
    *sum = _mm256_dpbusd_avx_epi32(*sum, (__m256i)weights, _mm256_set1_epi32(activations));
    KEEP(*sum);
}

static inline void dot_step_nibbles(dot_sum *sum, vi weights, int32_t activations)
{
    dot_step(sum, weights, activations);
}

static inline vi dot_total(dot_sum sum) { return (vi)sum; }
static inline vi dot_total_nibbles(dot_sum sum) { return (vi)sum; }

#else

typedef struct {
    __m256i low, high; /* sixteen sums of two products; `high` of the upper four bits */
} dot_sum;

static inline void dot_step_nibbles(dot_sum *sum, vi weights, int32_t activations)
{
    __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(activations));
    sum->low = _mm256_add_epi16(sum->low, pairs);
    KEEP(sum->low);
}

static inline void dot_step(dot_sum *sum, vi weights, int32_t activations)
{
    const __m256i nibble = _mm256_set1_epi8(15);
    __m256i high = _mm256_and_si256(_mm256_srli_epi16((__m256i)weights, 4), nibble);
    dot_step_nibbles(sum, (vi)_mm256_and_si256((__m256i)weights, nibble), activations);
    high = _mm256_maddubs_epi16(high, _mm256_set1_epi32(activations));
    sum->high = _mm256_add_epi16(sum->high, high);
    KEEP(sum->high);
}

static inline vi dot_total_nibbles(dot_sum sum)
{
    return (vi)_mm256_madd_epi16(sum.low, _mm256_set1_epi16(1));
}

static inline vi dot_total(dot_sum sum)
{
    __m256i high = _mm256_madd_epi16(sum.high, _mm256_set1_epi16(16));
    return (vi)_mm256_add_epi32((__m256i)dot_total_nibbles(sum), high);
}

#endif

#endif
