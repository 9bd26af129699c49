/* A decoder's block for a few rows: all but the attention between its two halves.
 *
 *     begin   norm, queries, keys and values, their norms, rotation
 *     end     output product, residual, norm, silu(gate) * up, down product, residual
 *
 * MLX's CPU backend takes twenty to forty nanoseconds for each element of a norm or a silu, and
 * some microseconds for each primitive: for a small model more than the products. The products
 * are small_gemm.c's. Each row is computed by itself, in one order: it has the same bits in any
 * company.
 */
#include "block.h"

#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <string.h>

#include "exponential.h"
#include "scratch.h"
#include "simd.h"
#include "small_gemm.h"

#define SIMD AVX2

enum { LANES = 8 };

/* One row; `to` may be `from`. */
SIMD static void normalise(const struct norm *norm, int count, const float *from, float *to)
{
    eight lanes = {0};
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        eight x = *(const eight *)(from + i);
        lanes = FMA_8(x, x, lanes);
    }
    float sum = ((lanes[0] + lanes[4]) + (lanes[1] + lanes[5])) +
                ((lanes[2] + lanes[6]) + (lanes[3] + lanes[7]));
    for (; i < count; i++)
        sum = __builtin_fmaf(from[i], from[i], sum);
    float factor = 1.0f / sqrtf(sum / (float)count + norm->eps);
    for (i = 0; i + LANES <= count; i += LANES)
        *(eight *)(to + i) = *(const eight *)(from + i) * factor * *(const eight *)(norm->weight + i);
    for (; i < count; i++)
        to[i] = from[i] * factor * norm->weight[i];
}

/* to += from */
SIMD static void add(int count, const float *from, float *to)
{
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        *(eight *)(to + i) += *(const eight *)(from + i);
    for (; i < count; i++)
        to[i] += from[i];
}

/* x / (1 + e^-x) * up, with an exponential that takes no positive numbers. */
SIMD static inline eight gated(eight x, eight up)
{
    const eight ones = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    const eight_ints sign = {INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN, INT_MIN};
    eight power = exponential((eight)((eight_ints)x | sign));
    eight_ints negative = x < (eight){0};
    eight top = (eight)(((eight_ints)power & negative) | ((eight_ints)ones & ~negative));
    return x * (top / (ones + power)) * up;
}

SIMD static void gate_row(int count, float *gate, const float *up)
{
    int i = 0;
    for (; i + LANES <= count; i += LANES)
        *(eight *)(gate + i) = gated(*(const eight *)(gate + i), *(const eight *)(up + i));
    if (i < count) {
        eight x = {0}, y = {0};
        memcpy(&x, gate + i, (count - i) * sizeof *gate);
        memcpy(&y, up + i, (count - i) * sizeof *up);
        x = gated(x, y);
        memcpy(gate + i, &x, (count - i) * sizeof *gate);
    }
}

/* One head, by the angles of its position. */
SIMD static void rotate(int half, const float *cos, const float *sin, float *x)
{
    float *y = x + half;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        eight a = *(eight *)(x + i), b = *(eight *)(y + i);
        eight c = *(const eight *)(cos + i), s = *(const eight *)(sin + i);
        *(eight *)(x + i) = a * c - b * s;
        *(eight *)(y + i) = b * c + a * s;
    }
    for (; i < half; i++) {
        float a = x[i], b = y[i];
        x[i] = a * cos[i] - b * sin[i];
        y[i] = b * cos[i] + a * sin[i];
    }
}

void multiply_rows(const struct linear *linear, int rows, const float *x, float *y)
{
    cblas_sgemm(ROW_MAJOR, PLAIN, TRANSPOSED, rows, linear->outputs, linear->inputs, 1.0f, x,
                linear->inputs, linear->weight, linear->inputs, 0.0f, y, linear->outputs);
    if (linear->bias != NULL)
        for (int r = 0; r < rows; r++)
            add(linear->outputs, linear->bias, y + (size_t)r * linear->outputs);
}

void normalise_rows(const struct norm *norm, int rows, int count, const float *from, float *to)
{
    for (int r = 0; r < rows; r++)
        normalise(norm, count, from + (size_t)r * count, to + (size_t)r * count);
}

/* The heads of all rows, each normalised and turned to its position. */
static void place_heads(const struct block *block, const struct norm *norm,
                        const struct angles *angles, int rows, int heads, float *x)
{
    int half = block->rotated / 2;
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < heads; h++, x += block->size) {
            if (norm->weight != NULL)
                normalise(norm, block->size, x, x);
            if (half > 0)
                rotate(half, angles->cos + (size_t)angles->positions[r] * half,
                       angles->sin + (size_t)angles->positions[r] * half, x);
        }
}

/* [rows, heads, size] -> [heads, rows, size] */
static void turn(int rows, int heads, int size, const float *from, float *to)
{
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < heads; h++, from += size)
            memcpy(to + ((size_t)h * rows + r) * size, from, size * sizeof *to);
}

/* Of x [rows, width]: q [rows, heads, size], k and v [kv heads, rows, size]. */
void cpu_block_begin(const struct block *block, int rows, const int *positions,
                     const float *cos, const float *sin, const float *x, float *q, float *k,
                     float *v)
{
    struct angles angles = {positions, cos, sin};
    int width = block->q.inputs, size = block->size;
    int heads = block->q.outputs / size, kv_heads = block->k.outputs / size;
    float *normed = scratch(BLOCK_HALVES, sizeof(float) * rows * (width + block->k.outputs));
    float *side_by_side = normed + (size_t)rows * width;
    normalise_rows(&block->before, rows, width, x, normed);
    multiply_rows(&block->q, rows, normed, q);
    place_heads(block, &block->q_norm, &angles, rows, heads, q);
    multiply_rows(&block->k, rows, normed, side_by_side);
    place_heads(block, &block->k_norm, &angles, rows, kv_heads, side_by_side);
    turn(rows, kv_heads, size, side_by_side, k);
    multiply_rows(&block->v, rows, normed, side_by_side);
    turn(rows, kv_heads, size, side_by_side, v);
}

/* What the block makes of x [rows, width] and its attention [rows, heads, size]. */
void cpu_block_end(const struct block *block, int rows, const float *x, const float *attended,
               float *out)
{
    int width = block->o.outputs, hidden = block->gate.outputs;
    size_t all = (size_t)rows * width;
    float *normed = scratch(BLOCK_HALVES, sizeof(float) * (all + 2 * (size_t)rows * hidden));
    float *gate = normed + all, *up = gate + (size_t)rows * hidden;
    multiply_rows(&block->o, rows, attended, out);
    add((int)all, x, out);
    normalise_rows(&block->after, rows, width, out, normed);
    multiply_rows(&block->gate, rows, normed, gate);
    multiply_rows(&block->up, rows, normed, up);
    for (int r = 0; r < rows; r++)
        gate_row(hidden, gate + (size_t)r * hidden, up + (size_t)r * hidden);
    multiply_rows(&block->down, rows, gate, normed);
    add((int)all, normed, out);
}

void cpu_block(const struct block *block, int rows, const int *positions, const float *cos,
               const float *sin, const float *x, int parts, const struct attention *attentions,
               float *k, float *v, float *out)
{
    int size = block->size, width = block->q.outputs;
    float *q = scratch(BLOCK_WHOLE, 2 * sizeof(float) * rows * width);
    float *attended = q + (size_t)rows * width;
    cpu_block_begin(block, rows, positions, cos, sin, x, q, k, v);
    for (int p = 0, first = 0; p < parts; first += attentions[p].queries, p++) {
        struct attention own = attentions[p];
        own.q = q + (size_t)first * width;
        own.q_head = size;
        own.q_row = width;
        own.fresh_k = k + (size_t)first * size;
        own.fresh_v = v + (size_t)first * size;
        own.fresh_head = (long)rows * size;
        own.fresh_row = size;
        own.out = attended + (size_t)first * width;
        cpu_attention(&own);
    }
    cpu_block_end(block, rows, x, attended, out);
}
