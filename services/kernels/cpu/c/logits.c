/* See logits.h. */
#include "logits.h"

#include <math.h>

#include "exponential.h"
#include "simd.h"

#define SIMD AVX2

enum { LANES = 8 };

SIMD static float find_largest(int count, const float *row)
{
    eight most;
    eight_ints none = {0};
    int i = 0;
    float largest = -INFINITY;
    for (int lane = 0; lane < LANES; lane++)
        most[lane] = -INFINITY;
    for (; i + LANES <= count; i += LANES) {
        eight x = *(const eight *)(row + i);
        eight_ints above = x > most;
        none |= x != x;
        most = (eight)(((eight_ints)x & above) | ((eight_ints)most & ~above));
    }
    for (int lane = 0; lane < LANES; lane++) {
        if (none[lane])
            return NAN;
        largest = most[lane] > largest ? most[lane] : largest;
    }
    for (; i < count; i++) {
        if (isnan(row[i]))
            return NAN;
        largest = row[i] > largest ? row[i] : largest;
    }
    return largest;
}

int largest_of_row(int count, const float *row, float *largest)
{
    int at = 0;
    *largest = find_largest(count, row);
    while (at < count && !(row[at] == *largest))
        at++;
    return at < count ? at : 0;
}

SIMD float sum_of_powers(int count, const float *row, float largest)
{
    eight sum = {0}, rest = {0};
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        sum += exponential(*(const eight *)(row + i) - largest);
    if (i < count) {
        for (int lane = 0; lane < LANES; lane++)
            rest[lane] = i + lane < count ? row[i + lane] - largest : -INFINITY;
        sum += exponential(rest);
    }
    return ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
}
