/* A whole pass of a decoder over a few rows, from their tokens to their logits. The keys and
 * values of the rows go where their sequences have them. Each row has the same bits in any
 * company, as each is computed by itself (block.c, small_gemm.c, attention.c). */
#include <stddef.h>
#include <string.h>

#include "block.h"
#include "scratch.h"

enum { MOST_PARTS = 16 };

struct decoder {
    const struct block *blocks;
    int count;
    const float *embedding; /* [vocabulary, width] */
    struct norm norm;
    struct linear head;
    float scale; /* of attention */
};

/* One sequence: where its layers' keys and values are, [kv heads, any slots, size] each, and which
 * of its rows take part. They go to the slots from `start` on. */
struct sequence {
    float *const *k, *const *v;
    const unsigned char *visible; /* [rows, start + rows], or NULL: each sees all before it */
    long head;                    /* elements from one head to the next */
    int start, rows;
};

static struct attention describe(const struct decoder *decoder, const struct sequence *own,
                                 int layer)
{
    const struct block *block = &decoder->blocks[layer];
    return (struct attention){
        .k = own->k[layer], .v = own->v[layer], .mask = own->visible,
        .k_head = own->head, .k_row = block->size, .v_head = own->head, .v_row = block->size,
        .mask_row = own->start + own->rows, .heads = block->q.outputs / block->size,
        .kv_heads = block->k.outputs / block->size, .queries = own->rows,
        .slots = own->start + own->rows, .old = own->start, .size = block->size,
        .causal = own->visible == NULL, .scale = decoder->scale,
    };
}

/* fresh [kv heads, rows, size], rows from `first` on, to where this sequence has them. */
static void keep(const struct block *block, const struct sequence *own, int rows, int first,
                 const float *fresh, float *memory)
{
    int size = block->size, kv_heads = block->k.outputs / size;
    for (int h = 0; h < kv_heads; h++)
        memcpy(memory + h * own->head + (long)own->start * size,
               fresh + ((long)h * rows + first) * size, sizeof(float) * own->rows * size);
}

/* Logits [rows, vocabulary] of these tokens; without `logits`, only keys and values are kept. */
void cpu_pass(const struct decoder *decoder, int rows, const int *tokens, const int *positions,
              const float *cos, const float *sin, int parts, const struct sequence *sequences,
              float *logits)
{
    struct attention attentions[MOST_PARTS];
    const struct block *first = decoder->blocks;
    int width = first->o.outputs, kept = first->k.outputs;
    float *x = scratch(PASS, sizeof(float) * rows * 2 * (width + kept));
    float *next = x + (size_t)rows * width, *k = next + (size_t)rows * width;
    float *v = k + (size_t)rows * kept;
    for (int r = 0; r < rows; r++)
        memcpy(x + (size_t)r * width, decoder->embedding + (size_t)tokens[r] * width,
               sizeof *x * width);
    for (int layer = 0; layer < decoder->count; layer++) {
        const struct block *block = &decoder->blocks[layer];
        for (int p = 0; p < parts; p++)
            attentions[p] = describe(decoder, &sequences[p], layer);
        cpu_block(block, rows, positions, cos, sin, x, parts, attentions, k, v, next);
        for (int p = 0, row = 0; p < parts; row += sequences[p++].rows) {
            keep(block, &sequences[p], rows, row, k, sequences[p].k[layer]);
            keep(block, &sequences[p], rows, row, v, sequences[p].v[layer]);
        }
        float *before = x;
        x = next;
        next = before;
    }
    if (logits == NULL)
        return;
    normalise_rows(&decoder->norm, rows, width, x, next);
    multiply_rows(&decoder->head, rows, next, logits);
}

/* In each of `arrays` [heads, any slots, size]: the slots listed, in rising order, to those from
 * `to` on, which are not behind them. */
void cpu_move_slots(int arrays, float *const *memory, int heads, long head, int size, int count,
                    const int *slots, int to)
{
    for (int a = 0; a < arrays; a++)
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < count; i++)
                memmove(memory[a] + h * head + (long)(to + i) * size,
                        memory[a] + h * head + (long)slots[i] * size, sizeof(float) * size);
}
