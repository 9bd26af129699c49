/* How small functions and loops over registers are compiled. */
#ifndef SSD_INLINE_H
#define SSD_INLINE_H

#define INLINE static inline __attribute__((always_inline))

/* A loop over registers: rolled up, it would keep them in memory. */
#define UNROLLED _Pragma("GCC unroll 16")

/* Memory that is read behind this is not read before it, into registers that others need. */
#define READ_LATER __asm__ volatile("" ::: "memory")

#endif
