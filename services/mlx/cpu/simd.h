/* Eight floats at once, and what they are multiplied with. */
#ifndef SSD_SIMD_H
#define SSD_SIMD_H

typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int eight_ints __attribute__((vector_size(32), aligned(4), may_alias));

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#define AVX512 __attribute__((target("avx512f,avx2,fma")))
/* a * b + c, rounded once. Left to the compiler, it might do so in one tile and not in the next,
 * and a row would have other bits in other company. */
#define FMA_8(a, b, c) ((eight)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#else
#define AVX2
#define FMA_8(a, b, c) ((a) * (b) + (c))
#endif

/* Whether a comparison holds in any lane. */
AVX2 static inline int any_lane(eight_ints holds)
{
#if defined(__x86_64__)
    return _mm256_movemask_ps((__m256)holds);
#else
    int any = 0;
    for (int lane = 0; lane < 8; lane++)
        any |= holds[lane];
    return any;
#endif
}

#endif
