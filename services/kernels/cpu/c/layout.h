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
 * of 16 or 32 bits.
 *
 * Weights that are floats have no groups: for every input, the weights of sixteen channels. */
#ifndef SSD_LAYOUT_H
#define SSD_LAYOUT_H

#include <stddef.h>
#include <stdint.h>

enum number { BITS4, BITS8, HALF, BFLOAT, FLOAT };
enum { STRIP = 16, ROUNDED = 32 /* activations that are rounded together */ };

struct matrix {
    const uint8_t *strips;
    const float *bias; /* [outputs], or NULL */
    int outputs, inputs;
    int weights;       /* enum number */
    int scales;        /* enum number, of 16 or 32 bits, if the weights are of 4 or 8 bits */
    int group;         /* inputs that share a scale */
};

static inline size_t bytes_of(int number) { return number == FLOAT ? 4 : 2; }

/* Bytes from a group to the next, or of floats, from an input to the next. */
static inline size_t group_bytes(const struct matrix *m)
{
    if (m->weights > BITS8)
        return STRIP * bytes_of(m->weights);
    size_t codes = (size_t)STRIP * m->group / (m->weights == BITS4 ? 2 : 1);
    return codes + 2 * STRIP * bytes_of(m->scales);
}

static inline size_t strip_bytes(const struct matrix *m)
{
    return group_bytes(m) * (m->inputs / (m->weights > BITS8 ? 1 : m->group));
}

static inline int strips_of(const struct matrix *m) { return (m->outputs + STRIP - 1) / STRIP; }

#endif
