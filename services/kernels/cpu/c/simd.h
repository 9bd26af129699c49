/* Eight floats at once. */
#ifndef SSD_SIMD_H
#define SSD_SIMD_H

typedef float eight __attribute__((vector_size(32), aligned(4), may_alias));
typedef int eight_ints __attribute__((vector_size(32), aligned(4), may_alias));

#if defined(__x86_64__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma")))
#else
#define AVX2
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
