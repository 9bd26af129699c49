/* e to the power of eight floats at once. */
#ifndef SSD_EXPONENTIAL_H
#define SSD_EXPONENTIAL_H

#include "simd.h"

/* e to the power of x <= 0, after Cephes; 0 where x is below the smallest normal number's. */
AVX2 static inline eight exponential(eight x)
{
    const eight least = {-87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f, -87.0f};
    eight_ints zero = x < least;
    eight bounded = (eight)(((eight_ints)x & ~zero) | ((eight_ints)least & zero));
    eight_ints n = __builtin_convertvector(bounded * 1.44269504088896341f - 0.5f, eight_ints);
    eight whole = __builtin_convertvector(n, eight);
    eight r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    eight p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    eight power = (eight)((n + 127) << 23);
    return (eight)((eight_ints)(p * power) & ~zero);
}

#endif
