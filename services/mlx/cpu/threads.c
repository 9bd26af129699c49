/* See threads.h. A product takes a fifth of a millisecond, so helpers spin for a moment before
 * they sleep, and nobody waits for one that did not wake: the others take its parts. */
#define _GNU_SOURCE
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    MOST_HELPERS = 15,
    SPINS = 2000,
    CLOSED = 1 << 20
};

static struct {
    part *compute;
    const void *context;
    int parts;
} task;
static atomic_int next_part;
static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER; /* held by whom the helpers work for */

/* Helpers at work on the task, less CLOSED while there is none: a helper that wakes too late
 * sees a negative number and stays away. */
static atomic_int gate = -CLOSED;
static atomic_uint tasks; /* counts them; what sleeping helpers wait on */
static atomic_int sleepers;
static atomic_int helpers; /* how many may help now */
static int started;        /* how many threads there are */

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_parts(void)
{
    for (int number; (number = atomic_fetch_add(&next_part, 1)) < task.parts;)
        task.compute(task.context, number);
}

static void await_task(unsigned seen)
{
    for (int spins = SPINS; spins > 0; spins--) {
        if (atomic_load(&tasks) != seen)
            return;
        pause_briefly();
    }
    while (atomic_load(&tasks) == seen) {
        atomic_fetch_add(&sleepers, 1);
        syscall(SYS_futex, &tasks, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        atomic_fetch_sub(&sleepers, 1);
    }
}

static void *help(void *number)
{
    for (unsigned seen = 0;; seen = atomic_load(&tasks)) {
        await_task(seen);
        if ((int)(size_t)number >= atomic_load(&helpers))
            continue;
        if (atomic_fetch_add(&gate, 1) >= 0)
            take_parts();
        atomic_fetch_sub(&gate, 1);
    }
    return NULL;
}

static int start_helper(int core)
{
    pthread_t thread;
    pthread_attr_t attributes;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    int failed = pthread_create(&thread, &attributes, help, (void *)(size_t)started);
    pthread_attr_destroy(&attributes);
    return !failed;
}

int set_helpers(int count, const int *cores)
{
    if (count > MOST_HELPERS)
        count = MOST_HELPERS;
    while (started < count && start_helper(cores[started]))
        started++;
    atomic_store(&helpers, count < started ? count : started);
    return atomic_load(&helpers);
}

void share_parts(part *compute, const void *context, int count)
{
    if (count < 2 || atomic_load(&helpers) == 0 || pthread_mutex_trylock(&asking) != 0) {
        for (int number = 0; number < count; number++)
            compute(context, number);
        return;
    }
    task.compute = compute;
    task.context = context;
    task.parts = count;
    atomic_store(&next_part, 0);
    atomic_fetch_add(&gate, CLOSED);
    atomic_fetch_add(&tasks, 1);
    if (atomic_load(&sleepers) > 0)
        syscall(SYS_futex, &tasks, FUTEX_WAKE_PRIVATE, MOST_HELPERS, NULL, NULL, 0);
    take_parts();
    atomic_fetch_sub(&gate, CLOSED);
    while (atomic_load(&gate) != -CLOSED)
        pause_briefly();
    pthread_mutex_unlock(&asking);
}
