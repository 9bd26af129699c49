/* The instruction sets of this processor, and calls of their kernels. */
#include <stddef.h>
#include <string.h>

#include "decoder.h"

extern const struct kernels kernels_portable;
#if defined(__x86_64__)
extern const struct kernels kernels_avx2, kernels_avxvnni, kernels_avx512;

static int has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c");
}

static int has_avxvnni(void) { return has_avx2() && __builtin_cpu_supports("avxvnni"); }

static int has_avx512(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

extern const struct kernels kernels_neon;

static int has_dot_products(void) { return (getauxval(AT_HWCAP) >> 20 & 1) != 0; }
#endif

static int always(void) { return 1; }

/* The fastest first. */
static const struct {
    const struct kernels *kernels;
    int (*has)(void);
} all[] = {
#if defined(__x86_64__)
    {&kernels_avx512, has_avx512}, {&kernels_avxvnni, has_avxvnni}, {&kernels_avx2, has_avx2},
#elif defined(__aarch64__)
    {&kernels_neon, has_dot_products},
#endif
    {&kernels_portable, always},
};

/* Those of this name, or the fastest; NULL if the processor has no such instructions. */
const struct kernels *cpu_kernels_of(const char *name)
{
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (all[i].has() && (name == NULL || strcmp(name, all[i].kernels->name) == 0))
            return all[i].kernels;
    return NULL;
}

const char *cpu_name_of(const struct kernels *kernels) { return kernels->name; }

void cpu_run_pass(const struct kernels *kernels, const struct decoder *decoder, const struct pass *pass)
{
    kernels->run_pass(decoder, pass);
}

void cpu_multiply(const struct kernels *kernels, const struct matrix *m, int rows, const float *x,
                  int rounds, float *y)
{
    kernels->multiply(m, rows, x, rounds, y);
}

void cpu_read_rows(const struct kernels *kernels, const struct matrix *m, int count,
                   const int *rows, float *to)
{
    for (int i = 0; i < count; i++)
        kernels->read_row(m, rows[i], to + (size_t)i * m->inputs);
}

void cpu_attend(const struct kernels *kernels, const struct decoder *shape, const struct sequence *own,
                const float *q, float *out)
{
    kernels->attend(shape, own, q, out);
}

void cpu_keep_halves(const struct kernels *kernels, int count, const float *from, uint16_t *to)
{
    kernels->keep_halves(count, from, to);
}

/* In each of `arrays` [heads, any slots], `head` bytes from one head to the next: the slots listed,
 * in rising order, to those from `to` on, which are not behind them. */
void cpu_move_slots(int arrays, uint8_t *const *memory, int heads, long head, int slot, int count,
                    const int *slots, int to)
{
    for (int a = 0; a < arrays; a++)
        for (int h = 0; h < heads; h++)
            for (int i = 0; i < count; i++)
                memmove(memory[a] + h * head + (long)(to + i) * slot,
                        memory[a] + h * head + (long)slots[i] * slot, slot);
}
