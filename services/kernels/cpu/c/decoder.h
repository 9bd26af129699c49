/* A decoder as a pass sees it. `services/kernels/cpu/structures.py` has the same for Python. */
#ifndef SSD_DECODER_H
#define SSD_DECODER_H

#include "layout.h"

/* weight NULL: nothing is normalised. */
struct norm {
    const float *weight;
    float eps;
};

/* x + attended(attention(before(x))), then x + fed(down(act(gate(after(x))) * up(after(x)))) */
struct block {
    struct norm before, q_norm, k_norm, attended, after, fed;
    struct matrix q, k, v, o, gate, up, down;
    int rotation; /* which angles of a pass */
    int window;   /* slots that a row sees, its own included; 0: all before it */
};

struct decoder {
    const struct block *blocks;
    int count;
    int heads, kv_heads, size;
    int rotated;      /* first elements of a head, in two halves; 0: none */
    int rounds;       /* whether activations are rounded to bytes for weights of bits */
    int gelu;         /* act is GELU by tanh, else SiLU */
    float scale;      /* of attention */
    float score_cap, logit_cap; /* cap * tanh(x / cap); 0: as they are */
    float embedding_scale;
    struct matrix embedding;
    struct norm norm;
    struct matrix head;
};

/* One sequence: where its layers' keys and values are, [kv heads, any slots, size] each, and which
 * of its rows take part. They go to the slots from `start` on. */
struct sequence {
    uint8_t *const *k, *const *v;
    int number;                   /* HALF or FLOAT: what they are kept as */
    /* [rows, start + rows], in blocks without and with a window, or NULL: each sees those before it */
    const unsigned char *visible[2];
    long head;                    /* bytes from one head to the next */
    int start, rows;
};

/* A pass over `rows` tokens of `parts` sequences, in their order. */
struct pass {
    int rows;
    const int *tokens, *positions;
    const float *cos[2], *sin[2]; /* [any positions, rotated / 2] of each rotation */
    int parts;
    const struct sequence *sequences;
    float *logits;       /* [rows, vocabulary], or NULL: only keys and values are kept */
    int taps;            /* layers whose outputs are wanted */
    const int *tapped;   /* [taps] their numbers, in rising order */
    float *const *tap;   /* [taps] where they go: [rows, width] each */
};

/* The kernels of one instruction set. */
struct kernels {
    const char *name;
    void (*run_pass)(const struct decoder *, const struct pass *);
    /* y [rows, outputs] of x [rows, inputs] */
    void (*multiply)(const struct matrix *, int rows, const float *x, int rounds, float *y);
    /* Row `row` of a weight, as floats. */
    void (*read_row)(const struct matrix *, int row, float *to);
    /* out [rows, heads, size] of q, for the first block of a sequence */
    void (*attend)(const struct decoder *, const struct sequence *, const float *q, float *out);
    /* Floats as they are kept in slots. */
    void (*keep_halves)(int count, const float *from, uint16_t *to);
};

#endif
