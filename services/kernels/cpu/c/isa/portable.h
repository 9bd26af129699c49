/* Portable C: what every other instruction set is compared with, bit for bit. */
#ifndef SSD_ISA_H
#define SSD_ISA_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "../halves.h"

#define ISA portable
#define TILE_ROWS 1
enum { LANES = 16 };

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef vi dot_sum;

static inline vf vf_fma(vf a, vf b, vf c)
{
    for (int i = 0; i < LANES; i++)
        c[i] = fmaf(a[i], b[i], c[i]);
    return c;
}

static inline vf vf_from_halves(const uint16_t *from)
{
    vf to;
    for (int i = 0; i < LANES; i++)
        to[i] = float_of_half(from[i]);
    return to;
}

static inline void vf_to_halves(vf from, uint16_t *to)
{
    for (int i = 0; i < LANES; i++)
        to[i] = half_of_float(from[i]);
}

static inline vi vi_from_shorts(const uint16_t *from)
{
    vi to;
    for (int i = 0; i < LANES; i++)
        to[i] = from[i];
    return to;
}

static inline vi vi_from_bytes(const uint8_t *from)
{
    vi to;
    for (int i = 0; i < LANES; i++)
        to[i] = from[i];
    return to;
}

/* Sums of products of bytes: of four weights of each lane with the same four activations. */
static inline void dot_step(dot_sum *sum, vi weights, int32_t activations)
{
    for (int i = 0; i < LANES; i++)
        for (int j = 0; j < 4; j++)
            (*sum)[i] += (weights[i] >> 8 * j & 255) * (int8_t)(activations >> 8 * j);
}

static inline void dot_step_nibbles(dot_sum *sum, vi weights, int32_t activations)
{
    dot_step(sum, weights, activations);
}

static inline vi dot_total(dot_sum sum) { return sum; }
static inline vi dot_total_nibbles(dot_sum sum) { return sum; }

/* Eight halves of slot i. */
typedef struct {
    uint16_t halves[8];
} vh;
enum { SIDE = 8 }; /* slots side by side in a register */

static inline vh vh_load(const uint8_t *const *slots, int i, size_t at)
{
    vh found;
    memcpy(&found, slots[i] + at, sizeof found);
    return found;
}

static inline void vh_store(vh from, uint16_t *to) { memcpy(to, &from, sizeof from); }

static inline vh zip(const uint16_t *a, const uint16_t *b)
{
    vh found;
    for (int i = 0; i < 8; i++)
        found.halves[i] = (i % 2 ? b : a)[i / 2];
    return found;
}

static inline vh zip_low(vh a, vh b) { return zip(a.halves, b.halves); }
static inline vh zip_high(vh a, vh b) { return zip(a.halves + 4, b.halves + 4); }

#endif
