/* y = alpha * x @ w.T for a few rows of x: what a decoder multiplies, at the memory's speed.
 *
 * BLAS libraries pack w anew on each call, which for 3 to 8 rows costs as much as the product;
 * this reads w once, row by row, for up to MOST_ROWS rows of x. It takes the place of
 * cblas_sgemm under MLX and passes everything else on (services/mlx/blas.py).
 *
 * Weights that have a copy are read there: an exact one in less memory (exact_copy.c), or one
 * that is rounded to bytes (a drafter's), where the rows of x are rounded too if it is tiled
 * (int8_rows.c). Else they stay floats.
 *
 * Beyond `most_rows` rows BLAS is the faster one, but where copies and AVX-512 are.
 *
 * Every element is summed in the same order whatever the number of rows, so that a token's
 * product is the same bits in plain decoding and in a verification. Threads share the columns
 * of a product, which changes no sum either.
 */
#include <stddef.h>
#include <stdint.h>

#include "int8_rows.h"
#include "small_gemm.h"
#include "threads.h"
#include "tiles.h"

enum {
    BLOCK = 48,         /* rows of w, whole tiles, that stay in the L2 cache while x passes */
    MOST_COPIED_ROWS = 64,
    PLACES = 4096,      /* for copies; a power of two */
    LEAST_WORK = 65536, /* elements of w below which helpers would come too late */
    SHARED_ROWS = 8,    /* from here a product that goes on to BLAS is shared by its columns */
    SHARED_COLUMNS = 192
};

typedef void gemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                  int lda, const float *b, int ldb, float beta, float *c, int ldc);
static const struct tiles *tiles[KINDS];
static gemm *other;
static int least_rows, most_rows, wide;

/* By processor, unless a test wants what another one would do. */
void small_gemm_choose_tiles(int has_avx512)
{
    wide = has_avx512;
    for (int kind = 0; kind < KINDS; kind++)
        tiles[kind] = tiles_for(kind, has_avx512);
}

int small_gemm_has_avx512(void)
{
    return wide;
}

/* Where other products go, and for which numbers of rows the work is ours; 0 if it never is. */
int small_gemm_take(gemm *fallback, int least, int most)
{
    int has_avx512 = 0;
    other = fallback;
    least_rows = least;
    most_rows = most;
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        most_rows = 0;
    has_avx512 = __builtin_cpu_supports("avx512f") != 0;
#endif
    small_gemm_choose_tiles(has_avx512);
    return most_rows;
}

/* What products of few rows read in the place of w [n, k]. */
struct copy {
    const float *w;
    int n, k;
    enum weight_kind kind;
    struct weights weights;
};
static struct copy copies[PLACES];
static int copied;

static struct copy *place_of(const float *w)
{
    size_t place = (size_t)((uint64_t)(uintptr_t)w * 0x9E3779B97F4A7C15u >> 32) % PLACES;
    while (copies[place].w != NULL && copies[place].w != w)
        place = (place + 1) % PLACES;
    return &copies[place];
}

/* Read `rows` of this kind in the place of w [n, k] from now on; the caller keeps all of them
 * where they are. Returns 0 if there is no place left. */
int small_gemm_add_copy(const float *w, int n, int k, int kind, const void *rows,
                        const float *scales)
{
    struct copy *place = place_of(w);
    if (place->w == NULL && ++copied > PLACES / 2)
        return 0;
    *place = (struct copy){w, n, k, kind, weights_of(kind, k, rows, scales)};
    return 1;
}

/* One product, whose columns are computed in parts. */
struct product {
    int ta, tb, m, n, k, lda, ldb, ldc, columns;
    float alpha, beta;
    const float *a, *b;
    float *c;
    const struct copy *copy; /* of b, or NULL */
    const struct int8_rows *rounded; /* a, or NULL */
};

static int rows_at_once(const struct tiles *own, int left)
{
    if (left <= MOST_ROWS)
        return left;
    int passes = (left + MOST_ROWS - 1) / MOST_ROWS;
    return own->balanced ? (left + passes - 1) / passes : 4;
}

/* Columns `first` to `end`. */
static void multiply(enum weight_kind kind, int m, int first, int end, int k, float alpha,
                     const float *x, int ldx, struct weights w, float *y, int ldy)
{
    const struct tiles *own = tiles[kind];
    for (int row = 0, rows; row < m; row += rows) {
        rows = rows_at_once(own, m - row);
        int step = own->width[rows];
        for (int c = first; c < end; c += step) {
            if (c + step > end)
                step = 1;
            (step > 1 ? own->wide : own->narrow)[rows](k, alpha, x + (size_t)row * ldx, ldx,
                                                       from_row(w, c),
                                                       y + (size_t)row * ldy + c, ldy);
        }
    }
}

void rows_by_columns(int m, int first, int end, int k, float alpha, const float *x, int ldx,
                     const float *w, int ldw, float *y, int ldy)
{
    multiply(FLOAT32, m, first, end, k, alpha, x, ldx, weights_of(FLOAT32, ldw, w, NULL), y, ldy);
}

static int end_of_part(const struct product *p, int number)
{
    return (number + 1) * p->columns < p->n ? (number + 1) * p->columns : p->n;
}

static void few_rows(const void *context, int number)
{
    const struct product *p = context;
    int end = end_of_part(p, number);
    for (int first = number * p->columns; first < end; first += BLOCK) {
        int last = first + BLOCK < end ? first + BLOCK : end;
        if (p->rounded != NULL)
            int8_multiply(p->rounded, first, last, p->alpha, p->copy->weights, p->c, p->ldc);
        else if (p->copy == NULL)
            rows_by_columns(p->m, first, last, p->k, p->alpha, p->a, p->lda, p->b, p->ldb, p->c,
                            p->ldc);
        else
            multiply(p->copy->kind, p->m, first, last, p->k, p->alpha, p->a, p->lda,
                     p->copy->weights, p->c, p->ldc);
    }
}

static void many_rows(const void *context, int number)
{
    const struct product *p = context;
    int first = number * p->columns;
    const float *b = p->b + (p->tb == TRANSPOSED ? (size_t)first * p->ldb : (size_t)first);
    other(ROW_MAJOR, p->ta, p->tb, p->m, end_of_part(p, number) - first, p->k, p->alpha, p->a,
          p->lda, b, p->ldb, p->beta, p->c + first, p->ldc);
}

/* The copy that a product of these rows reads, or NULL. */
static const struct copy *copy_for(const struct product *p)
{
    if (copied == 0 || p->m > MOST_COPIED_ROWS)
        return NULL;
    const struct copy *found = place_of(p->b);
    int fits = found->w == p->b && found->n == p->n && found->k == p->k && p->ldb == p->k;
    int is_rounded = found->kind == ROUNDED_INT8 || found->kind == TILED_INT8;
    return fits && (is_rounded || wide || p->m <= most_rows) ? found : NULL;
}

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc)
{
    struct product p = {ta, tb, m, n, k, lda, ldb, ldc, BLOCK, alpha, beta, a, b, c, NULL, NULL};
    struct int8_rows rounded;
    int large = (size_t)n * k >= LEAST_WORK;
    int is_ours = order == ROW_MAJOR && ta == PLAIN && tb == TRANSPOSED && beta == 0.0f &&
                  most_rows > 0;
    /* Small weights have no copies; a row's products all go the same way. */
    int most = wide && !large ? MOST_COPIED_ROWS : most_rows;
    if (is_ours)
        p.copy = copy_for(&p);
    if (is_ours && (p.copy != NULL || (m >= least_rows && m <= most))) {
        p.columns = large ? BLOCK : n;
        if (p.copy != NULL && p.copy->kind == TILED_INT8) {
            rounded = int8_round_rows(m, k, a, lda);
            p.rounded = &rounded;
        }
        share_parts(few_rows, &p, (n + p.columns - 1) / p.columns);
    } else if (order == ROW_MAJOR && large && m >= SHARED_ROWS) {
        /* In the same parts whoever computes them, so that their sums stay the same bits. */
        p.columns = SHARED_COLUMNS;
        share_parts(many_rows, &p, (n + p.columns - 1) / p.columns);
    } else {
        other(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    }
}
