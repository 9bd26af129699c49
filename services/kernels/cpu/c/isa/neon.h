/* NEON with dot products (Armv8.2): a step is one sdot of four channels. Weights of eight bits are
 * made signed, and 128 times the sum of the activations is added. */
#ifndef SSD_ISA_H
#define SSD_ISA_H

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define ISA neon
#define TILE_ROWS 4
enum { LANES = 4 };

typedef float vf __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef struct {
    int32x4_t products, activations; /* sum of weight - 128 times activation, of activations */
} dot_sum;

static inline vf vf_fma(vf a, vf b, vf c)
{
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

static inline vf vf_from_halves(const uint16_t *from)
{
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
}

static inline void vf_to_halves(vf from, uint16_t *to)
{
    vst1_u16(to, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)from)));
}

static inline vi vi_from_shorts(const uint16_t *from)
{
    return (vi)vreinterpretq_s32_u32(vmovl_u16(vld1_u16(from)));
}

static inline vi vi_from_bytes(const uint8_t *from)
{
    uint32_t four;
    memcpy(&four, from, 4);
    uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
    return (vi)vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
}

static inline int8x16_t four_times(int32_t bytes) { return vreinterpretq_s8_s32(vdupq_n_s32(bytes)); }

static inline void dot_step_nibbles(dot_sum *sum, vi weights, int32_t activations)
{
    int8x16_t own = vreinterpretq_s8_s32((int32x4_t)weights);
    sum->products = vdotq_s32(sum->products, own, four_times(activations));
}

static inline void dot_step(dot_sum *sum, vi weights, int32_t activations)
{
    dot_step_nibbles(sum, weights ^ (int32_t)0x80808080, activations);
    sum->activations = vdotq_s32(sum->activations, vdupq_n_s8(1), four_times(activations));
}

static inline vi dot_total_nibbles(dot_sum sum) { return (vi)sum.products; }

static inline vi dot_total(dot_sum sum)
{
    return (vi)vaddq_s32(sum.products, vshlq_n_s32(sum.activations, 7));
}

/* Eight halves of slot i. */
typedef uint16x8_t vh;
enum { SIDE = 8 }; /* slots side by side in a register */

static inline vh vh_load(const uint8_t *const *slots, int i, size_t at)
{
    return vld1q_u16((const uint16_t *)(slots[i] + at));
}

static inline void vh_store(vh from, uint16_t *to) { vst1q_u16(to, from); }
static inline vh zip_low(vh a, vh b) { return vzip1q_u16(a, b); }
static inline vh zip_high(vh a, vh b) { return vzip2q_u16(a, b); }

#endif
