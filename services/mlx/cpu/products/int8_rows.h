/* Products of rows with int8 weights, the rows rounded to int8 as well. */
#ifndef SSD_INT8_ROWS_H
#define SSD_INT8_ROWS_H

#include "tiles.h"

/* Some rows of x as bytes. */
struct int8_rows {
    const signed char *bytes; /* [m, row_bytes], with zeros behind the k-th */
    const float *scales;      /* [m], what a row's bytes are multiplied with */
    const int *sums;          /* [m], of a row's bytes */
    int m, k, row_bytes;
};

/* Whether this processor multiplies bytes. */
int has_int8_rows(void);

/* Round x [m, k], each row by itself, into memory of this thread, which its next call reuses. */
struct int8_rows int8_round_rows(int m, int k, const float *x, int ldx);

/* y = alpha * x @ w.T for columns `first`, where a tile begins, to `end`; w is TILED_INT8. */
void int8_multiply(const struct int8_rows *x, int first, int end, float alpha, struct weights w,
                   float *y, int ldy);

#endif
