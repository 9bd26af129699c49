/* softmax(scale * q @ k.T, masked) @ v of the rows of a sequence.
 *
 * A score is a sum over the elements of a head in their order; keys are turned so that sixteen
 * slots are side by side. The sum of the weights has sixteen lanes, counted over the slots that a
 * row sees, and an element of the answer is a sum over these slots in their order: a row has the
 * same bits in plain decoding, in a chain, in a tree, and behind any number of hidden slots. */
#include <stdlib.h>

enum {
    MOST_ROWS = 48,                    /* of a part: they share tiles of keys and values */
    TILED = TILE_ROWS == 1 ? 1 : 6,    /* rows that share a load of a register */
    BESIDE = LANES == 16 ? 2 : 4       /* most registers of sums of a row */
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

/* Rows of the next tile, and registers of sums of each: enough sums to hide how long one takes. */
INLINE int tiled(int left) { return left <= TILED ? left : left < 2 * TILED ? (left + 1) / 2 : TILED; }
INLINE int beside(int rows) { return rows > 3 && LANES == 8 ? 2 : BESIDE; }

/* Scores of `rows` queries, [rows, size], with a tile of turned keys. */
INLINE void score(int number, int rows, int size, const float *queries, const uint8_t *keys, float *scores,
                  int stride)
{
    for (int first = 0; first < SLOTS; first += beside(rows) * LANES) {
        vf sums[TILED][BESIDE], own[BESIDE];
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int p = 0; p < beside(rows); p++)
                sums[r][p] = (vf){0};
        for (int d = 0; d < size; d++) {
            UNROLLED for (int p = 0; p < beside(rows); p++)
                own[p] = vf_of(number, keys + (d * SLOTS + first + p * LANES) * bytes_of(number));
            UNROLLED for (int r = 0; r < rows; r++) {
                vf query = vf_all(queries[r * size + d]);
                UNROLLED for (int p = 0; p < beside(rows); p++)
                    sums[r][p] = vf_fma(own[p], query, sums[r][p]);
            }
        }
        UNROLLED for (int r = 0; r < rows; r++)
            UNROLLED for (int p = 0; p < beside(rows); p++)
                vf_store(sums[r][p], scores + (size_t)r * stride + first + p * LANES);
    }
}

/* Add to `sums`, [rows, width], rows of weights times `columns` registers of a tile of values. */
INLINE void weigh_columns(int number, int rows, int columns, int width, int count, const float *weights,
                          int stride, const uint8_t *values, float *sums)
{
    vf own[TILED][BESIDE], each[BESIDE];
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int c = 0; c < columns; c++)
            own[r][c] = vf_load(sums + r * width + c * LANES);
    for (int s = 0; s < count; s++, values += width * bytes_of(number)) {
        if (number == HALF)
            __builtin_prefetch(values + SLOTS * width * sizeof(uint16_t));
        UNROLLED for (int c = 0; c < columns; c++)
            each[c] = vf_of(number, values + c * LANES * bytes_of(number));
        UNROLLED for (int r = 0; r < rows; r++) {
            vf weight = vf_all(weights[(size_t)r * stride + s]);
            UNROLLED for (int c = 0; c < columns; c++)
                own[r][c] = vf_fma(each[c], weight, own[r][c]);
        }
    }
    UNROLLED for (int r = 0; r < rows; r++)
        UNROLLED for (int c = 0; c < columns; c++)
            vf_store(own[r][c], sums + r * width + c * LANES);
}

INLINE void weigh(int number, int rows, int width, int count, const float *weights, int stride,
                  const uint8_t *values, float *sums)
{
    int at = 0, wide = beside(rows);
    for (; at + wide * LANES <= width; at += wide * LANES)
        weigh_columns(number, rows, wide, width, count, weights, stride, values + at * bytes_of(number),
                      sums + at);
    for (; at < width; at += LANES)
        weigh_columns(number, rows, 1, width, count, weights, stride, values + at * bytes_of(number),
                      sums + at);
}

/* The tiles of `rows` rows; the kind of numbers and the rows of a tile are constants in each case. */
#define EACH_TILE(ROWS, CALL, NUMBER)                                                           \
    for (int r = 0, tile; r < (ROWS); r += tile) {                                              \
        tile = tiled((ROWS) - r);                                                               \
        switch (tile) { ONE_TILE(1, CALL, NUMBER) SOME_TILES(CALL, NUMBER) }                    \
    }
#define ONE_TILE(N, CALL, NUMBER)                                                               \
    case N: CALL(NUMBER, N); break;
#if TILE_ROWS == 1
#define SOME_TILES(CALL, NUMBER)
#else
#define SOME_TILES(CALL, NUMBER)                                                                \
    ONE_TILE(2, CALL, NUMBER) ONE_TILE(3, CALL, NUMBER) ONE_TILE(4, CALL, NUMBER)               \
    ONE_TILE(5, CALL, NUMBER) ONE_TILE(6, CALL, NUMBER)
#endif

/* A tile of keys or values, as it is needed. */
struct tiles {
    float *floats;   /* [SLOTS, padded size], or [size, SLOTS] */
    uint8_t *turned; /* [size, SLOTS] */
};

/* Turn `count` scores into weights that add up to 1; behind them is room for fifteen more. */
static void softmax(float *scores, int count)
{
    float lanes[SUM_LANES] = {0}, tops[SUM_LANES], top = -INFINITY;
    int end = (count + SUM_LANES - 1) / SUM_LANES * SUM_LANES;
    for (int s = count; s < end; s++)
        scores[s] = -INFINITY;
    for (int l = 0; l < SUM_LANES; l++)
        tops[l] = -INFINITY;
    for (int s = 0; s < end; s += SUM_LANES)
        for (int l = 0; l < SUM_LANES; l++)
            tops[l] = scores[s + l] > tops[l] ? scores[s + l] : tops[l];
    for (int l = 0; l < SUM_LANES; l++)
        top = tops[l] > top ? tops[l] : top;
    for (int s = 0; s < end; s += SUM_LANES)
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

/* Scores of all rows with `seen` slots, tile by tile. Several tiles of rows share the tile as floats. */
static void score_rows(int number, const uint8_t *keys, int rows, int size, int seen, const float *queries,
                       const struct tiles *tiles, float *scores, int stride)
{
    for (int s = 0; s < seen; s += SLOTS, keys += SLOTS * size * bytes_of(number)) {
        const uint8_t *own = tiles->turned;
        int kind = number;
        turn_keys(number, keys, size, seen - s < SLOTS ? seen - s : SLOTS, tiles->turned);
        if (number == HALF && rows > TILED) {
            read_numbers(HALF, own, size, SLOTS, tiles->floats);
            own = (const uint8_t *)tiles->floats, kind = FLOAT;
        }
#define SCORE(NUMBER, N)                                                                        \
    score(NUMBER, N, size, queries + r * size, own, scores + (size_t)r * stride + s, stride)
        if (kind == HALF) {
            EACH_TILE(rows, SCORE, HALF)
        } else {
            EACH_TILE(rows, SCORE, FLOAT)
        }
    }
}

/* Sums, [rows, padded size], of `seen` values by their weights. */
static void weigh_rows(int number, const uint8_t *values, int rows, int size, int seen,
                       const float *weights, int stride, const struct tiles *tiles, float *sums)
{
    int width = padded(size), direct = width == size && (number == FLOAT || rows <= TILED);
    memset(sums, 0, sizeof *sums * rows * width);
    for (int s = 0; s < seen; s += SLOTS, values += SLOTS * size * bytes_of(number)) {
        int count = seen - s < SLOTS ? seen - s : SLOTS;
        const uint8_t *own = direct ? values : (const uint8_t *)tiles->floats;
        if (!direct)
            read_numbers(number, values, count, size, tiles->floats);
#define WEIGH(NUMBER, N)                                                                        \
    weigh(NUMBER, N, width, count, weights + (size_t)r * stride + s, stride, own, sums + r * width)
        if (direct && number == HALF) {
            EACH_TILE(rows, WEIGH, HALF)
        } else {
            EACH_TILE(rows, WEIGH, FLOAT)
        }
    }
}

/* Where row r of a head of the keys is among queries and answers. */
static long row_at(const struct attention *call, int head, int r)
{
    int heads = call->decoder->heads, group = heads / call->decoder->kv_heads;
    return ((long)(r / group) * heads + head * group + r % group) * call->decoder->size;
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
    int seen = end - base, stride = (seen + 2 * SLOTS - 1) / SLOTS * SLOTS, width = padded(size);
    size_t floats = (size_t)rows * (stride + size + width) + 2 * SLOTS * width;
    float *scores = scratch(ATTENTION, sizeof(float) * floats);
    float *sums = scores + (size_t)rows * stride, *queries = sums + rows * width;
    struct tiles tiles = {queries + rows * size, (uint8_t *)(queries + rows * size + SLOTS * width)};
    long slot = size * bytes_of(own->number), begin = head * own->head + base * slot;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < size; i++)
            queries[r * size + i] = call->q[row_at(call, head, first + r) + i] * decoder->scale;
    score_rows(own->number, own->k[call->layer] + begin, rows, size, seen, queries, &tiles, scores, stride);
    for (int r = 0; r < rows; r++)
        weights_of(call, view_of(call, (first + r) / group), base, end, scores + (size_t)r * stride);
    weigh_rows(own->number, own->v[call->layer] + begin, rows, size, seen, scores, stride, &tiles, sums);
    for (int r = 0; r < rows; r++)
        memcpy(call->out + row_at(call, head, first + r), sums + r * width, sizeof(float) * size);
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
