/* Weights as they are in a file, and what they are in fewer bits. */
#ifndef SSD_SOURCE_H
#define SSD_SOURCE_H

#include <stddef.h>
#include <stdint.h>

#include "layout.h"

/* Rows [outputs, inputs] of `bits` each, the first in the lowest bits, with scales and biases
 * [outputs, inputs / group], or of floats. */
struct source {
    const uint8_t *weights, *scales, *biases;
    int bits;    /* 0: floats */
    int group;   /* inputs that share a scale */
    int numbers; /* enum number from HALF on: floats, or scales and biases */
};

uint32_t read_code(const uint8_t *row, size_t k, int bits);

/* Round the ROUNDED weights of a channel from input `k` on to codes of 0 to `levels`, a byte each;
 * scale and bias become halves. The bias is NaN unless all weights are numbers. */
void round_group(const struct source *from, int inputs, int channel, int k, int levels,
                 uint8_t *codes, uint16_t *scale, uint16_t *bias);

#endif
