/* A decoder's block for a few rows, and its parts. */
#ifndef SSD_BLOCK_H
#define SSD_BLOCK_H

#include "attention.h"

/* y = x @ weight.T + bias, which may be NULL. */
struct linear {
    const float *weight, *bias;
    int outputs, inputs;
};

/* weight NULL: nothing is normalised. */
struct norm {
    const float *weight;
    float eps;
};

struct block {
    struct norm before, q_norm, k_norm, after;
    struct linear q, k, v, o, gate, up, down;
    int size;    /* of a head */
    int rotated; /* its first elements, in two halves; 0: none */
};

/* cos and sin [all positions, rotated / 2], and which position each row has. */
struct angles {
    const int *positions;
    const float *cos, *sin;
};

void multiply_rows(const struct linear *linear, int rows, const float *x, float *y);
void normalise_rows(const struct norm *norm, int rows, int count, const float *from, float *to);

/* The whole block: `parts` are the sequences' attentions, in the order of the rows, each with its
 * old keys and values. The rows' own, which are behind those, are left in k and v
 * [kv heads, rows, size]. */
void cpu_block(const struct block *block, int rows, const int *positions, const float *cos,
               const float *sin, const float *x, int parts, const struct attention *attentions,
               float *k, float *v, float *out);

#endif
