/* Numbers of 16 bits, one by one. */
#ifndef SSD_HALVES_H
#define SSD_HALVES_H

#include <stdint.h>
#include <string.h>

static inline float float_of_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff, bits;
    float value;
    if (rest < 0x400) { /* subnormal: an integer of 2^-24 */
        value = (float)rest * 0x1p-24f;
        memcpy(&bits, &value, 4);
    } else {
        bits = rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest + 0x1c000) << 13;
        bits |= rest > 0x7c00 ? 0x400000 : 0; /* quiet */
    }
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t half_of_float(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    uint32_t sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000)
        return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x1ff));
    if (rest >= 0x47800000)
        return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) { /* rounded to an integer of 2^-24, half to even */
        float small;
        memcpy(&small, &rest, 4);
        small = small * 0x1p24f + 0x1p23f;
        memcpy(&bits, &small, 4);
        return (uint16_t)(sign | (bits - 0x4b000000));
    }
    return (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1)) - 0x38000000) >> 13);
}

static inline float float_of_bfloat(uint16_t bfloat)
{
    uint32_t bits = (uint32_t)bfloat << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

#endif
