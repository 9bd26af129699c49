/* How weights lie in memory: sixteen channels side by side, in the order in which they are read.
 *
 * A weight [outputs, inputs] is cut into strips of sixteen channels (the last one filled up with
 * zeros), one behind the other. A strip is read once per product, from its first byte to its last.
 *
 *     strip      group 0 | group 1 | ... | group inputs / group size - 1
 *     group      weights of 16 channels | 16 scales | 16 biases
 *
 * Of eight bits, a step is four inputs of sixteen channels, which is what vpdpbusd takes:
 *
 *     channel        0               1                    15
 *     input      k k+1 k+2 k+3   k k+1 k+2 k+3   ...   k k+1 k+2 k+3      64 bytes
 *
 * and a group of 32 inputs has eight steps. Of four bits, two steps share 64 bytes, the first one
 * in the lower halves; a group of 32 then is 256 bytes, and 32 + 32 of scales and biases of 16 bits:
 * five lines of a cache. A weight is scale * number + bias. Scales and biases are as in the file,
 * of 16 or 32 bits, unless those of eight groups are products of bytes and a half that they share,
 * as in ggml's K-quants:
 *
 *     block      16 + 16 halves | 8 * (16 + 16 bytes) | weights of 8 groups
 *
 * Weights that are floats have no groups: for every input, the weights of sixteen channels. */
#ifndef SSD_LAYOUT_H
#define SSD_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

enum number { BITS4, BITS8, HALF, BFLOAT, FLOAT, SHARED };
enum {
    STRIP = 16,
    ROUNDED = 32, /* activations, or weights, that are rounded together */
    SHARING = 8,  /* groups of a block */
    BLOCK_HEAD = 4 * STRIP + SHARING * 2 * STRIP
};

struct matrix {
    const uint8_t *strips;
    const float *bias; /* [outputs], or NULL */
    int outputs, inputs;
    int weights;       /* enum number */
    int scales;        /* enum number from HALF on, if the weights are of 4 or 8 bits */
    int group;         /* inputs that share a scale */
};

static inline size_t bytes_of(int number) { return number == FLOAT ? 4 : number == SHARED ? 1 : 2; }

/* Bytes of a group's weights. */
static inline size_t code_bytes(const struct matrix *m)
{
    return (size_t)STRIP * m->group / (m->weights == BITS4 ? 2 : 1);
}

static inline size_t strip_bytes(const struct matrix *m)
{
    if (m->weights > BITS8)
        return STRIP * bytes_of(m->weights) * m->inputs;
    size_t groups = m->inputs / m->group, shared = m->scales == SHARED ? groups / SHARING * 4 * STRIP : 0;
    return groups * (code_bytes(m) + 2 * STRIP * bytes_of(m->scales)) + shared;
}

/* Where a group's weights, its scales with its biases behind them, and what they share begin. */
struct group {
    const uint8_t *codes, *factors, *shared;
};

static inline struct group group_at(const struct matrix *m, int scales, const uint8_t *strip, int g)
{
    size_t codes = code_bytes(m), each = 2 * STRIP * bytes_of(scales);
    if (scales == SHARED) {
        const uint8_t *block = strip + g / SHARING * (BLOCK_HEAD + SHARING * codes);
        int at = g % SHARING;
        return (struct group){block + BLOCK_HEAD + at * codes, block + 4 * STRIP + at * each, block};
    }
    const uint8_t *group = strip + g * (codes + each);
    return (struct group){group, group + codes, NULL};
}

static inline int strips_of(const struct matrix *m) { return (m->outputs + STRIP - 1) / STRIP; }

#endif
