/* softmax(scale * q @ k.T, masked) @ v of the rows of a sequence.
 *
 * A score is a sum over the elements of a head in their order; keys are turned so that sixteen
 * slots are side by side. The sum of the weights has sixteen lanes, counted over the slots that a
 * row sees, and an element of the answer is a sum over these slots in their order: a row has the
 * same bits in plain decoding, in a chain, in a tree, and behind any number of hidden slots. */
#include <stdlib.h>

enum {
    SLOTS = 16,       /* scores that are computed together */
    MOST_ROWS = 32,   /* of a part: they share the keys that were turned */
    SCORED = TILE_ROWS == 8 ? 8 : 4,
    WEIGHED = TILE_ROWS == 8 ? 4 : 2,
    COLUMNS = 4
};

struct attention {
    const struct decoder *decoder;
    const struct sequence *sequence;
    const struct block *block;
    int layer, per_head; /* parts of a head */
    const float *q;      /* [rows, heads, size] */
    float *out;
};

struct attention_jobs {
    const struct attention *parts;
    int count;
};

/* `count` keys of `size` floats to [size, SLOTS]. */
static void turn_keys(const float *keys, int size, int count, float *to)
{
    int d = 0;
    if (count == SLOTS)
        for (; d + LANES <= size; d += LANES)
            for (int p = 0; p < SLOTS / LANES; p++)
                transpose(keys + (size_t)p * LANES * size + d, size, to + d * SLOTS + p * LANES, SLOTS);
    for (; d < size; d++)
        for (int s = 0; s < SLOTS; s++)
            to[d * SLOTS + s] = s < count ? keys[(size_t)s * size + d] : 0.0f;
}

/* Scores of `rows` queries, [rows, size], with sixteen turned keys. */
INLINE void score(int rows, int size, const float *queries, const float *keys, float *scores, int stride)
{
    vf sums[SCORED][SLOTS / LANES];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int p = 0; p < SLOTS / LANES; p++)
            sums[r][p] = (vf){0};
    for (int d = 0; d < size; d++)
        UNROLLED for (int p = 0; p < SLOTS / LANES; p++) {
            vf key = vf_load(keys + d * SLOTS + p * LANES);
            UNROLLED for (int r = 0; r < rows; r++)
                sums[r][p] = vf_fma(key, vf_all(queries[r * size + d]), sums[r][p]);
        }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int p = 0; p < SLOTS / LANES; p++)
            vf_store(sums[r][p], scores + (size_t)r * stride + p * LANES);
}

/* `rows` rows of weights times COLUMNS * LANES columns of the values in these slots. */
INLINE void weigh(int rows, int columns, int size, int count, const float *weights, int stride,
                  const float *values, float *const *to)
{
    vf sums[WEIGHED][COLUMNS];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int c = 0; c < columns; c++)
            sums[r][c] = (vf){0};
    for (int s = 0; s < count; s++)
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int c = 0; c < columns; c++)
                sums[r][c] = vf_fma(vf_load(values + (size_t)s * size + c * LANES),
                                    vf_all(weights[(size_t)r * stride + s]), sums[r][c]);
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int c = 0; c < columns; c++)
            vf_store(sums[r][c], to[r] + c * LANES);
}

static void weigh_rows(int rows, int size, int count, const float *weights, int stride,
                       const float *values, float *const *to)
{
    int column = 0;
    for (; column < size; ) {
        float *own[MOST_ROWS];
        int wide = size - column >= COLUMNS * LANES, narrow = size - column >= LANES;
        for (int r = 0; r < rows; r++)
            own[r] = to[r] + column;
        for (int r = 0; r < rows;) {
            const float *from = weights + (size_t)r * stride;
            if (wide && rows - r >= WEIGHED) {
                weigh(WEIGHED, COLUMNS, size, count, from, stride, values + column, own + r);
                r += WEIGHED;
            } else if (wide) {
                weigh(1, COLUMNS, size, count, from, stride, values + column, own + r);
                r++;
            } else if (narrow) {
                weigh(1, 1, size, count, from, stride, values + column, own + r);
                r++;
            } else {
                for (int c = 0; c < size - column; c++) {
                    float sum = 0.0f;
                    for (int s = 0; s < count; s++)
                        sum = fmaf(values[(size_t)s * size + column + c], from[s], sum);
                    own[r][c] = sum;
                }
                r++;
            }
        }
        column += wide ? COLUMNS * LANES : narrow ? LANES : size - column;
    }
}

/* Turn `count` scores into weights that add up to 1; behind them is room for fifteen more. */
static void softmax(float *scores, int count)
{
    float lanes[SUM_LANES] = {0}, tops[SUM_LANES], top = -INFINITY;
    int padded = (count + SUM_LANES - 1) / SUM_LANES * SUM_LANES;
    for (int s = count; s < padded; s++)
        scores[s] = -INFINITY;
    for (int l = 0; l < SUM_LANES; l++)
        tops[l] = -INFINITY;
    for (int s = 0; s < padded; s += SUM_LANES)
        for (int l = 0; l < SUM_LANES; l++)
            tops[l] = scores[s + l] > tops[l] ? scores[s + l] : tops[l];
    for (int l = 0; l < SUM_LANES; l++)
        top = tops[l] > top ? tops[l] : top;
    for (int s = 0; s < padded; s += SUM_LANES)
        for (int l = 0; l < SUM_LANES; l++) {
            scores[s + l] = exponential(scores[s + l] - top);
            lanes[l] += scores[s + l];
        }
    float factor = 1.0f / fold_lanes(lanes);
    for (int s = 0; s < count; s++)
        scores[s] *= factor;
}

/* Where the slots that a query sees begin and end, and which of these it sees. */
struct view {
    int first, end;
    const unsigned char *mask; /* [end], or NULL: all */
};

static struct view view_of(const struct attention *call, int query)
{
    const struct sequence *own = call->sequence;
    int window = call->block->window, all = own->start + own->rows;
    const unsigned char *visible = own->visible[window > 0];
    struct view view = {0, visible == NULL ? own->start + query + 1 : all, NULL};
    if (visible != NULL) {
        view.mask = visible + (size_t)query * all;
        while (view.first < own->start + query && !view.mask[view.first])
            view.first++;
    } else if (window > 0 && view.end > window) {
        view.first = view.end - window;
    }
    return view;
}

/* Scores from slot `base` on, up to slot `end`, as weights: side by side while they are added up,
 * and zeros for slots that are not seen. */
static void weights_of(const struct attention *call, struct view view, int base, int end, float *scores)
{
    float *own = scores + (view.first - base);
    const unsigned char *mask = view.mask == NULL ? NULL : view.mask + view.first;
    int seen = view.end - view.first, count = mask == NULL ? seen : 0;
    for (int s = 0; mask != NULL && s < seen; s++)
        if (mask[s])
            own[count++] = own[s];
    if (call->decoder->score_cap > 0.0f)
        cap_row(call->decoder->score_cap, count, own);
    softmax(own, count);
    for (int s = seen - 1; mask != NULL && s >= 0; s--)
        own[s] = mask[s] ? own[--count] : 0.0f;
    memset(scores, 0, sizeof *scores * (view.first - base));
    memset(own + seen, 0, sizeof *scores * (end - view.end)); /* a later row may see more */
}

static int parts_of_a_head(const struct decoder *decoder, const struct sequence *own)
{
    return (decoder->heads / decoder->kv_heads * own->rows + MOST_ROWS - 1) / MOST_ROWS;
}

/* MOST_ROWS rows of one head of the keys: row r is query r / group of head r % group. */
static void attend_part(const struct attention *call, int number)
{
    const struct decoder *decoder = call->decoder;
    const struct sequence *own = call->sequence;
    int group = decoder->heads / decoder->kv_heads, size = decoder->size;
    int head = number / call->per_head, first = number % call->per_head * MOST_ROWS;
    int rows = group * own->rows - first < MOST_ROWS ? group * own->rows - first : MOST_ROWS;
    struct view view = view_of(call, first / group);
    int base = view.first, end = view.end;
    for (int r = 1; r < rows; r++) {
        view = view_of(call, (first + r) / group);
        base = view.first < base ? view.first : base;
        end = view.end > end ? view.end : end;
    }
    int seen = end - base, stride = (seen + 2 * SLOTS - 1) / SLOTS * SLOTS;
    float *scores = scratch(ATTENTION, sizeof(float) * ((size_t)rows * stride + (SLOTS + MOST_ROWS) * size));
    float *turned = scores + (size_t)rows * stride, *queries = turned + SLOTS * size;
    long begin = head * own->head + (long)base * size;
    const float *keys = own->k[call->layer] + begin;
    float *to[MOST_ROWS];
    for (int r = 0; r < rows; r++) {
        long at = (long)((first + r) / group) * decoder->heads + head * group + (first + r) % group;
        for (int i = 0; i < size; i++)
            queries[r * size + i] = call->q[at * size + i] * decoder->scale;
        to[r] = call->out + at * size;
    }
    for (int s = 0; s < seen; s += SLOTS) {
        turn_keys(keys + (size_t)s * size, size, seen - s < SLOTS ? seen - s : SLOTS, turned);
        int r = 0;
        for (; r + SCORED <= rows; r += SCORED)
            score(SCORED, size, queries + r * size, turned, scores + (size_t)r * stride + s, stride);
        for (; r + 3 <= rows; r += 3)
            score(3, size, queries + r * size, turned, scores + (size_t)r * stride + s, stride);
        for (; r < rows; r++)
            score(1, size, queries + r * size, turned, scores + (size_t)r * stride + s, stride);
    }
    for (int r = 0; r < rows; r++)
        weights_of(call, view_of(call, (first + r) / group), base, end, scores + (size_t)r * stride);
    weigh_rows(rows, size, seen, scores, stride, own->v[call->layer] + begin, to);
}

static void attend_number(const void *context, int number)
{
    const struct attention_jobs *jobs = context;
    const struct attention *part = jobs->parts;
    for (; number >= part->per_head * part->decoder->kv_heads; part++)
        number -= part->per_head * part->decoder->kv_heads;
    attend_part(part, number);
}

/* A sequence's attention in a model whose passes are not ours; `shape` has its heads and scale. */
static void attend(const struct decoder *shape, const struct sequence *own, const float *q, float *out)
{
    const struct block block = {.window = 0};
    struct attention part = {.decoder = shape, .sequence = own, .block = &block,
                             .per_head = parts_of_a_head(shape, own), .q = q, .out = out};
    struct attention_jobs jobs = {&part, part.per_head * shape->kv_heads};
    share_parts(attend_number, &jobs, jobs.count);
}
