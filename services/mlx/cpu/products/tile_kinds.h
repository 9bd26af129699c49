/* Every kind of weight for one set of instructions: see `tile_template.h`, which it includes. */

#define GLUE_(x, lanes) x##_##lanes
#define GLUE(x, lanes) GLUE_(x, lanes)
#define V(x) GLUE(x, LANES)

typedef float V(floats) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int V(ints) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

/* LANES bytes, signed bytes or halves as ints. The compiler's own conversions are slow on x86. */
#if !defined(__x86_64__)
#define WIDEN(name, type, with_8, with_16)                                                      \
    typedef type V(name##_narrow)                                                               \
        __attribute__((vector_size(sizeof(type) * LANES), aligned(1), may_alias));              \
    static inline V(ints) V(name)(const char *from)                                             \
    {                                                                                           \
        return __builtin_convertvector(*(const V(name##_narrow) *)from, V(ints));               \
    }
#else
#if LANES == 16
#define CHOOSE(with_8, with_16) (with_16)
#else
#define CHOOSE(with_8, with_16) (with_8)
#endif
#define WIDEN(name, type, with_8, with_16)                                                      \
    SIMD static inline V(ints) V(name)(const char *from)                                        \
    {                                                                                           \
        return (V(ints))CHOOSE(with_8, with_16);                                                \
    }
#endif
WIDEN(widen_bytes, unsigned char,
      _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from)),
      _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)))
WIDEN(widen_signed, signed char,
      _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)),
      _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)))
WIDEN(widen_halves, unsigned short,
      _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)),
      _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)))

SIMD static inline V(floats) V(all)(float value)
{
    return value - (V(floats)){0};
}

#define NAME(x) GLUE(x##_float32, LANES)
#define STEP LANES
#define FETCHED V(floats)
#define FETCH(at, s, i)                                                                         \
    (__builtin_prefetch((at) + 4 * (i) + AHEAD), *(const V(floats) *)((at) + 4 * (i)))
#define PART(f, h) (f)
#define ELEMENT(at, i) (((const float *)(const void *)(at))[i])
#define FACTOR(s) 1.0f
#include "tile_template.h"

#define NAME(x) GLUE(x##_rounded_int8, LANES)
#define STEP LANES
#define FETCHED V(floats)
#define FETCH(at, s, i)                                                                         \
    (__builtin_prefetch((at) + (i) + AHEAD),                                                    \
     __builtin_convertvector(V(widen_signed)((at) + (i)), V(floats)))
#define PART(f, h) (f)
#define ELEMENT(at, i) (((const signed char *)(at))[i])
#define FACTOR(s) (*(s))
#include "tile_template.h"

struct V(block) {
#if LANES == 16
    V(floats) table;
    V(ints) pairs;
#else
    const char *pairs;
    V(floats) step, least;
#endif
};

SIMD static inline struct V(block) V(fetch_block)(const char *pairs, const float *steps)
{
#if LANES == 16
    /* All that four bits can mean is a table in one register. */
    const V(floats) numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (struct V(block)){FMA(numbers, V(all)(steps[0]), V(all)(steps[1])),
                             V(widen_bytes)(pairs)};
#else
    return (struct V(block)){pairs, V(all)(steps[0]), V(all)(steps[1])};
#endif
}

SIMD static inline V(floats) V(part_of_block)(struct V(block) block, int h)
{
#if LANES == 16
    return (V(floats))_mm512_permutexvar_ps((__m512i)(block.pairs >> 4 * h), (__m512)block.table);
#else
    V(ints) pairs = V(widen_bytes)(block.pairs + h % 2 * LANES);
    V(ints) numbers = pairs >> h / 2 * 4 & 15;
    return FMA(__builtin_convertvector(numbers, V(floats)), block.step, block.least);
#endif
}

#define IN_TILES
#define NAME(x) GLUE(x##_four_bits, LANES)
#define STEP BLOCK_SIZE
#define FETCHED struct V(block)
#define FETCH(at, s, i)                                                                         \
    V(fetch_block)((at) + (i) / 2 * TILED_ROWS, (s) + (i) / BLOCK_SIZE * 2 * TILED_ROWS)
#define PART(f, h) V(part_of_block)(f, h)
#define ELEMENT(at, i) NO_REST
#define FACTOR(s) 1.0f
#include "tile_template.h"

struct V(byte_block) {
    const char *numbers;
    V(floats) step, least;
};

SIMD static inline struct V(byte_block) V(fetch_bytes)(const char *numbers, const float *steps)
{
    return (struct V(byte_block)){numbers, V(all)(steps[0]), V(all)(steps[1])};
}

#define NAME(x) GLUE(x##_eight_bits, LANES)
#define STEP BLOCK_SIZE
#define FETCHED struct V(byte_block)
#define FETCH(at, s, i)                                                                         \
    V(fetch_bytes)((at) + (i) * TILED_ROWS, (s) + (i) / BLOCK_SIZE * 2 * TILED_ROWS)
#define PART(f, h)                                                                              \
    FMA(__builtin_convertvector(V(widen_bytes)((f).numbers + (h) * LANES), V(floats)), (f).step, \
        (f).least)
#define ELEMENT(at, i) NO_REST
#define FACTOR(s) 1.0f
#include "tile_template.h"

#undef IN_TILES

#define NAME(x) GLUE(x##_bfloat16, LANES)
#define STEP LANES
#define FETCHED V(floats)
#define FETCH(at, s, i)                                                                         \
    (__builtin_prefetch((at) + 2 * (i) + AHEAD),                                                \
     (V(floats))(V(widen_halves)((at) + 2 * (i)) << 16))
#define PART(f, h) (f)
#define ELEMENT(at, i) NO_REST
#define FACTOR(s) 1.0f
#include "tile_template.h"

/* Their sizes have the bits of a small float's; a factor makes them what they were. */
SIMD static inline V(floats) V(halves_as_floats)(const char *from)
{
    V(ints) halves = V(widen_halves)(from);
    V(floats) sizes = (V(floats))((halves & 0x7fff) << 13) * FROM_FLOAT16;
    return (V(floats))((V(ints))sizes | (halves & 0x8000) << 16);
}

#define NAME(x) GLUE(x##_float16, LANES)
#define STEP LANES
#define FETCHED V(floats)
#define FETCH(at, s, i)                                                                         \
    (__builtin_prefetch((at) + 2 * (i) + AHEAD), V(halves_as_floats)((at) + 2 * (i)))
#define PART(f, h) (f)
#define ELEMENT(at, i) NO_REST
#define FACTOR(s) 1.0f
#include "tile_template.h"

static const struct tiles *const V(kinds)[KINDS] = {
    &V(tiles_float32),  &V(tiles_rounded_int8), &V(tiles_four_bits),
    &V(tiles_eight_bits), &V(tiles_bfloat16),     &V(tiles_float16),
};

#undef GLUE_
#undef GLUE
#undef V
#undef WIDEN
#undef CHOOSE
#undef LANES
#undef SIMD
#undef FMA
#undef HALVES
