/* What is done to a row of floats between products. Elements are independent of each other, and
 * sums have sixteen lanes whatever the registers hold, so the bits are those of portable C. The
 * compiler must not contract a product and a sum into one rounding (-ffp-contract=off). */
#include <math.h>

enum { SUM_LANES = 16 };

/* Sixteen sums to one. */
INLINE float fold_lanes(float *lanes)
{
    for (int half = SUM_LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] += lanes[i + half];
    return lanes[0];
}

/* e to the power of x, after Cephes; 0 below the smallest normal number's. */
INLINE float exponential(float x)
{
    float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float shifted = bounded * 1.44269504088896341f + 12582912.0f; /* rounds to an integer */
    float whole = shifted - 12582912.0f, power;
    float r = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    int32_t bits = ((int32_t)whole + 127) << 23;
    memcpy(&power, &bits, 4);
    return x < -87.0f ? 0.0f : p * power;
}

/* from / rms(from) * weight; `to` may be `from`. */
static void normalise(const struct norm *norm, int count, const float *from, float *to)
{
    float lanes[SUM_LANES] = {0};
    int i = 0;
    for (; i + SUM_LANES <= count; i += SUM_LANES)
        for (int l = 0; l < SUM_LANES; l++)
            lanes[l] += from[i + l] * from[i + l];
    for (int l = 0; i + l < count; l++)
        lanes[l] += from[i + l] * from[i + l];
    float factor = 1.0f / sqrtf(fold_lanes(lanes) / (float)count + norm->eps);
    for (i = 0; i < count; i++)
        to[i] = from[i] * factor * norm->weight[i];
}

static void add_row(int count, const float *from, float *to)
{
    for (int i = 0; i < count; i++)
        to[i] += from[i];
}

/* act(x) * up, in place of x; GELU by tanh is x * sigmoid(2 * sqrt(2 / pi) * (x + .044715 x^3)). */
static void gate_row(int gelu, int count, float *x, const float *up)
{
    if (gelu)
        for (int i = 0; i < count; i++) {
            float inner = x[i] * (1.5957691216f + 0.0713548163f * (x[i] * x[i]));
            x[i] = x[i] / (1.0f + exponential(-inner)) * up[i];
        }
    else
        for (int i = 0; i < count; i++)
            x[i] = x[i] / (1.0f + exponential(-x[i])) * up[i];
}

/* cap * tanh(x / cap), in place of x; NaN of infinity, which must not be hidden. */
static void cap_row(float cap, int count, float *x)
{
    float steep = 2.0f / cap;
    for (int i = 0; i < count; i++)
        x[i] = cap - 2.0f * cap / (exponential(x[i] * steep) + 1.0f) + (x[i] - x[i]);
}

/* One head, by the angles of its position. */
static void rotate(int half, const float *cos, const float *sin, float *x)
{
    float *y = x + half;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = y[i];
        x[i] = a * cos[i] - b * sin[i];
        y[i] = b * cos[i] + a * sin[i];
    }
}

/* 32 floats to bytes of at most 127 steps; NaN and infinity make the step NaN. */
static void round_group(const float *x, int8_t *bytes, float *scale, float *sum)
{
    int32_t largest = 0, total = 0, codes[ROUNDED];
    for (int i = 0; i < ROUNDED; i++) {
        int32_t bits;
        memcpy(&bits, x + i, 4);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    float most;
    memcpy(&most, &largest, 4);
    float inverse = most < 1e-30f ? 0.0f : 127.0f / most;
    if (largest >= 0x7f800000) {
        memset(bytes, 0, ROUNDED);
        *scale = *sum = NAN;
        return;
    }
    for (int i = 0; i < ROUNDED; i++) {
        float shifted = x[i] * inverse + 12582912.0f;
        int32_t bits;
        memcpy(&bits, &shifted, 4);
        codes[i] = bits - 0x4b400000;
        total += codes[i];
    }
    for (int i = 0; i < ROUNDED; i++)
        bytes[i] = (int8_t)codes[i];
    *scale = inverse == 0.0f ? 0.0f : most / 127.0f;
    *sum = *scale * (float)total;
}

/* The tile of a row: its first row, and how many it has. */
INLINE int tile_of(int row, int count, int rounded, int *first)
{
    int tile = tile_rows(count, rounded);
    for (*first = 0; *first + tile <= row; tile = tile_rows(count - *first, rounded))
        *first += tile;
    return tile;
}

/* Row `row` of the inputs of products. */
static void put_row(struct rows *to, int row, const float *x)
{
    int first, tile, width = to->width, groups = width / ROUNDED;
    if (to->bytes != NULL) {
        tile = tile_of(row, to->count, 1, &first);
        int8_t *bytes = to->bytes + (size_t)first * width + (row - first) * ROUNDED;
        float *scales = to->scales + (size_t)first * groups + (row - first);
        float *sums = to->sums + (size_t)first * groups + (row - first);
        for (int g = 0; g < groups; g++)
            round_group(x + g * ROUNDED, bytes + (size_t)g * tile * ROUNDED, scales + g * tile,
                        sums + g * tile);
    }
    if (to->floats != NULL) {
        tile = tile_of(row, to->count, 0, &first);
        float *floats = to->floats + (size_t)first * width + (row - first);
        for (int i = 0; i < width; i++)
            floats[(size_t)i * tile] = x[i];
    }
}
