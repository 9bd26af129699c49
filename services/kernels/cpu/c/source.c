/* Weights as they are in a file, and what they are in fewer bits (source.h). */
#include "source.h"

#include "halves.h"

static float read_number(const uint8_t *numbers, size_t at, int number)
{
    uint16_t half;
    float value;
    if (number == FLOAT) {
        memcpy(&value, numbers + 4 * at, 4);
        return value;
    }
    memcpy(&half, numbers + 2 * at, 2);
    return number == HALF ? float_of_half(half) : float_of_bfloat(half);
}

uint32_t read_code(const uint8_t *row, size_t k, int bits)
{
    size_t at = k * bits;
    uint32_t code = row[at / 8] >> at % 8;
    if (at % 8 + bits > 8)
        code |= (uint32_t)row[at / 8 + 1] << (8 - at % 8);
    return code & ((1u << bits) - 1);
}

/* The weights of a channel from input `k` on. */
static void read_floats(const struct source *from, int inputs, int channel, int k, float *x)
{
    size_t first = (size_t)channel * inputs + k;
    if (from->bits == 0) {
        for (int i = 0; i < ROUNDED; i++)
            x[i] = read_number(from->weights, first + i, from->numbers);
        return;
    }
    size_t group = first / from->group; /* groups of 32 lie within those of the file */
    float scale = read_number(from->scales, group, from->numbers);
    float bias = read_number(from->biases, group, from->numbers);
    const uint8_t *row = from->weights + first / 8 * from->bits;
    for (int i = 0; i < ROUNDED; i++)
        x[i] = scale * (float)read_code(row, i, from->bits) + bias;
}

void round_group(const struct source *from, int inputs, int channel, int k, int levels,
                 uint8_t *codes, uint16_t *scale, uint16_t *bias)
{
    float x[ROUNDED], low, high, sum = 0.0f;
    read_floats(from, inputs, channel, k, x);
    low = high = x[0];
    for (int i = 0; i < ROUNDED; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
        sum += x[i] - x[i]; /* NaN unless all are numbers */
    }
    *scale = half_of_float((high - low) / (float)levels);
    *bias = half_of_float(low + sum);
    float step = float_of_half(*scale), start = float_of_half(*bias);
    float steps = step > 0.0f ? 1.0f / step : 0.0f;
    for (int i = 0; i < ROUNDED; i++) {
        float code = (x[i] - start) * steps + 0.5f;
        code = code > 0.0f ? code : 0.0f; /* also what is no number */
        codes[i] = (uint8_t)(code < (float)levels ? code : (float)levels);
    }
}
