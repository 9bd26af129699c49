/* Weights as they are in a file (source.h) to strips (layout.h). */
#include "layout.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "halves.h"
#include "source.h"
#include "threads.h"

struct packing {
    const struct matrix *to;
    const struct source *from;
    atomic_int misfits; /* scales are not SHARED */
};

/* The half of exactly this value. */
static int is_half(float value, uint16_t *half)
{
    *half = half_of_float(value);
    return float_of_half(*half) == value;
}

/* The half of which these eight are exact multiples by bytes, STRIP apart. */
static int find_shared(const float *factors, uint16_t *half, uint8_t *bytes)
{
    float largest = 0.0f;
    for (int g = 0; g < SHARING; g++)
        largest = fabsf(factors[g]) > fabsf(largest) ? factors[g] : largest;
    for (int steps = 63; steps > 0; steps--) { /* of the largest: K-quants have six bits */
        float unit = largest == 0.0f ? 1.0f : largest / (float)steps;
        int g = 0;
        if (!is_half(unit, half) || (largest != 0.0f && unit * (float)steps != largest))
            continue;
        for (; g < SHARING; g++) {
            float times = factors[g] / unit;
            if (!(times >= 0.0f && times <= 63.0f))
                break;
            bytes[2 * STRIP * g] = (uint8_t)(times + 0.5f);
            if (unit * (float)bytes[2 * STRIP * g] != factors[g])
                break;
        }
        if (g == SHARING)
            return 1;
    }
    return 0;
}

/* Four codes of four bits, to a byte each. */
static uint32_t spread(uint32_t codes)
{
    codes = (codes | codes << 8) & 0x00ff00ff;
    return (codes | codes << 4) & 0x0f0f0f0f;
}

static void pack_codes(const struct matrix *m, const uint8_t *row, int bits, size_t k, int lane,
                       uint8_t *group)
{
    for (int i = 0; i < m->group; i += 8, k += 8) {
        uint32_t first = 0, second = 0;
        if (bits == 4) {
            uint32_t word;
            memcpy(&word, row + k / 2, 4);
            first = spread(word & 0xffff), second = spread(word >> 16);
        } else if (bits == 8) {
            memcpy(&first, row + k, 4), memcpy(&second, row + k + 4, 4);
        } else {
            for (int j = 0; j < 4; j++) {
                first |= read_code(row, k + j, bits) << 8 * j;
                second |= read_code(row, k + 4 + j, bits) << 8 * j;
            }
        }
        if (m->weights == BITS4) {
            first |= second << 4;
            memcpy(group + 64 * (i / 8) + 4 * lane, &first, 4);
        } else {
            memcpy(group + 64 * (i / 4) + 4 * lane, &first, 4);
            memcpy(group + 64 * (i / 4 + 1) + 4 * lane, &second, 4);
        }
    }
}

/* A channel in fewer bits than its weights have in the file. */
static void round_channel(struct packing *packing, int channel, int lane, uint8_t *strip)
{
    const struct matrix *m = packing->to;
    uint8_t codes[ROUNDED];
    for (int g = 0; g < m->inputs / ROUNDED; g++) {
        struct group to = group_at(m, HALF, strip, g);
        uint16_t *factors = (uint16_t *)to.factors + lane;
        round_group(packing->from, m->inputs, channel, g * ROUNDED, m->weights == BITS4 ? 15 : 255,
                    codes, factors, factors + STRIP);
        pack_codes(m, codes, 8, 0, lane, (uint8_t *)to.codes);
    }
}

static void pack_channel(struct packing *packing, int channel, int lane, uint8_t *strip)
{
    const struct matrix *m = packing->to;
    const struct source *from = packing->from;
    if (m->weights <= BITS8 && (from->bits == 0 || from->bits > (m->weights == BITS4 ? 4 : 8))) {
        round_channel(packing, channel, lane, strip);
        return;
    }
    if (from->bits == 0) {
        size_t each = bytes_of(m->weights);
        const uint8_t *row = from->weights + (size_t)channel * m->inputs * each;
        for (int k = 0; k < m->inputs; k++)
            memcpy(strip + (k * STRIP + lane) * each, row + k * each, each);
        return;
    }
    int shared = m->scales == SHARED, groups = m->inputs / m->group;
    size_t each = shared ? sizeof(float) : bytes_of(m->scales);
    const uint8_t *row = from->weights + (size_t)channel * m->inputs / 8 * from->bits;
    const uint8_t *numbers[2] = {from->scales + channel * groups * each,
                                 from->biases + channel * groups * each};
    for (int g = 0; g < groups; g++) {
        struct group to = group_at(m, m->scales, strip, g);
        pack_codes(m, row, from->bits, (size_t)g * m->group, lane, (uint8_t *)to.codes);
        for (int which = 0; which < 2; which++) {
            const uint8_t *own = numbers[which] + g * each;
            int at = which * STRIP + lane;
            if (!shared)
                memcpy((uint8_t *)to.factors + at * each, own, each);
            else if (g % SHARING == 0 && !find_shared((const float *)own, (uint16_t *)to.shared + at,
                                                      (uint8_t *)to.factors + at))
                atomic_store(&packing->misfits, 1);
        }
    }
}

static void pack_strip(const void *context, int strip)
{
    struct packing *packing = (struct packing *)context;
    const struct matrix *m = packing->to;
    uint8_t *to = (uint8_t *)m->strips + strip * strip_bytes(m);
    for (int lane = 0; lane < STRIP; lane++)
        if (strip * STRIP + lane < m->outputs && !atomic_load(&packing->misfits))
            pack_channel(packing, strip * STRIP + lane, lane, to);
}

/* Bytes of all strips. */
size_t cpu_packed_bytes(const struct matrix *m) { return strip_bytes(m) * strips_of(m); }

/* To m->strips, which are zeros so far, rounded if `m` has fewer bits. Returns 0 if the scales,
 * which are of 32 bits, are not the SHARED ones that `m` asks for. */
int cpu_pack(const struct matrix *m, const struct source *from)
{
    struct packing packing = {m, from, 0};
    share_parts(pack_strip, &packing, strips_of(m));
    return !atomic_load(&packing.misfits);
}
