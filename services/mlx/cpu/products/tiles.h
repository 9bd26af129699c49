/* The innermost products: a few rows of x times a few rows of weights, the sums in registers. */
#ifndef SSD_TILES_H
#define SSD_TILES_H

#include <stddef.h>

/* How the weights of a product are stored, beside floats:
 *
 *     ROUNDED_INT8  bytes, one factor a row; a drafter's, which may be less exact
 *     TILED_INT8    the same in the order in which rows of bytes are multiplied (int8_rows.c):
 *                   64 bytes of each of four rows, then the next 64; zeros fill the last ones
 *     FOUR_BITS     numbers q, two to a byte, and for each block its step and least weight:
 *                   w = q * step + least. Byte i of a block has weight i in its lower half and
 *                   weight i + 16 in its upper one. One block of each of four rows lies before
 *                   the next ones of the same rows, and so do steps; zeros fill the last rows
 *     EIGHT_BITS    the same with a number to a byte
 *     BFLOAT16, FLOAT16
 *
 * Rows of all but floats and bytes with one factor have a whole number of blocks. */
enum weight_kind {
    FLOAT32,
    ROUNDED_INT8,
    FOUR_BITS,
    EIGHT_BITS,
    BFLOAT16,
    FLOAT16,
    TILED_INT8,
    KINDS
};

enum {
    BLOCK_SIZE = 32,
    TILED_ROWS = 4,
    TILED_BYTES = 64,
    MOST_ROWS = 6 /* rows of x whose sums fit the registers */
};

/* The exponents of a float of sixteen bits and of one of 32 differ by this factor. */
#define FROM_FLOAT16 0x1p112f

/* From some row on. */
struct weights {
    const char *rows;
    size_t row_bytes;    /* from one of TILED_ROWS rows to the next */
    size_t tile_bytes;   /* from all of them to the next */
    const float *scales; /* factors or steps; NULL where the kind has none */
    int row_scales, tile_scales;
};

typedef void tile(int k, float alpha, const float *x, int ldx, struct weights w, float *y, int ldy);

/* How products with one kind of weight are computed, by the rows of x that go through at once. */
struct tiles {
    tile *narrow[1 + MOST_ROWS], *wide[1 + MOST_ROWS]; /* times one row of w, and `width` rows */
    int width[1 + MOST_ROWS];
    int balanced; /* rows that need several passes are shared out evenly; else four at a time */
};

/* For AVX2 or AVX-512, or, elsewhere, for whatever there is. */
const struct tiles *tiles_for(enum weight_kind kind, int has_avx512);

/* Rows [n, k] of this kind, from the first one on. */
struct weights weights_of(enum weight_kind kind, int k, const void *rows, const float *scales);

/* The same from a row on. */
struct weights from_row(struct weights w, int row);

#endif
