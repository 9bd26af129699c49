/* Weights as they are in a file to strips (layout.h). */
#include "layout.h"

#include <string.h>

#include "threads.h"

/* Rows [outputs, inputs] of `bits` each, the first in the lowest bits, with scales and biases
 * [outputs, inputs / group], or of floats. Fewer than eight bits become four or eight. */
struct source {
    const uint8_t *weights, *scales, *biases;
    int bits; /* 0: floats */
};

struct packing {
    const struct matrix *to;
    const struct source *from;
};

static uint32_t read_code(const uint8_t *row, size_t k, int bits)
{
    size_t at = k * bits;
    uint32_t code = row[at / 8] >> at % 8;
    if (at % 8 + bits > 8)
        code |= (uint32_t)row[at / 8 + 1] << (8 - at % 8);
    return code & ((1u << bits) - 1);
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

static void pack_channel(const struct packing *packing, int channel, int lane, uint8_t *strip)
{
    const struct matrix *m = packing->to;
    const struct source *from = packing->from;
    size_t group = group_bytes(m);
    if (from->bits == 0) {
        size_t each = bytes_of(m->weights);
        const uint8_t *row = from->weights + (size_t)channel * m->inputs * each;
        for (int k = 0; k < m->inputs; k++)
            memcpy(strip + k * group + lane * each, row + k * each, each);
        return;
    }
    size_t each = bytes_of(m->scales), groups = m->inputs / m->group;
    const uint8_t *row = from->weights + (size_t)channel * m->inputs / 8 * from->bits;
    for (size_t g = 0; g < groups; g++) {
        uint8_t *to = strip + g * group, *factors = to + group - 2 * STRIP * each;
        size_t factor = (channel * groups + g) * each;
        pack_codes(m, row, from->bits, g * m->group, lane, to);
        memcpy(factors + lane * each, from->scales + factor, each);
        memcpy(factors + (STRIP + lane) * each, from->biases + factor, each);
    }
}

static void pack_strip(const void *context, int strip)
{
    const struct packing *packing = context;
    const struct matrix *m = packing->to;
    uint8_t *to = (uint8_t *)m->strips + strip * strip_bytes(m);
    for (int lane = 0; lane < STRIP; lane++)
        if (strip * STRIP + lane < m->outputs)
            pack_channel(packing, strip * STRIP + lane, lane, to);
}

/* Bytes of all strips. */
size_t cpu_packed_bytes(const struct matrix *m) { return strip_bytes(m) * strips_of(m); }

/* To m->strips, which are zeros so far. */
void cpu_pack(const struct matrix *m, const struct source *from)
{
    struct packing packing = {m, from};
    share_parts(pack_strip, &packing, strips_of(m));
}
