/* See threads.h. A product takes a fifth of a millisecond, so helpers spin for a moment before
 * they sleep, and nobody waits for one that did not wake: the others take its parts.
 *
 * Each thread has neighbouring parts, as long as there are any: of weights that two cores read in
 * turns, some kilobytes each, both together get no more per second than one alone.
 */
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
    CACHE_LINE = 64,
    CLOSED = 1 << 20
};

static struct {
    part *compute;
    const void *context;
    int runs;
} task;

/* Neighbouring parts for one thread, the first for whom the others help. */
static struct run {
    _Alignas(CACHE_LINE) atomic_int next;
    int end;
} runs[1 + MOST_HELPERS];
static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER; /* held by whom the helpers work for */

/* Helpers at work on the task, less CLOSED while there is none: a helper that wakes too late
 * sees a negative number and stays away. */
static atomic_int gate = -CLOSED;

static struct helper {
    atomic_uint calls; /* counts them; what it waits on while it sleeps */
    atomic_int asleep;
} all[MOST_HELPERS];
static atomic_int helpers; /* how many may help now */
static atomic_int always;  /* how many of these whatever `idle` says */
static const int busy;
static _Atomic(const int *) idle = &busy; /* another process may write there at any time */
static int started; /* how many threads there are */

static void pause_briefly(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static int may_help(int number)
{
    if (number >= atomic_load(&helpers))
        return 0;
    return number < atomic_load(&always) ||
           __atomic_load_n(atomic_load(&idle), __ATOMIC_RELAXED) != 0;
}

/* Call those that may help from number `called` on; returns the first one that may not. */
static int call_helpers(int called)
{
    for (; may_help(called); called++) {
        struct helper *helper = &all[called];
        atomic_fetch_add(&helper->calls, 1);
        if (atomic_load(&helper->asleep))
            syscall(SYS_futex, &helper->calls, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    }
    return called;
}

/* A core that is not ours to use is not ours to wait on either: there a helper sleeps at once. */
static unsigned await_call(int number, unsigned seen)
{
    struct helper *self = &all[number];
    for (int spins = SPINS; spins > 0 && may_help(number); spins--) {
        if (atomic_load(&self->calls) != seen)
            return atomic_load(&self->calls);
        pause_briefly();
    }
    while (atomic_load(&self->calls) == seen) {
        atomic_store(&self->asleep, 1);
        syscall(SYS_futex, &self->calls, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
        atomic_store(&self->asleep, 0);
    }
    return atomic_load(&self->calls);
}

static void divide(int parts, int count)
{
    task.runs = count;
    for (int i = 0; i < count; i++) {
        atomic_store(&runs[i].next, i * parts / count);
        runs[i].end = (i + 1) * parts / count;
    }
}

/* A part of the run `own`, or of another one when that is done; -1 if there is none left. */
static int take_part(int own)
{
    for (int i = 0; i < task.runs; i++) {
        struct run *run = &runs[(own + i) % task.runs];
        int taken = atomic_load(&run->next) < run->end ? atomic_fetch_add(&run->next, 1) : run->end;
        if (taken < run->end)
            return taken;
    }
    return -1;
}

static void *help(void *argument)
{
    int number = (int)(size_t)argument;
    for (unsigned seen = 0;;) {
        seen = await_call(number, seen);
        if (atomic_fetch_add(&gate, 1) >= 0)
            for (int taken; may_help(number) && (taken = take_part(1 + number)) >= 0;)
                task.compute(task.context, taken);
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

int set_helpers(int count, const int *cores, int unasked, const int *lent)
{
    if (count > MOST_HELPERS)
        count = MOST_HELPERS;
    while (started < count && start_helper(cores[started]))
        started++;
    if (lent != NULL)
        atomic_store(&idle, lent);
    atomic_store(&always, lent == NULL ? count : unasked);
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
    int helping = 0;
    while (may_help(helping))
        helping++;
    task.compute = compute;
    task.context = context;
    divide(count, 1 + helping);
    atomic_fetch_add(&gate, CLOSED);
    int called = call_helpers(0);
    for (int taken; (taken = take_part(0)) >= 0;) {
        compute(context, taken);
        called = call_helpers(called); /* a core may be lent at any moment */
    }
    atomic_fetch_sub(&gate, CLOSED);
    for (int spins = SPINS; atomic_load(&gate) != -CLOSED; spins--) {
        pause_briefly();
        if (spins <= 0)
            sched_yield(); /* whoever has the core of a helper may need this one */
    }
    pthread_mutex_unlock(&asking);
}
