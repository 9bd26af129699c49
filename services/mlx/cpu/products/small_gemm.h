/* Products of a few rows; more of them go on to the BLAS library. */
#ifndef SSD_SMALL_GEMM_H
#define SSD_SMALL_GEMM_H

/* CBLAS's names of how matrices lie. */
enum { ROW_MAJOR = 101, PLAIN = 111, TRANSPOSED = 112 };

void cblas_sgemm(int order, int ta, int tb, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc);

/* y = alpha * x @ w.T for columns `first` to `end` of y, by this thread, without copies of w. */
void rows_by_columns(int m, int first, int end, int k, float alpha, const float *x, int ldx,
                     const float *w, int ldw, float *y, int ldy);

#endif
