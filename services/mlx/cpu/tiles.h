/* Tiles of a product: a few rows of x times a few rows of w, the sums in registers. Included once
 * for each kind of weight and set of instructions, with
 *
 *     NAME(x)        x with what tells the includes apart
 *     WEIGHT         the type of an element of w
 *     LOAD(w)        LANES of them as floats
 *     SIMD, LANES    the instructions, and how many floats they take at once
 *     FMA(a, b, c)   a * b + c, rounded once
 *     HALVES(v)      eight lanes: the only ones, or each the sum of two
 *
 * Every element is summed in the same order whatever tile it is in.
 */

typedef float NAME(lanes) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* X rows of x times W rows of w: X * W sums. */
#define TILE(X, W)                                                                              \
    SIMD static void NAME(tile_##X##_##W)(int k, float alpha, const float *x, int ldx,          \
                                          const void *from, int ldw, const float *scales,       \
                                          float *y, int ldy)                                    \
    {                                                                                           \
        const WEIGHT *w = from;                                                                 \
        NAME(lanes) sum[(X * W + 3) / 4 * 4] = {{0}};                                           \
        float total[(X * W + 3) / 4 * 4];                                                       \
        int i = 0;                                                                              \
        for (; i + LANES <= k; i += LANES) {                                                    \
            NAME(lanes) part[W];                                                                \
            for (int c = 0; c < W; c++) {                                                       \
                const WEIGHT *own = w + (size_t)c * ldw + i;                                    \
                part[c] = LOAD(own);                                                            \
                __builtin_prefetch((const char *)own + AHEAD);                                  \
            }                                                                                   \
            for (int r = 0; r < X; r++) {                                                       \
                NAME(lanes) row = *(const NAME(lanes) *)(x + (size_t)r * ldx + i);              \
                for (int c = 0; c < W; c++)                                                     \
                    sum[r * W + c] = FMA(row, part[c], sum[r * W + c]);                         \
            }                                                                                   \
        }                                                                                       \
        for (int s = 0; s < X * W; s += 4)                                                      \
            add_lanes(total + s, HALVES(sum[s]), HALVES(sum[s + 1]), HALVES(sum[s + 2]),        \
                      HALVES(sum[s + 3]));                                                      \
        for (int r = 0; r < X; r++)                                                             \
            for (int c = 0; c < W; c++) {                                                       \
                float s = total[r * W + c];                                                     \
                for (int j = i; j < k; j++)                                                     \
                    s = __builtin_fmaf(x[(size_t)r * ldx + j], w[(size_t)c * ldw + j], s);      \
                y[(size_t)r * ldy + c] = (scales == NULL ? alpha : alpha * scales[c]) * s;      \
            }                                                                                   \
    }

TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)
TILE(1, 4) TILE(2, 4) TILE(3, 4)
#if LANES == 16
TILE(4, 4) TILE(5, 4) TILE(6, 4)
#else
TILE(4, 3) TILE(5, 2) TILE(6, 2)
#endif

static const struct tiles NAME(tiles) = {
    {NULL, NAME(tile_1_1), NAME(tile_2_1), NAME(tile_3_1), NAME(tile_4_1), NAME(tile_5_1),
     NAME(tile_6_1)},
#if LANES == 16
    {NULL, NAME(tile_1_4), NAME(tile_2_4), NAME(tile_3_4), NAME(tile_4_4), NAME(tile_5_4),
     NAME(tile_6_4)},
    {0, 4, 4, 4, 4, 4, 4},
#else
    {NULL, NAME(tile_1_4), NAME(tile_2_4), NAME(tile_3_4), NAME(tile_4_3), NAME(tile_5_2),
     NAME(tile_6_2)},
    {0, 4, 4, 4, 3, 2, 2},
#endif
    LANES == 16,
};

#undef TILE
#undef WEIGHT
#undef LOAD
#undef NAME
