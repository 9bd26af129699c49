/* See scratch.h. */
#include "scratch.h"

#include <stdlib.h>

enum { ALIGNED = 64 };

void *scratch(enum purpose purpose, size_t bytes)
{
    static _Thread_local void *memory[PURPOSES];
    static _Thread_local size_t room[PURPOSES];
    if (bytes > room[purpose]) {
        free(memory[purpose]);
        room[purpose] = (bytes + ALIGNED - 1) / ALIGNED * ALIGNED;
        memory[purpose] = aligned_alloc(ALIGNED, room[purpose]);
        if (memory[purpose] == NULL)
            abort();
    }
    return memory[purpose];
}
