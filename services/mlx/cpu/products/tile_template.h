/* Tiles for one kind of weight and set of instructions. Included once for each, with
 *
 *     NAME(x)          x with what tells the includes apart
 *     SIMD, LANES      the instructions, and how many floats they take at once
 *     FMA(a, b, c)     a * b + c, rounded once
 *     HALVES(v)        eight lanes: the only ones, or each the sum of two
 *     STEP             weights of a row that are fetched together, a multiple of LANES
 *     FETCHED          the type of what is fetched
 *     FETCH(at, s, i)  STEP weights from weight i on of the row at `at` with scales `s`
 *     PART(f, h)       the h-th LANES of them as floats
 *     ELEMENT(at, i)   a weight beyond the last whole step, as a float
 *     FACTOR(s)        what the sums of a row with scales `s` are multiplied with
 *     IN_TILES         if TILED_ROWS rows lie together
 *
 * Every element is summed in the same order whatever tile it is in, and whatever kind its weights
 * are.
 */

typedef float NAME(lanes) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* X rows of x times W rows of w: X * W sums. */
#define TILE(X, W)                                                                              \
    SIMD static void NAME(tile_##X##_##W)(int k, float alpha, const float *x, int ldx,          \
                                          struct weights w, float *y, int ldy)                  \
    {                                                                                           \
        NAME(lanes) sum[(X * W + 3) / 4 * 4] = {{0}};                                           \
        float total[(X * W + 3) / 4 * 4];                                                       \
        int i = 0;                                                                              \
        for (; i + STEP <= k; i += STEP) {                                                      \
            FETCHED fetched[W];                                                                 \
            for (int c = 0; c < W; c++)                                                         \
                fetched[c] = FETCH(w.rows + c * w.row_bytes, w.scales + c * w.row_scales, i);   \
            for (int h = 0; h < STEP / LANES; h++) {                                            \
                NAME(lanes) part[W];                                                            \
                for (int c = 0; c < W; c++)                                                     \
                    part[c] = PART(fetched[c], h);                                              \
                for (int r = 0; r < X; r++) {                                                   \
                    const float *from = x + (size_t)r * ldx + i + h * LANES;                    \
                    NAME(lanes) row = *(const NAME(lanes) *)from;                               \
                    for (int c = 0; c < W; c++)                                                 \
                        sum[r * W + c] = FMA(row, part[c], sum[r * W + c]);                     \
                }                                                                               \
            }                                                                                   \
        }                                                                                       \
        for (int s = 0; s < X * W; s += 4)                                                      \
            add_lanes(total + s, HALVES(sum[s]), HALVES(sum[s + 1]), HALVES(sum[s + 2]),        \
                      HALVES(sum[s + 3]));                                                      \
        for (int r = 0; r < X; r++)                                                             \
            for (int c = 0; c < W; c++) {                                                       \
                float s = total[r * W + c];                                                     \
                for (int j = i; j < k; j++)                                                     \
                    s = __builtin_fmaf(x[(size_t)r * ldx + j],                                  \
                                       ELEMENT(w.rows + c * w.row_bytes, j), s);                \
                y[(size_t)r * ldy + c] = alpha * FACTOR(w.scales + c * w.row_scales) * s;       \
            }                                                                                   \
    }

TILE(1, 1) TILE(2, 1) TILE(3, 1) TILE(4, 1) TILE(5, 1) TILE(6, 1)
TILE(1, 4) TILE(2, 4) TILE(3, 4)
#if LANES == 16
TILE(4, 4) TILE(5, 4) TILE(6, 4)
#else
#ifdef IN_TILES /* which a product's columns may not cross */
TILE(4, 2)
#define WIDTH_OF_4 2
#define TILE_OF_4 NAME(tile_4_2)
#else
TILE(4, 3)
#define WIDTH_OF_4 3
#define TILE_OF_4 NAME(tile_4_3)
#endif
TILE(5, 2) TILE(6, 2)
#endif

static const struct tiles NAME(tiles) = {
    {NULL, NAME(tile_1_1), NAME(tile_2_1), NAME(tile_3_1), NAME(tile_4_1), NAME(tile_5_1),
     NAME(tile_6_1)},
#if LANES == 16
    {NULL, NAME(tile_1_4), NAME(tile_2_4), NAME(tile_3_4), NAME(tile_4_4), NAME(tile_5_4),
     NAME(tile_6_4)},
    {0, 4, 4, 4, 4, 4, 4},
#else
    {NULL, NAME(tile_1_4), NAME(tile_2_4), NAME(tile_3_4), TILE_OF_4, NAME(tile_5_2),
     NAME(tile_6_2)},
    {0, 4, 4, 4, WIDTH_OF_4, 2, 2},
#endif
    LANES == 16,
};

#undef TILE
#undef TILE_OF_4
#undef WIDTH_OF_4
#undef NAME
#undef STEP
#undef FETCHED
#undef FETCH
#undef PART
#undef ELEMENT
#undef FACTOR
