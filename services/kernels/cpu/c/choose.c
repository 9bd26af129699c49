/* The target's choice of a token from each row of logits, by the rule of
 * protocol/decoding/sampler.py: the largest logit / T + noise of the tokens that the filters keep.
 *
 * What rounding could decide otherwise is left to whoever can be exact: two scores closer than
 * CLOSE, and a winner nearer to a filter's border than BORDER.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#include "exponential.h"
#include "logits.h"
#include "scratch.h"
#include "simd.h"

#define SIMD AVX2
#define CLOSE 1e-5  /* relative to a score's size */
#define BORDER 1e-4 /* of probabilities, and relative to one of them */

enum { LANES = 8, UNDECIDED = -1, BROKEN = -2, RARE_BITS = 256 };

struct rule {
    int top_k; /* 0: all */
    float top_p, min_p, temperature;
};

typedef uint32_t eight_bits __attribute__((vector_size(32), aligned(4), may_alias));

/* See protocol/decoding/gumbel.py. */
#define MIX(x)                                                                                  \
    do {                                                                                        \
        x ^= x >> 16;                                                                           \
        x *= 0x85EBCA6Bu;                                                                       \
        x ^= x >> 13;                                                                           \
        x *= 0xC2B2AE35u;                                                                       \
        x ^= x >> 16;                                                                           \
    } while (0)

static uint32_t hash(uint32_t id, const uint32_t *keys)
{
    uint32_t x = id ^ keys[0];
    MIX(x);
    x += keys[1];
    MIX(x);
    return x;
}

static double score_of(float logit, uint32_t bits, float temperature)
{
    float uniform = ((float)bits + 0.5f) * 0x1p-32f;
    if (uniform > 1.0f - 0x1p-24f)
        uniform = 1.0f - 0x1p-24f;
    return (double)(logit / temperature) - log(-log1p(-(double)uniform));
}

/* The best so far, and how near the next one comes. */
struct contest {
    int token;
    double best, second;
};

static void enter(struct contest *contest, int token, double score)
{
    if (score > contest->best) {
        contest->second = contest->best;
        contest->best = score;
        contest->token = token;
    } else if (score > contest->second) {
        contest->second = score;
    }
}

static double margin_of(const struct contest *contest)
{
    return CLOSE * (1.0 + fabs(contest->best));
}

/* Eight tokens' best possible scores: noise is at most -log(bits / 2^32), which is less than
 * log(2) * (32 - the whole part of log2(bits)). */
SIMD static int any_may_win(const float *row, int first, const uint32_t *keys, float scale,
                            float bound)
{
    const eight_bits numbers = {0, 1, 2, 3, 4, 5, 6, 7};
    eight_bits x = (numbers + (uint32_t)first) ^ keys[0];
    MIX(x);
    x += keys[1];
    MIX(x);
    eight halves = __builtin_convertvector((eight_ints)(x >> 1 | 1), eight);
    eight exponents = __builtin_convertvector(((eight_ints)halves >> 23) - 127, eight);
    eight most = *(const eight *)(row + first) * scale + 0.6931472f * (31.0f - exponents);
    eight_ints may = (most >= bound) | (eight_ints)(x < RARE_BITS);
    return any_lane(may);
}

static int draw(int count, const float *row, float temperature, const uint32_t *keys)
{
    float largest;
    int likeliest = largest_of_row(count, row, &largest);
    struct contest all = {
        likeliest, score_of(largest, hash((uint32_t)likeliest, keys), temperature), -INFINITY};
    for (int i = 0; i < count; i += LANES) {
        int end = i + LANES < count ? i + LANES : count;
        float bound = (float)(all.best - 2.0 * margin_of(&all));
        if (end - i == LANES && !any_may_win(row, i, keys, 1.0f / temperature, bound - 1e-4f))
            continue;
        for (int id = i; id < end; id++)
            if (id != likeliest)
                enter(&all, id, score_of(row[id], hash((uint32_t)id, keys), temperature));
    }
    return all.second >= all.best - margin_of(&all) ? UNDECIDED : all.token;
}

struct candidate {
    float logit;
    int id;
};

static int before(const void *one, const void *other)
{
    const struct candidate *a = one, *b = other;
    if (a->logit != b->logit)
        return a->logit > b->logit ? -1 : 1;
    return a->id < b->id ? -1 : 1;
}

/* Those that may be kept and one more, in falling order; their number. */
static int collect(int count, const float *row, const struct rule *rule, float largest,
                   double total, struct candidate *found)
{
    int possible = 0; /* a grammar leaves few */
    for (int id = 0; id < count; id++)
        possible += row[id] > -INFINITY;
    for (float distance = 4.0f;; distance += 2.0f) {
        double mass = 0.0;
        int size = 0;
        for (int id = 0; id < count; id++)
            if (row[id] >= largest - distance) {
                found[size++] = (struct candidate){row[id], id};
                mass += exp((double)(row[id] - largest));
            }
        int enough = (rule->top_k > 0 && size > rule->top_k) ||
                     (rule->top_p < 1.0f && mass > (rule->top_p + 2.0 * BORDER) * total) ||
                     (rule->min_p > 0.0f && exp(-distance) < rule->min_p * (1.0 - 2.0 * BORDER));
        if (enough || size >= possible) {
            qsort(found, size, sizeof *found, before);
            return size;
        }
    }
}

static int draw_filtered(int count, const float *row, const struct rule *rule,
                         const uint32_t *keys)
{
    float largest;
    largest_of_row(count, row, &largest);
    double total = sum_of_powers(count, row, largest);
    struct candidate *found = scratch(CHOICE, (size_t)count * sizeof *found);
    int size = collect(count, row, rule, largest, total, found);
    if (rule->top_k > 0 && size > rule->top_k)
        size = rule->top_k;
    struct contest all = {-1, -INFINITY, -INFINITY};
    double mass = 0.0;
    int unsure = size; /* from this one on */
    for (int i = 0; i < size; i++) {
        double share = exp((double)(found[i].logit - largest)) / total, least = rule->min_p / total;
        int out = (rule->top_p < 1.0f && mass >= rule->top_p + BORDER) ||
                  (rule->min_p > 0.0f && share < least * (1.0 - BORDER));
        if (out && i > 0)
            break;
        int near = (rule->top_p < 1.0f && mass >= rule->top_p - BORDER) ||
                   (rule->min_p > 0.0f && share < least * (1.0 + BORDER));
        if (near && i > 0 && i < unsure)
            unsure = i;
        uint32_t bits = hash((uint32_t)found[i].id, keys);
        enter(&all, i, score_of(found[i].logit, bits, rule->temperature));
        mass += share;
    }
    if (all.token >= unsure || all.second >= all.best - margin_of(&all))
        return UNDECIDED;
    return found[all.token].id;
}

/* Tokens [rows] of logits [rows, count], `stride` floats apart, by the noise of keys [rows, 2];
 * negative: UNDECIDED, or BROKEN where a logit is NaN or infinite. Temperature 0 is greedy. */
void choose_rows(int rows, int count, const float *logits, long stride, const struct rule *rule,
                 const uint32_t *keys, int *tokens)
{
    int filters = rule->top_k > 0 || rule->top_p < 1.0f || rule->min_p > 0.0f;
    for (int r = 0; r < rows; r++) {
        const float *row = logits + r * stride;
        float largest;
        int likeliest = largest_of_row(count, row, &largest);
        if (isnan(largest) || largest == INFINITY)
            tokens[r] = BROKEN;
        else if (rule->temperature == 0.0f)
            tokens[r] = likeliest;
        else if (!isfinite(largest))
            tokens[r] = UNDECIDED;
        else if (filters)
            tokens[r] = draw_filtered(count, row, rule, keys + 2 * r);
        else
            tokens[r] = draw(count, row, rule->temperature, keys + 2 * r);
    }
}
