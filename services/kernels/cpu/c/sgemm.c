/* The matrix products of MLX, for models whose passes are not ours: MKL's, but a few rows are
 * multiplied one by one, so that a row has the same bits in any company. */
#include <stddef.h>

typedef void sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                   const float *b, int ldb, float beta, float *c, int ldc);

enum { ROW_MAJOR = 101, PLAIN = 111, FEW_ROWS = 16, SMALL = 65536, FEW_ROWS_OF_SMALL = 64 };

static sgemm *library;

void cpu_use_sgemm(sgemm *given) { library = given; }

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc)
{
    int few = (long)n * k < SMALL ? FEW_ROWS_OF_SMALL : FEW_ROWS;
    int rows = order == ROW_MAJOR && ta == PLAIN && m <= few ? 1 : m;
    for (int i = 0; i < m; i += rows)
        library(order, ta, tb, rows, n, k, alpha, a + (size_t)i * lda, lda, b, ldb, beta,
                c + (size_t)i * ldc, ldc);
}
