/* A whole pass of a decoder, from tokens to logits. Keys and values of its rows go where their
 * sequences have them. What is done to one row never depends on another. */

enum { MOST_PARTS = 64, FEW_ROWS = 4, PART_BYTES = 32768 };

/* Up to three products of the same rows. */
struct products {
    const struct matrix *matrices[3];
    const struct rows *x;
    float *y[3];
    int count, parts;
};

static void multiply_part(const void *context, int number)
{
    const struct products *own = context;
    long all = 0, before = 0;
    for (int i = 0; i < own->count; i++)
        all += strips_of(own->matrices[i]);
    long first = all * number / own->parts, end = all * (number + 1) / own->parts;
    for (int i = 0; i < own->count; i++) {
        const struct matrix *m = own->matrices[i];
        long from = first - before, to = end - before, strips = strips_of(m);
        before += strips;
        from = from < 0 ? 0 : from;
        to = to > strips ? strips : to;
        if (from < to)
            multiply_strips(m, own->x, (int)from, (int)to, own->y[i], m->outputs);
    }
}

static void run_products(struct products *own)
{
    size_t bytes = 0;
    long strips = 0;
    for (int i = 0; i < own->count; i++) {
        bytes += strip_bytes(own->matrices[i]) * strips_of(own->matrices[i]);
        strips += strips_of(own->matrices[i]);
    }
    long parts = (long)(bytes / PART_BYTES);
    own->parts = (int)(parts < 1 ? 1 : parts > 64 ? 64 : parts > strips ? strips : parts);
    share_parts(multiply_part, own, own->parts);
}

static void product(const struct matrix *m, const struct rows *x, float *y)
{
    struct products one = {.matrices = {m}, .x = x, .y = {y}, .count = 1};
    run_products(&one);
}

/* What is kept of a pass between its steps. */
struct work {
    const struct decoder *decoder;
    const struct block *block;
    const struct pass *pass;
    struct rows normed, attended, gated; /* inputs of products */
    float *x;                            /* [rows, width] */
    float *added;                        /* [rows, width], or NULL: what is to be added to x */
    const struct norm *adding;           /* of these */
    float *q, *k, *v, *answers;          /* [rows, heads of the kind * size] */
    float *gate, *up, *one;
    const struct norm *norm;
    int layer;
};

static void each_row(const struct work *work, part *compute)
{
    if (work->pass->rows >= FEW_ROWS)
        share_parts(compute, work, work->pass->rows);
    else
        for (int row = 0; row < work->pass->rows; row++)
            compute(work, row);
}

/* x += adding(added) */
static void add_to_row(const struct work *work, int row)
{
    int width = work->normed.width;
    if (work->added == NULL)
        return;
    float *added = work->added + (size_t)row * width;
    if (work->adding->weight != NULL)
        normalise(work->adding, width, added, added);
    add_row(width, added, work->x + (size_t)row * width);
}

/* x += adding(added); normed = norm(x) */
static void norm_row(const void *context, int row)
{
    const struct work *work = context;
    struct rows normed = work->normed;
    int width = normed.width;
    float *x = work->x + (size_t)row * width;
    float *to = scratch(ROW, sizeof(float) * width);
    add_to_row(work, row);
    normalise(work->norm, width, x, to);
    put_row(&normed, row, to);
}

static void place_heads(const struct work *work, const struct norm *norm, int row, int heads, float *x)
{
    int size = work->decoder->size, half = work->decoder->rotated / 2;
    size_t angle = half > 0 ? (size_t)work->pass->positions[row] * half : 0;
    const float *cos = work->pass->cos[work->block->rotation];
    const float *sin = work->pass->sin[work->block->rotation];
    for (int h = 0; h < heads; h++, x += size) {
        if (norm->weight != NULL)
            normalise(norm, size, x, x);
        if (half > 0)
            rotate(half, cos + angle, sin + angle, x);
    }
}

/* Queries and keys to their positions, keys and values to their slots. */
static void place_row(const void *context, int row)
{
    const struct work *work = context;
    const struct decoder *decoder = work->decoder;
    int size = decoder->size, kept = decoder->kv_heads * size, part = 0, first = 0;
    float *k = work->k + (size_t)row * kept, *v = work->v + (size_t)row * kept;
    place_heads(work, &work->block->q_norm, row, decoder->heads,
                work->q + (size_t)row * decoder->heads * size);
    place_heads(work, &work->block->k_norm, row, decoder->kv_heads, k);
    for (; first + work->pass->sequences[part].rows <= row; part++)
        first += work->pass->sequences[part].rows;
    const struct sequence *own = &work->pass->sequences[part];
    for (int h = 0; h < decoder->kv_heads; h++) {
        long slot = h * own->head + (own->start + row - first) * (long)(size * bytes_of(own->number));
        keep(own->number, size, k + h * size, own->k[work->layer] + slot);
        keep(own->number, size, v + h * size, own->v[work->layer] + slot);
    }
}

static void keep_answers(const void *context, int row)
{
    const struct work *work = context;
    struct rows attended = work->attended;
    put_row(&attended, row, work->answers + (size_t)row * attended.width);
}

static void gate_one(const void *context, int row)
{
    const struct work *work = context;
    struct rows gated = work->gated;
    size_t at = (size_t)row * gated.width;
    gate_row(work->decoder->gelu, gated.width, work->gate + at, work->up + at);
    put_row(&gated, row, work->gate + at);
}

static void attend_all(const struct work *work)
{
    struct attention parts[MOST_PARTS];
    struct attention_jobs jobs = {parts, 0};
    int width = work->decoder->heads * work->decoder->size;
    for (int p = 0, first = 0; p < work->pass->parts; first += work->pass->sequences[p++].rows) {
        const struct sequence *own = &work->pass->sequences[p];
        parts[p] = (struct attention){
            .decoder = work->decoder, .sequence = own, .block = work->block, .layer = work->layer,
            .per_head = parts_of_a_head(work->decoder, own),
            .q = work->q + (size_t)first * width, .out = work->answers + (size_t)first * width};
        jobs.count += parts[p].per_head * work->decoder->kv_heads;
    }
    share_parts(attend_number, &jobs, jobs.count);
}

static void run_block(struct work *work)
{
    const struct block *block = work->block;
    struct products inputs = {.matrices = {&block->q, &block->k, &block->v}, .x = &work->normed,
                              .y = {work->q, work->k, work->v}, .count = 3};
    struct products gates = {.matrices = {&block->gate, &block->up}, .x = &work->normed,
                             .y = {work->gate, work->up}, .count = 2};
    work->norm = &block->before;
    each_row(work, norm_row);
    run_products(&inputs);
    each_row(work, place_row);
    attend_all(work);
    each_row(work, keep_answers);
    work->added = work->one;
    work->adding = &block->attended;
    product(&block->o, &work->attended, work->added);
    work->norm = &block->after;
    each_row(work, norm_row);
    run_products(&gates);
    each_row(work, gate_one);
    work->adding = &block->fed;
    product(&block->down, &work->gated, work->added);
}

static size_t row_bytes(const struct matrix *m, int rows)
{
    return (size_t)rows * m->inputs * (sizeof(float) + 1) +
           2 * sizeof(float) * ((size_t)rows * m->inputs / ROUNDED) + 4 * 64;
}

/* Room for rows that this matrix is multiplied with, from `memory` on; returns its end. */
static char *place_rows(struct rows *rows, int count, const struct matrix *m, char *memory)
{
    size_t all = (size_t)count * m->inputs, groups = all / ROUNDED * sizeof(float);
    rows->count = count;
    rows->width = m->inputs;
    rows->floats = (float *)memory;
    rows->scales = (float *)(memory + (all * sizeof(float) + 63) / 64 * 64);
    rows->sums = (float *)((char *)rows->scales + (groups + 63) / 64 * 64);
    rows->bytes = (int8_t *)rows->sums + (groups + 63) / 64 * 64;
    return (char *)rows->bytes + (all + 63) / 64 * 64;
}

/* Whether these matrices are multiplied with bytes, with floats, or some with either. */
static void choose_kinds(struct rows *rows, int rounds, const struct matrix *const *matrices, int count)
{
    int bytes = 0, floats = 0;
    for (int i = 0; i < count; i++)
        rounds &&matrices[i]->weights <= BITS8 ? bytes++ : floats++;
    rows->bytes = bytes ? rows->bytes : NULL;
    rows->floats = floats ? rows->floats : NULL;
}

/* A weight at this row, as floats. */
static void read_row(const struct matrix *m, int row, float *to)
{
    const uint8_t *strip = m->strips + row / STRIP * strip_bytes(m);
    int lane = row % STRIP;
    float whole[STRIP], factors[2];
    for (int k = 0; m->weights > BITS8 && k < m->inputs; k++) {
        size_t each = bytes_of(m->weights);
        for (int p = 0; p < PARTS; p++)
            vf_store(vf_of(m->weights, strip + (k * STRIP + p * LANES) * each), whole + p * LANES);
        to[k] = whole[lane];
    }
    for (int g = 0; m->weights <= BITS8 && g < m->inputs / m->group; g++) {
        struct group group = group_at(m, m->scales, strip, g);
        for (int f = 0; f < 2; f++) {
            for (int p = 0; p < PARTS; p++)
                vf_store(factors_of(m->scales, group, f, p), whole + p * LANES);
            factors[f] = whole[lane];
        }
        for (int i = 0; i < m->group; i++) {
            int step = i / 4, byte = 4 * lane + i % 4;
            int code = m->weights == BITS8 ? group.codes[64 * step + byte]
                                           : group.codes[64 * (step / 2) + byte] >> 4 * (step & 1) & 15;
            to[g * m->group + i] = fmaf((float)code, factors[0], factors[1]);
        }
    }
}

static void keep_taps(struct work *work, int layer)
{
    const struct pass *pass = work->pass;
    for (int t = 0; t < pass->taps; t++)
        if (pass->tapped[t] == layer) {
            for (int r = 0; r < pass->rows; r++)
                add_to_row(work, r);
            work->added = NULL;
            memcpy(pass->tap[t], work->x, sizeof(float) * pass->rows * work->normed.width);
        }
}

static void cap_logits(const void *context, int row)
{
    const struct work *work = context;
    int count = work->decoder->head.outputs;
    cap_row(work->decoder->logit_cap, count, work->pass->logits + (size_t)row * count);
}

static void place_work(struct work *work)
{
    const struct decoder *decoder = work->decoder;
    const struct block *first = decoder->blocks;
    size_t rows = work->pass->rows, width = first->q.inputs;
    size_t wide = decoder->heads * decoder->size, kept = decoder->kv_heads * decoder->size;
    size_t hidden = first->gate.outputs, floats = rows * (2 * width + 2 * wide + 2 * kept + 2 * hidden);
    char *memory = scratch(PASS, floats * sizeof(float) + row_bytes(&first->q, rows) +
                                   row_bytes(&first->o, rows) + row_bytes(&first->down, rows) + 64);
    memory = place_rows(&work->normed, rows, &first->q, memory);
    memory = place_rows(&work->attended, rows, &first->o, memory);
    memory = place_rows(&work->gated, rows, &first->down, memory);
    work->x = (float *)memory;
    work->one = work->x + rows * width;
    work->q = work->one + rows * width;
    work->answers = work->q + rows * wide;
    work->k = work->answers + rows * wide;
    work->v = work->k + rows * kept;
    work->gate = work->v + rows * kept;
    work->up = work->gate + rows * hidden;
}

static void run_pass(const struct decoder *decoder, const struct pass *pass)
{
    struct work work = {.decoder = decoder, .pass = pass};
    place_work(&work);
    int width = work.normed.width;
    struct rows all[3] = {work.normed, work.attended, work.gated};
    for (int r = 0; r < pass->rows; r++)
        read_row(&decoder->embedding, pass->tokens[r], work.x + (size_t)r * width);
    for (size_t i = 0; decoder->embedding_scale != 1.0f && i < (size_t)pass->rows * width; i++)
        work.x[i] *= decoder->embedding_scale;
    for (int layer = 0; layer < decoder->count; layer++) {
        const struct block *block = work.block = &decoder->blocks[layer];
        const struct matrix *inputs[] = {&block->q, &block->k, &block->v, &block->gate, &block->up};
        const struct matrix *others[] = {&block->o, &block->down};
        work.layer = layer;
        work.normed = all[0], work.attended = all[1], work.gated = all[2];
        choose_kinds(&work.normed, decoder->rounds, inputs, 5);
        choose_kinds(&work.attended, decoder->rounds, others, 1);
        choose_kinds(&work.gated, decoder->rounds, others + 1, 1);
        run_block(&work);
        keep_taps(&work, layer);
    }
    if (pass->logits == NULL)
        return;
    const struct matrix *head = &decoder->head;
    work.normed = all[0];
    choose_kinds(&work.normed, decoder->rounds, &head, 1);
    work.norm = &decoder->norm;
    each_row(&work, norm_row);
    product(head, &work.normed, pass->logits);
    if (decoder->logit_cap > 0.0f)
        each_row(&work, cap_logits);
}

static void multiply(const struct matrix *m, int rows, const float *x, int rounds, float *y)
{
    struct rows inputs;
    place_rows(&inputs, rows, m, scratch(PASS, row_bytes(m, rows)));
    choose_kinds(&inputs, rounds, &m, 1);
    for (int r = 0; r < rows; r++)
        put_row(&inputs, r, x + (size_t)r * m->inputs);
    product(m, &inputs, y);
}
