/* y = x @ weight.T + bias for rows of activations, strip by strip (layout.h).
 *
 * A channel of a row is summed over its groups in rising order, one fused multiply-add after the
 * other, in a lane of its own: neither the width of the registers, nor the rows that are computed
 * together, nor the threads make a difference to its bits. Products of rounded activations are
 * sums of integers within a group of 32, which are exact. */
#include "inline.h"
#include "layout.h"

enum {
    PARTS = STRIP / LANES, /* registers of a strip */
    AHEAD = 2048           /* bytes that are fetched ahead */
};

/* Registers of a strip for which the activations of nibbles are read once: eight sums are as many
 * as there is room for. */
enum { NIBBLE_PARTS = LANES == 8 ? PARTS : 1 };

/* Rows of activations, rounded to bytes in groups of 32 or as they are, in tiles of a few rows that
 * are computed together; in a tile, the rows of a group (of an input) are side by side. */
struct rows {
    int count, width;
    int8_t *bytes;        /* of a tile [width / 32, rows, 32], or NULL: none multiplies them */
    float *scales, *sums; /* of a tile [width / 32, rows]: a byte's worth, a group's total */
    float *floats;        /* of a tile [width, rows], or NULL */
};

/* Rows of the next tile. */
static inline int tile_rows(int left, int rounded)
{
    int most = left < TILE_ROWS ? left : TILE_ROWS;
    if (!rounded)
        return most >= 4 ? 4 : most >= 2 ? 2 : 1;
    return most >= 8 ? 8 : most >= 6 ? 6 : most >= 4 ? 4 : most;
}

INLINE vf vf_all(float x) { return x - (vf){0}; }
INLINE vf vf_load(const float *from) { return *(const vf *)from; }
INLINE void vf_store(vf from, float *to) { *(vf *)to = from; }

/* LANES floats of this kind. */
INLINE vf vf_of(int number, const uint8_t *from)
{
    if (number == HALF)
        return vf_from_halves((const uint16_t *)from);
    if (number == BFLOAT)
        return (vf)(vi_from_shorts((const uint16_t *)from) << 16);
    return vf_load((const float *)from);
}

INLINE vf vf_numbers(vi from) { return __builtin_convertvector(from, vf); }

/* A group's scales (0) or biases (1) of one of the registers of its strip. */
INLINE vf factors_of(int scales, struct group group, int which, int part)
{
    const uint8_t *own = group.factors + (which * STRIP + part * LANES) * bytes_of(scales);
    if (scales != SHARED)
        return vf_of(scales, own);
    return vf_numbers(vi_from_bytes(own)) * vf_of(HALF, group.shared + 2 * (which * STRIP + part * LANES));
}

/* The weights of step `step` of a group, one of the registers of its strip. */
INLINE vi codes_of(int weights, const uint8_t *group, int step, int part)
{
    if (weights == BITS8)
        return *(const vi *)(group + 64 * step + 4 * LANES * part);
    vi both = *(const vi *)(group + 64 * (step / 2) + 4 * LANES * part);
    return (step & 1 ? both >> 4 : both) & 0x0f0f0f0f;
}

INLINE void put_sums(const struct matrix *m, int strip, int count, vf sums[][PARTS], float *y,
                     long stride)
{
    int first = strip * STRIP, left = m->outputs - first;
    float bias[STRIP] = {0};
    if (m->bias != NULL)
        memcpy(bias, m->bias + first, sizeof(float) * (left < STRIP ? left : STRIP));
    UNROLLED for (int r = 0; r < count; r++) {
        float *to = y + r * stride + first, whole[STRIP];
        UNROLLED for (int p = 0; p < PARTS; p++) {
            vf sum = sums[r][p] + vf_load(bias + p * LANES);
            vf_store(sum, left < STRIP ? whole + p * LANES : to + p * LANES);
        }
        if (left < STRIP)
            memcpy(to, whole, sizeof(float) * left);
    }
}

/* Adds the products of 32 inputs with `parts` registers of the strip, from `part` on. */
INLINE void add_bytes(int weights, int scales, struct group group, const uint8_t *codes, int part,
                      int parts, const int8_t *bytes, const float *own, const float *all, int count,
                      vf sums[][PARTS])
{
    dot_sum dots[TILE_ROWS][PARTS];
    UNROLLED for (int r = 0; r < count; r++)
        UNROLLED for (int p = 0; p < parts; p++)
            dots[r][p] = (dot_sum){0};
    UNROLLED for (int step = 0; step < 8; step++) {
        vi code[PARTS];
        UNROLLED for (int p = 0; p < parts; p++)
            code[p] = codes_of(weights, codes, step, part + p);
        UNROLLED for (int r = 0; r < count; r++) {
            int32_t four;
            memcpy(&four, bytes + ROUNDED * r + 4 * step, 4);
            UNROLLED for (int p = 0; p < parts; p++) {
                if (weights == BITS4)
                    dot_step_nibbles(&dots[r][p], code[p], four);
                else
                    dot_step(&dots[r][p], code[p], four);
            }
        }
    }
    if (weights == BITS8 && LANES == 8)
        READ_LATER;
    UNROLLED for (int p = 0; p < parts; p++) {
        vf scale = factors_of(scales, group, 0, part + p), bias = factors_of(scales, group, 1, part + p);
        UNROLLED for (int r = 0; r < count; r++) {
            vi dot = weights == BITS4 ? dot_total_nibbles(dots[r][p]) : dot_total(dots[r][p]);
            vf *sum = &sums[r][part + p];
            *sum = vf_fma(vf_numbers(dot) * scale, vf_all(own[r]), *sum);
            *sum = vf_fma(bias, vf_all(all[r]), *sum);
        }
    }
}

/* A tile of rounded rows by a strip. */
INLINE void strip_of_bytes(const struct matrix *m, int weights, int scales, int strip,
                           const struct rows *x, int first, int count, float *y, long stride)
{
    const uint8_t *strip_at = m->strips + strip * strip_bytes(m);
    const size_t bytes32 = STRIP * ROUNDED / (weights == BITS4 ? 2 : 1);
    const int groups = m->inputs / m->group, parts = weights == BITS4 ? NIBBLE_PARTS : 1;
    const int8_t *bytes = x->bytes + (size_t)first * x->width;
    const float *own = x->scales + (size_t)first * (x->width / ROUNDED);
    const float *all = x->sums + (size_t)first * (x->width / ROUNDED);
    vf sums[TILE_ROWS][PARTS];
    UNROLLED for (int r = 0; r < count; r++)
        UNROLLED for (int p = 0; p < PARTS; p++)
            sums[r][p] = (vf){0};
    for (int g = 0; g < groups; g++) {
        struct group group = group_at(m, scales, strip_at, g);
        const uint8_t *codes = group.codes, *end = codes + code_bytes(m);
        for (; codes < end; codes += bytes32, bytes += count * ROUNDED, own += count, all += count) {
            for (size_t line = 0; line < bytes32; line += 64)
                __builtin_prefetch(codes + line + AHEAD);
            UNROLLED for (int part = 0; part < PARTS; part += parts)
                add_bytes(weights, scales, group, codes, part, parts, bytes, own, all, count, sums);
        }
        __builtin_prefetch(end + AHEAD);
    }
    put_sums(m, strip, count, sums, y + first * stride, stride);
}

/* A tile of floats by a strip of bits. */
INLINE void strip_of_codes(const struct matrix *m, int weights, int scales, int strip,
                           const struct rows *x, int first, int count, float *y, long stride)
{
    const uint8_t *strip_at = m->strips + strip * strip_bytes(m);
    const int groups = m->inputs / m->group;
    const float *floats = x->floats + (size_t)first * x->width;
    vf sums[TILE_ROWS][PARTS];
    UNROLLED for (int r = 0; r < count; r++)
        UNROLLED for (int p = 0; p < PARTS; p++)
            sums[r][p] = (vf){0};
    for (int g = 0; g < groups; g++) {
        struct group group = group_at(m, scales, strip_at, g);
        for (int step = 0; step < m->group / 4; step++, floats += 4 * count)
            UNROLLED for (int p = 0; p < PARTS; p++) {
                vf scale = factors_of(scales, group, 0, p), bias = factors_of(scales, group, 1, p);
                vi code = codes_of(weights, group.codes, step, p);
                UNROLLED for (int j = 0; j < 4; j++) {
                    vf weight = vf_fma(vf_numbers(code >> 8 * j & 255), scale, bias);
                    UNROLLED for (int r = 0; r < count; r++)
                        sums[r][p] = vf_fma(weight, vf_all(floats[j * count + r]), sums[r][p]);
                }
            }
    }
    put_sums(m, strip, count, sums, y + first * stride, stride);
}

/* A tile of floats by a strip of floats. */
INLINE void strip_of_floats(const struct matrix *m, int weights, int strip, const struct rows *x,
                            int first, int count, float *y, long stride)
{
    const uint8_t *at = m->strips + strip * strip_bytes(m);
    const size_t part = LANES * bytes_of(weights);
    const float *floats = x->floats + (size_t)first * x->width;
    vf sums[TILE_ROWS][PARTS];
    UNROLLED for (int r = 0; r < count; r++)
        UNROLLED for (int p = 0; p < PARTS; p++)
            sums[r][p] = (vf){0};
    for (int k = 0; k < x->width; k++, floats += count)
        UNROLLED for (int p = 0; p < PARTS; p++, at += part) {
            vf weight = vf_of(weights, at);
            UNROLLED for (int r = 0; r < count; r++)
                sums[r][p] = vf_fma(weight, vf_all(floats[r]), sums[r][p]);
        }
    put_sums(m, strip, count, sums, y + first * stride, stride);
}

typedef void strip_function(const struct matrix *, int, const struct rows *, int, float *, long);

/* A function for each kind of weights and of scales, and each number of rows in a tile. */
#define ARGUMENTS                                                                               \
    (const struct matrix *m, int strip, const struct rows *x, int first, float *y, long stride)
#define ROUNDED_ROWS(N, W, S)                                                                   \
    static void bytes_##W##_##S##_##N ARGUMENTS                                                 \
    {                                                                                           \
        strip_of_bytes(m, W, S, strip, x, first, N, y, stride);                                 \
    }
#define FLOAT_ROWS(N, W, S)                                                                     \
    static void codes_##W##_##S##_##N ARGUMENTS                                                 \
    {                                                                                           \
        strip_of_codes(m, W, S, strip, x, first, N, y, stride);                                 \
    }
#define PLAIN_ROWS(N, W)                                                                        \
    static void floats_##W##_##N ARGUMENTS                                                      \
    {                                                                                           \
        strip_of_floats(m, W, strip, x, first, N, y, stride);                                   \
    }
#if TILE_ROWS >= 4
#define SEVERAL(...) __VA_ARGS__
#else
#define SEVERAL(...)
#endif
#if TILE_ROWS >= 8
#define MANY(...) __VA_ARGS__
#else
#define MANY(...)
#endif
#define QUANTISED(W, S)                                                                         \
    ROUNDED_ROWS(1, W, S)                                                                       \
    FLOAT_ROWS(1, W, S)                                                                         \
    SEVERAL(ROUNDED_ROWS(2, W, S) ROUNDED_ROWS(3, W, S) ROUNDED_ROWS(4, W, S))                  \
    SEVERAL(FLOAT_ROWS(2, W, S) FLOAT_ROWS(4, W, S))                                            \
    MANY(ROUNDED_ROWS(6, W, S) ROUNDED_ROWS(8, W, S))                                           \
    static strip_function *const bytes_##W##_##S[9] = {                                         \
        [1] = bytes_##W##_##S##_1,                                                              \
        SEVERAL([2] = bytes_##W##_##S##_2, [3] = bytes_##W##_##S##_3, [4] = bytes_##W##_##S##_4, ) \
        MANY([6] = bytes_##W##_##S##_6, [8] = bytes_##W##_##S##_8, )};                          \
    static strip_function *const codes_##W##_##S[9] = {                                         \
        [1] = codes_##W##_##S##_1,                                                              \
        SEVERAL([2] = codes_##W##_##S##_2, [4] = codes_##W##_##S##_4, )};
#define PLAIN(W)                                                                                \
    PLAIN_ROWS(1, W)                                                                            \
    SEVERAL(PLAIN_ROWS(2, W) PLAIN_ROWS(4, W))                                                  \
    static strip_function *const floats_##W[9] = {                                              \
        [1] = floats_##W##_1,                                                                   \
        SEVERAL([2] = floats_##W##_2, [4] = floats_##W##_4, )};
QUANTISED(BITS4, HALF)
QUANTISED(BITS4, BFLOAT)
QUANTISED(BITS4, FLOAT)
QUANTISED(BITS4, SHARED)
QUANTISED(BITS8, HALF)
QUANTISED(BITS8, BFLOAT)
QUANTISED(BITS8, FLOAT)
QUANTISED(BITS8, SHARED)
PLAIN(HALF)
PLAIN(BFLOAT)
PLAIN(FLOAT)

static strip_function *const *strip_functions(const struct matrix *m, int rounded)
{
    static strip_function *const *const quantised[2][2][4] = {
        {{codes_BITS4_HALF, codes_BITS4_BFLOAT, codes_BITS4_FLOAT, codes_BITS4_SHARED},
         {codes_BITS8_HALF, codes_BITS8_BFLOAT, codes_BITS8_FLOAT, codes_BITS8_SHARED}},
        {{bytes_BITS4_HALF, bytes_BITS4_BFLOAT, bytes_BITS4_FLOAT, bytes_BITS4_SHARED},
         {bytes_BITS8_HALF, bytes_BITS8_BFLOAT, bytes_BITS8_FLOAT, bytes_BITS8_SHARED}}};
    static strip_function *const *const floats[3] = {floats_HALF, floats_BFLOAT, floats_FLOAT};
    if (m->weights > BITS8)
        return floats[m->weights - HALF];
    return quantised[rounded][m->weights][m->scales - HALF];
}

/* y [rows, stride] of all rows by the strips from `first` on. */
static void multiply_strips(const struct matrix *m, const struct rows *x, int first, int end,
                            float *y, long stride)
{
    int rounded = m->weights <= BITS8 && x->bytes != NULL;
    strip_function *const *functions = strip_functions(m, rounded);
    for (int strip = first; strip < end; strip++)
        for (int row = 0, count; row < x->count; row += count) {
            count = tile_rows(x->count - row, rounded);
            functions[count](m, strip, x, row, y, stride);
        }
}
