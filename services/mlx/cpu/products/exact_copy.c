/* Exact copies of weights in less memory than floats, made when a model is loaded.
 *
 * A model that was published in four or eight bits, or in floats of sixteen, has no more
 * information than that when its weights have become floats of 32. A copy is kept only if every
 * weight comes out of it as it was, so that no product changes by a bit.
 */
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "simd.h"
#include "threads.h"
#include "tiles.h"

enum {
    HALF = BLOCK_SIZE / 2,
    PRECISION = 52, /* bits below a block's largest weight that its grid may need */
    ROWS_OF_A_PART = 16
};

static float as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static double common_divisor(double a, double b)
{
    while (b != 0.0) {
        double rest = fmod(a, b);
        a = b;
        b = rest;
    }
    return a;
}

/* The numbers of a block on the widest grid that it lies on; 0 if they would be over `most`. In
 * doubles, as whole multiples of what is PRECISION bits below the largest weight. */
AVX2 static int find_grid(const float *w, int most, float *steps, unsigned char *numbers)
{
    double whole[BLOCK_SIZE], least, largest, step = 0.0;
    float size = 0.0f;
    int exponent;
    for (int i = 0; i < BLOCK_SIZE; i++)
        size = fabsf(w[i]) > size ? fabsf(w[i]) : size;
    if (!isfinite(size))
        return 0;
    frexpf(size, &exponent);
    double factor = ldexp(1.0, PRECISION - exponent);
    for (int i = 0; i < BLOCK_SIZE; i++)
        whole[i] = w[i] * factor;
    least = largest = whole[0];
    for (int i = 1; i < BLOCK_SIZE; i++) {
        least = whole[i] < least ? whole[i] : least;
        largest = whole[i] > largest ? whole[i] : largest;
    }
    for (int i = 0; i < BLOCK_SIZE; i++) {
        double distance = whole[i] - least;
        if (step != 0.0 && rint(distance / step) * step == distance)
            continue;
        if (rint(whole[i]) != whole[i])
            return 0;
        step = common_divisor(distance, step);
        if (step != 0.0 && largest - least > step * most)
            return 0;
    }
    steps[0] = (float)(step / factor);
    steps[1] = (float)(least / factor);
    for (int i = 0; i < BLOCK_SIZE; i++)
        numbers[i] = step == 0.0 ? 0 : (unsigned char)(int)((whole[i] - least) / step);
    return 1;
}

/* The blocks of a row, of which the next ones lie behind those of the tile's other rows; 0 if one
 * lies on no such grid. */
AVX2 static int pack_grids(int kind, const float *w, int k, unsigned char *to, float *steps)
{
    unsigned char numbers[BLOCK_SIZE];
    for (int i = 0; i < k; i += BLOCK_SIZE, steps += 2 * TILED_ROWS) {
        if (!find_grid(w + i, kind == FOUR_BITS ? 15 : 255, steps, numbers))
            return 0;
        for (int j = 0; j < BLOCK_SIZE; j++)
            if (__builtin_fmaf(numbers[j], steps[0], steps[1]) != w[i + j])
                return 0;
        if (kind == EIGHT_BITS)
            memcpy(to + i * TILED_ROWS, numbers, BLOCK_SIZE);
        else
            for (int j = 0; j < HALF; j++)
                to[i / 2 * TILED_ROWS + j] = (unsigned char)(numbers[j] | numbers[j + HALF] << 4);
    }
    return 1;
}

static int pack_bfloat16(const float *w, int k, uint16_t *to)
{
    uint32_t lost = 0;
    for (int i = 0; i < k; i++) {
        to[i] = (uint16_t)(bits_of(w[i]) >> 16);
        lost |= bits_of(w[i]) & 0xffff;
    }
    return lost == 0;
}

/* Sizes that are too large have another sign when they come out, or none. */
static int pack_float16(const float *w, int k, uint16_t *to)
{
    int same = 1;
    for (int i = 0; i < k; i++) {
        uint32_t size = bits_of(fabsf(w[i]) / FROM_FLOAT16) >> 13;
        to[i] = (uint16_t)(size | (bits_of(w[i]) >> 16 & 0x8000));
        same &= size < 0x7c00 && as_float(size << 13) * FROM_FLOAT16 == fabsf(w[i]);
    }
    return same;
}

/* One weight that is being packed. */
struct packing {
    enum weight_kind kind;
    const float *w;
    int n, k;
    struct weights to;
    atomic_int failed;
};

static int pack_row(const struct packing *p, int row)
{
    const float *w = p->w + (size_t)row * p->k;
    struct weights own = from_row(p->to, row);
    char *to = (char *)own.rows;
    float *steps = (float *)own.scales;
    if (p->kind == FOUR_BITS || p->kind == EIGHT_BITS)
        return pack_grids(p->kind, w, p->k, (unsigned char *)to, steps);
    return (p->kind == BFLOAT16 ? pack_bfloat16 : pack_float16)(w, p->k, (uint16_t *)(void *)to);
}

static void pack_part(const void *context, int number)
{
    struct packing *p = (struct packing *)context;
    int end = (number + 1) * ROWS_OF_A_PART;
    for (int row = number * ROWS_OF_A_PART; row < end && row < p->n; row++)
        if (atomic_load(&p->failed) || !pack_row(p, row)) {
            atomic_store(&p->failed, 1);
            return;
        }
}

/* Write w [n, k] as rows and steps of this kind (see tiles.h); 0 if a weight would not be what it
 * was, or if rows are not whole blocks. */
int exact_copy_pack(int kind, const float *w, int n, int k, void *rows, float *steps)
{
    struct packing p = {kind, w, n, k, weights_of(kind, k, rows, steps), k % BLOCK_SIZE != 0};
    if (!atomic_load(&p.failed))
        share_parts(pack_part, &p, (n + ROWS_OF_A_PART - 1) / ROWS_OF_A_PART);
    return !atomic_load(&p.failed);
}
