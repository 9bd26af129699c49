/* Attention of a few or many queries: softmax(scale * q @ k.T, masked) @ v.
 *
 * MLX's CPU backend takes some forty nanoseconds for each element of a softmax, which for a
 * verification in a long text is more than the products; this takes about one. The queries
 * that share keys, several of a group's heads and neighbouring tokens, go through together.
 *
 * Every sum is over what a token sees, in the order of the slots: its attention is the same bits
 * in plain decoding, in a chain, in a tree, and beside any number of free slots.
 */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#include "exponential.h"
#include "simd.h"
#include "small_gemm.h"
#include "threads.h"

#define SIMD AVX2

enum {
    LANES = 8,
    ROWS = 24,     /* of a part: they share the keys that are in the cache */
    COLUMNS = 48,  /* keys that stay in the cache while all rows pass */
    WIDEST = 256   /* head size */
};

typedef eight lanes;
typedef eight_ints ints;

/* Turn `count` scores, a multiple of LANES, into weights; returns 1 over their sum. */
SIMD static float softmax(float *scores, int count)
{
    lanes tops = *(lanes *)scores;
    for (int s = LANES; s < count; s += LANES) {
        lanes score = *(lanes *)(scores + s);
        ints larger = score > tops;
        tops = (lanes)(((ints)score & larger) | ((ints)tops & ~larger));
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++)
        top = tops[i] > top ? tops[i] : top;
    if (top == -INFINITY) {
        memset(scores, 0, count * sizeof *scores);
        return 0.0f;
    }
    lanes sum = {0};
    for (int s = 0; s < count; s += LANES) {
        lanes weight = exponential(*(lanes *)(scores + s) - top);
        *(lanes *)(scores + s) = weight;
        sum += weight;
    }
    float total = ((sum[0] + sum[4]) + (sum[1] + sum[5])) + ((sum[2] + sum[6]) + (sum[3] + sum[7]));
    return 1.0f / total;
}

/* Where some columns of the values are. */
struct columns {
    const float *values, *fresh;
    long row, fresh_row;
    int old;
};

/* X rows of weights times W * LANES columns of the values. */
#define WEIGH(X, W)                                                                             \
    SIMD static void weigh_##X##_##W(int slots, const float *weights, int ldw,                  \
                                     const struct columns *columns, float *const *to,           \
                                     const float *factors)                                      \
    {                                                                                           \
        lanes sum[X][W] = {0};                                                                  \
        for (int s = 0; s < slots; s++) {                                                       \
            lanes part[W];                                                                      \
            const float *values = s < columns->old                                              \
                                      ? columns->values + s * columns->row                      \
                                      : columns->fresh + (s - columns->old) * columns->fresh_row; \
            for (int c = 0; c < W; c++)                                                         \
                part[c] = *(const lanes *)(values + c * LANES);                                 \
            for (int r = 0; r < X; r++) {                                                       \
                float weight = weights[(size_t)r * ldw + s];                                    \
                lanes all = {weight, weight, weight, weight, weight, weight, weight, weight};   \
                for (int c = 0; c < W; c++)                                                     \
                    sum[r][c] = FMA_8(part[c], all, sum[r][c]);                                 \
            }                                                                                   \
        }                                                                                       \
        for (int r = 0; r < X; r++)                                                             \
            for (int c = 0; c < W; c++)                                                         \
                *(lanes *)(to[r] + c * LANES) = sum[r][c] * factors[r];                         \
    }

WEIGH(1, 8) WEIGH(1, 4) WEIGH(1, 1) WEIGH(3, 4) WEIGH(3, 1)

static void weigh(const struct attention *call, int head, int rows, int slots,
                  const float *weights, int ldw, float *const *to, const float *factors)
{
    for (int row = 0; row < rows;) {
        int together = rows - row >= 3 ? 3 : 1;
        int wide = together == 3 ? 4 : 8;
        const float *own = weights + (size_t)row * ldw;
        for (int c = 0; c < call->size;) {
            float *places[3];
            int left = (call->size - c) / LANES;
            int width = left >= wide ? wide : left >= 4 ? 4 : 1;
            struct columns columns = {call->v + head * call->v_head + c,
                                      call->fresh_v + head * call->fresh_head + c, call->v_row,
                                      call->fresh_row, call->old};
            for (int r = 0; r < together; r++)
                places[r] = to[row + r] + c;
            (together == 3 ? (width == 4 ? weigh_3_4 : weigh_3_1)
                           : (width == 8 ? weigh_1_8 : width == 4 ? weigh_1_4 : weigh_1_1))(
                slots, own, ldw, &columns, places, factors + row);
            c += width * LANES;
        }
        row += together;
    }
}

/* Slots that this query may see; a mask may hide some of them. */
static int visible(const struct attention *call, int query)
{
    return call->causal ? call->slots - call->queries + query + 1 : call->slots;
}

/* The softmax of what a query sees, and zeros for the rest; returns 1 over the sum. What it sees
 * is brought side by side first: which lane adds a weight to the sum may not depend on hidden
 * slots between. */
static float weigh_visible(const struct attention *call, float *scores, int query, int padded)
{
    int seen = visible(call, query), first = seen, count;
    const unsigned char *mask = NULL;
    if (call->mask != NULL) {
        mask = call->mask + query * call->mask_row;
        const unsigned char *hidden = memchr(mask, 0, seen);
        first = hidden == NULL ? seen : (int)(hidden - mask);
    }
    count = first;
    for (int s = first; s < seen; s++)
        if (mask[s])
            scores[count++] = scores[s];
    for (int s = count; s < padded; s++)
        scores[s] = -INFINITY;
    float factor = softmax(scores, padded);
    for (int s = seen - 1; s >= first; s--)
        scores[s] = mask[s] ? scores[--count] : 0.0f;
    return factor;
}

static int parts_of_a_head(const struct attention *call)
{
    int rows = call->heads / call->kv_heads * call->queries;
    return (rows + ROWS - 1) / ROWS;
}

static void score(int rows, int slots, int size, const float *queries, const float *keys, long row,
                  float *scores, int padded)
{
    for (int c = 0; c < slots; c += COLUMNS)
        rows_by_columns(rows, c, c + COLUMNS < slots ? c + COLUMNS : slots, size, 1.0f, queries,
                        size, keys, (int)row, scores, padded);
}

/* ROWS rows of one head of the keys: row r is query r / group of head r % group. */
static void attend_part(const void *context, int number)
{
    const struct attention *call = context;
    static _Thread_local float *scores;
    static _Thread_local size_t room;
    int group = call->heads / call->kv_heads, per_head = parts_of_a_head(call);
    int head = number / per_head, first = number % per_head * ROWS;
    int rows = group * call->queries - first < ROWS ? group * call->queries - first : ROWS;
    int seen = visible(call, (first + rows - 1) / group);
    int padded = (seen + LANES - 1) / LANES * LANES;
    if ((size_t)rows * padded > room) {
        free(scores);
        room = (size_t)ROWS * (padded + 1024);
        scores = aligned_alloc(64, (room * sizeof *scores + 63) / 64 * 64);
        if (scores == NULL)
            abort();
    }
    float queries[ROWS * WIDEST], factors[ROWS], *to[ROWS];
    for (int r = 0; r < rows; r++) {
        int query = (first + r) / group, own = head * group + (first + r) % group;
        const float *from = call->q + own * call->q_head + query * call->q_row;
        for (int i = 0; i < call->size; i++)
            queries[r * call->size + i] = from[i] * call->scale;
        to[r] = call->out + ((size_t)query * call->heads + own) * call->size;
    }
    int old = seen < call->old ? seen : call->old;
    score(rows, old, call->size, queries, call->k + head * call->k_head, call->k_row, scores,
          padded);
    if (seen > old)
        score(rows, seen - old, call->size, queries, call->fresh_k + head * call->fresh_head,
              call->fresh_row, scores + old, padded);
    for (int r = 0; r < rows; r++) {
        factors[r] = weigh_visible(call, scores + (size_t)r * padded, (first + r) / group, padded);
    }
    weigh(call, head, rows, seen, scores, padded, to, factors);
}

void cpu_attention(const struct attention *call)
{
    share_parts(attend_part, call, call->kv_heads * parts_of_a_head(call));
}
