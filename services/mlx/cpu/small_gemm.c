/* y = alpha * x @ w.T for a few rows of x: what a decoder multiplies, at the memory's speed.
 *
 * BLAS libraries pack w anew on each call, which for 3 to 8 rows costs as much as the product;
 * this reads w once, row by row, for up to MOST_ROWS rows of x. It takes the place of
 * cblas_sgemm under MLX and passes everything else on (services/mlx/blas.py).
 *
 * Weights that have an int8 copy (small_gemm_add_int8) are read there: a quarter of the memory.
 * The rows of x stay floats.
 *
 * Every element is summed in the same order whatever the number of rows, so that a token's
 * product is the same bits in plain decoding and in a verification. Threads share the columns
 * of a product, which changes no sum either.
 */
#include <stddef.h>
#include <stdint.h>

#include "simd.h"
#include "threads.h"

enum {
    BLOCK = 48,         /* rows of w that stay in the L2 cache while all rows of x pass */
    AHEAD = 8192,       /* bytes that the prefetch is ahead of the product */
    MOST_ROWS = 6,      /* rows of x whose sums fit the registers */
    MOST_INT8_ROWS = 64,
    PLACES = 4096,      /* for int8 copies; a power of two */
    LEAST_WORK = 65536, /* elements of w below which helpers would come too late */
    SHARED_ROWS = 8,    /* from here a product that goes on to BLAS is shared by its columns */
    SHARED_COLUMNS = 192,
    ROW_MAJOR = 101,
    PLAIN = 111,
    TRANSPOSED = 112
};

typedef void gemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                  int lda, const float *b, int ldb, float beta, float *c, int ldc);
typedef void tile(int k, float alpha, const float *x, int ldx, const void *w, int ldw,
                  const float *scales, float *y, int ldy);
typedef signed char eight_bytes __attribute__((vector_size(8), aligned(1), may_alias));

/* How products of one kind of weight are computed, by the rows of x that go through at once. */
struct tiles {
    tile *narrow[1 + MOST_ROWS], *wide[1 + MOST_ROWS];
    int width[1 + MOST_ROWS];
    int balanced; /* rows that need several passes are shared out evenly; else four at a time */
};

/* The sums of four vectors. */
AVX2 static inline void add_lanes(float *to, eight a, eight b, eight c, eight d)
{
#if defined(__x86_64__)
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b),
                                  _mm256_hadd_ps((__m256)c, (__m256)d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    eight all[] = {a, b, c, d};
    for (int i = 0; i < 4; i++) {
        eight v = all[i];
        to[i] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
    }
#endif
}

#define SIMD AVX2
#define LANES 8
#define HALVES(v) (v)
#define FMA FMA_8
#define WEIGHT float
#define LOAD(w) (*(const eight *)(w))
#define NAME(x) x##_float_8
#include "tiles.h"
#define WEIGHT signed char
#if defined(__x86_64__)
#define LOAD(w)                                                                                 \
    ((eight)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(w)))))
#else
#define LOAD(w) __builtin_convertvector(*(const eight_bytes *)(w), eight)
#endif
#define NAME(x) x##_int8_8
#include "tiles.h"

static const struct tiles *floats = &tiles_float_8, *bytes = &tiles_int8_8;

#if defined(__x86_64__)
#undef SIMD
#undef LANES
#undef HALVES
#undef FMA
#define SIMD AVX512
#define LANES 16
#define FMA(a, b, c) ((__typeof__(c))_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define HALVES(v)                                                                               \
    ((eight)_mm256_add_ps(_mm512_castps512_ps256((__m512)(v)),                                  \
                          _mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)(v), 1))))
#define WEIGHT float
#define LOAD(w) ((lanes_float_16)_mm512_loadu_ps(w))
#define NAME(x) x##_float_16
#include "tiles.h"
#define WEIGHT signed char
#define LOAD(w)                                                                                 \
    ((lanes_int8_16)_mm512_cvtepi32_ps(                                                         \
        _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(w)))))
#define NAME(x) x##_int8_16
#include "tiles.h"
#endif

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
    if (__builtin_cpu_supports("avx512f")) {
        floats = &tiles_float_16;
        bytes = &tiles_int8_16;
    }
#endif
    return most_rows;
}

/* w[r][i] is about rows[r][i] * scales[r]. */
struct copy {
    const float *w;
    const signed char *rows;
    const float *scales;
    int n, k;
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

/* Read this copy in the place of w [n, k] from now on; the caller keeps both where they are.
 * Returns 0 if there is no place left. */
int small_gemm_add_int8(const float *w, int n, int k, const signed char *rows,
                        const float *scales)
{
    struct copy *place = place_of(w);
    if (place->w == NULL && ++copied > PLACES / 2)
        return 0;
    *place = (struct copy){w, rows, scales, n, k};
    return 1;
}

/* One product, whose columns are computed in parts. */
struct product {
    int ta, tb, m, n, k, lda, ldb, ldc, columns;
    float alpha, beta;
    const float *a, *b;
    float *c;
    const struct copy *copy; /* of b, or NULL */
};

static int rows_at_once(const struct tiles *tiles, int left)
{
    if (left <= MOST_ROWS)
        return left;
    int passes = (left + MOST_ROWS - 1) / MOST_ROWS;
    return tiles->balanced ? (left + passes - 1) / passes : 4;
}

/* Columns `first` to `end`; elements of w have `size` bytes. */
static void multiply(const struct tiles *tiles, size_t size, int m, int first, int end, int k,
                     float alpha, const float *x, int ldx, const void *w, int ldw,
                     const float *scales, float *y, int ldy)
{
    for (int row = 0, rows; row < m; row += rows) {
        rows = rows_at_once(tiles, m - row);
        const float *from = x + (size_t)row * ldx;
        float *to = y + (size_t)row * ldy;
        int step = tiles->width[rows];
        for (int c = first; c < end; c += step) {
            if (c + step > end)
                step = 1;
            (step > 1 ? tiles->wide : tiles->narrow)[rows](
                k, alpha, from, ldx, (const char *)w + size * c * ldw, ldw,
                scales == NULL ? NULL : scales + c, to + c, ldy);
        }
    }
}

void rows_by_columns(int m, int first, int end, int k, float alpha, const float *x, int ldx,
                     const float *w, int ldw, float *y, int ldy)
{
    multiply(floats, sizeof *w, m, first, end, k, alpha, x, ldx, w, ldw, NULL, y, ldy);
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
        if (p->copy == NULL)
            rows_by_columns(p->m, first, last, p->k, p->alpha, p->a, p->lda, p->b, p->ldb, p->c,
                            p->ldc);
        else
            multiply(bytes, 1, p->m, first, last, p->k, p->alpha, p->a, p->lda, p->copy->rows,
                     p->k, p->copy->scales, p->c, p->ldc);
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

/* The int8 copy that a product of these rows reads, or NULL. */
static const struct copy *copy_for(const struct product *p)
{
    if (copied == 0 || p->m > MOST_INT8_ROWS)
        return NULL;
    const struct copy *found = place_of(p->b);
    return found->w == p->b && found->n == p->n && found->k == p->k && p->ldb == p->k ? found
                                                                                      : NULL;
}

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc)
{
    struct product p = {ta, tb, m, n, k, lda, ldb, ldc, BLOCK, alpha, beta, a, b, c, NULL};
    int large = (size_t)n * k >= LEAST_WORK;
    int is_ours = order == ROW_MAJOR && ta == PLAIN && tb == TRANSPOSED && beta == 0.0f &&
                  most_rows > 0;
    if (is_ours)
        p.copy = copy_for(&p);
    if (is_ours && (p.copy != NULL || (m >= least_rows && m <= most_rows))) {
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
