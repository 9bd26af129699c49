/* Memory for what a computation does not keep. */
#ifndef SSD_SCRATCH_H
#define SSD_SCRATCH_H

#include <stddef.h>

enum purpose { PASS, ATTENTION, ROW, ROUNDED_ROWS, CHOICE, PURPOSES };

/* So many bytes of this thread, until it asks again for the same purpose; at a multiple of 64. */
void *scratch(enum purpose purpose, size_t bytes);

#endif
