/* The best few of each row of logits, and what the whole row adds up to, in two readings of it. */
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "logits.h"
#include "simd.h"

#define SIMD AVX2

enum { LANES = 8 };

/* The best so far, in falling order; of equals the first. */
struct list {
    int count, width;
    int *columns;
    float *values;
};

static void insert(struct list *list, int column, float value)
{
    int at = list->count < list->width ? list->count++ : list->width - 1;
    for (; at > 0 && list->values[at - 1] < value; at--) {
        list->values[at] = list->values[at - 1];
        list->columns[at] = list->columns[at - 1];
    }
    list->values[at] = value;
    list->columns[at] = column;
}

SIMD static int any_above(const float *row, float bound)
{
    eight_ints above = *(const eight *)row > bound;
    return any_lane(above);
}

static void find_best(int count, const float *row, struct list *best)
{
    int i = 0;
    for (; i < best->width; i++)
        insert(best, i, row[i]);
    const float *bound = &best->values[best->width - 1];
    while (i < count)
        if (i + LANES <= count && !any_above(row + i, *bound)) {
            i += LANES;
        } else {
            int end = i + LANES < count ? i + LANES : count;
            for (; i < end; i++)
                if (row[i] > *bound)
                    insert(best, i, row[i]);
        }
}

/* Of rows [rows, count], `stride` floats apart: columns and values [rows, width] in falling order,
 * and the logarithms of the sums of all powers of e. Where a row has a NaN, its sum is NaN and
 * nothing is said of its best. */
void best_of_rows(int rows, int count, const float *logits, long stride, int width, int *columns,
                  float *values, float *totals)
{
    for (int r = 0; r < rows; r++) {
        const float *row = logits + r * stride;
        float largest;
        largest_of_row(count, row, &largest);
        struct list best = {0, width, columns + (size_t)r * width, values + (size_t)r * width};
        totals[r] = isfinite(largest) ? largest + logf(sum_of_powers(count, row, largest)) : NAN;
        if (isnan(largest))
            memset(best.columns, 0, width * sizeof *best.columns);
        else
            find_best(count, row, &best);
    }
}
