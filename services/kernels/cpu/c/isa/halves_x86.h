/* Halves of several slots, in AVX2. */
#ifndef SSD_HALVES_X86_H
#define SSD_HALVES_X86_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

/* Eight halves of slot i, and of slot i + 8. */
typedef __m256i vh;
enum { SIDE = 16 }; /* slots side by side in a register */

static inline vh vh_load(const uint8_t *const *slots, int i, size_t at)
{
    __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(slots[i] + at)));
    return _mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i *)(slots[i + 8] + at)), 1);
}

static inline void vh_store(vh from, uint16_t *to) { _mm256_storeu_si256((__m256i *)to, from); }
static inline vh zip_low(vh a, vh b) { return _mm256_unpacklo_epi16(a, b); }
static inline vh zip_high(vh a, vh b) { return _mm256_unpackhi_epi16(a, b); }

#endif
