/* y = alpha * x @ w.T for a few rows of x: what a decoder multiplies, at the memory's speed.
 *
 * BLAS libraries pack w anew on each call, which for 3 to 8 rows costs as much as the product;
 * this reads w once, row by row, for up to MOST_ROWS rows of x. It takes the place of
 * cblas_sgemm under MLX and passes everything else on (services/mlx/blas.py).
 *
 * Every element is summed in the same order whatever the number of rows, so that a token's
 * product is the same bits in plain decoding and in a verification. Threads share the columns
 * of a product, which changes no sum either.
 */
#include <stddef.h>

#include "threads.h"

#if defined(__x86_64__)
#define SIMD __attribute__((target("avx2,fma")))
#else
#define SIMD
#endif

enum {
    LANES = 8,
    BLOCK = 48,         /* rows of w that stay in the L2 cache while all rows of x pass */
    AHEAD = 8192,       /* floats that the prefetch is ahead of the product */
    MOST_ROWS = 6,      /* rows of x whose sums fit the registers */
    LEAST_WORK = 65536, /* elements of w below which helpers would come too late */
    SHARED_ROWS = 8,    /* from here a product that goes on to BLAS is shared by its columns */
    SHARED_COLUMNS = 192,
    ROW_MAJOR = 101,
    PLAIN = 111,
    TRANSPOSED = 112
};

typedef float lanes __attribute__((vector_size(32), aligned(4), may_alias));
typedef void gemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                  int lda, const float *b, int ldb, float beta, float *c, int ldc);

static gemm *other;
static int least_rows, most_rows;

/* Where other products go, and for which numbers of rows the work is ours; 0 if it never is. */
int small_gemm_take(gemm *fallback, int least, int most)
{
    other = fallback;
    least_rows = least;
    most_rows = most;
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        most_rows = 0;
#endif
    return most_rows;
}

/* X rows of x times W rows of w: X * W sums in registers. */
#define TILE(X, W)                                                                              \
    SIMD static void tile_##X##_##W(int k, float alpha, const float *x, int ldx,                \
                                    const float *w, int ldw, float *y, int ldy)                 \
    {                                                                                           \
        lanes sum[X][W] = {0};                                                                  \
        int i = 0;                                                                              \
        for (; i + LANES <= k; i += LANES) {                                                    \
            lanes part[W];                                                                      \
            for (int c = 0; c < W; c++) {                                                       \
                part[c] = *(const lanes *)(w + (size_t)c * ldw + i);                            \
                __builtin_prefetch(w + (size_t)c * ldw + i + AHEAD);                            \
            }                                                                                   \
            for (int r = 0; r < X; r++) {                                                       \
                lanes row = *(const lanes *)(x + (size_t)r * ldx + i);                          \
                for (int c = 0; c < W; c++)                                                     \
                    sum[r][c] += row * part[c];                                                 \
            }                                                                                   \
        }                                                                                       \
        for (int r = 0; r < X; r++)                                                             \
            for (int c = 0; c < W; c++) {                                                       \
                lanes v = sum[r][c];                                                            \
                float s = ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));    \
                for (int j = i; j < k; j++)                                                     \
                    s += x[(size_t)r * ldx + j] * w[(size_t)c * ldw + j];                       \
                y[(size_t)r * ldy + c] = alpha * s;                                             \
            }                                                                                   \
    }

TILE(1, 4) TILE(2, 4) TILE(3, 4) TILE(4, 3) TILE(5, 2) TILE(6, 2)
TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)

typedef void tile(int k, float alpha, const float *x, int ldx, const float *w, int ldw, float *y,
                  int ldy);
static tile *const wide[] = {NULL, tile_1_4, tile_2_4, tile_3_4, tile_4_3, tile_5_2, tile_6_2};
static tile *const narrow[] = {NULL, tile_1_1, tile_2_1, tile_3_1, tile_4_1, tile_5_1, tile_6_1};
static const int width[] = {0, 4, 4, 4, 3, 2, 2};

/* How many of the rows that are left go through next: fours are fastest, if one will not do. */
static int rows_at_once(int left) { return left <= MOST_ROWS ? left : 4; }

/* One product, whose columns are computed in parts. */
struct product {
    int ta, tb, m, n, k, lda, ldb, ldc, columns;
    float alpha, beta;
    const float *a, *b;
    float *c;
};

void rows_by_columns(int m, int first, int end, int k, float alpha, const float *x, int ldx,
                     const float *w, int ldw, float *y, int ldy)
{
    for (int row = 0, rows; row < m; row += rows) {
        rows = rows_at_once(m - row);
        const float *from = x + (size_t)row * ldx;
        float *to = y + (size_t)row * ldy;
        int c = first;
        for (; c + width[rows] <= end; c += width[rows])
            wide[rows](k, alpha, from, ldx, w + (size_t)c * ldw, ldw, to + c, ldy);
        for (; c < end; c++)
            narrow[rows](k, alpha, from, ldx, w + (size_t)c * ldw, ldw, to + c, ldy);
    }
}

static int end_of_part(const struct product *p, int number)
{
    return (number + 1) * p->columns < p->n ? (number + 1) * p->columns : p->n;
}

static void few_rows(const void *context, int number)
{
    const struct product *p = context;
    int end = end_of_part(p, number);
    for (int first = number * p->columns; first < end; first += BLOCK)
        rows_by_columns(p->m, first, first + BLOCK < end ? first + BLOCK : end, p->k, p->alpha,
                        p->a, p->lda, p->b, p->ldb, p->c, p->ldc);
}

static void many_rows(const void *context, int number)
{
    const struct product *p = context;
    int first = number * p->columns;
    const float *b = p->b + (p->tb == TRANSPOSED ? (size_t)first * p->ldb : (size_t)first);
    other(ROW_MAJOR, p->ta, p->tb, p->m, end_of_part(p, number) - first, p->k, p->alpha, p->a,
          p->lda, b, p->ldb, p->beta, p->c + first, p->ldc);
}

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc)
{
    struct product p = {ta, tb, m, n, k, lda, ldb, ldc, BLOCK, alpha, beta, a, b, c};
    int large = (size_t)n * k >= LEAST_WORK;
    if (order == ROW_MAJOR && ta == PLAIN && tb == TRANSPOSED && beta == 0.0f &&
        m >= least_rows && m <= most_rows) {
        p.columns = large ? BLOCK : n;
        share_parts(few_rows, &p, (n + p.columns - 1) / p.columns);
    } else if (order == ROW_MAJOR && large && m >= SHARED_ROWS) {
        /* In the same parts whoever computes them, so that their sums stay the same bits. */
        p.columns = SHARED_COLUMNS;
        share_parts(many_rows, &p, (n + p.columns - 1) / p.columns);
    } else {
        other(order, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    }
}
