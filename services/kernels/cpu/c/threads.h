/* Helper threads that share the parts of a computation with the thread that asks for it. */
#ifndef SSD_THREADS_H
#define SSD_THREADS_H

/* Computes the part of this number; parts may be computed in any order, at the same time. */
typedef void part(const void *context, int number);

/* Compute parts 0 to count - 1 and return when all are done. While the helpers work for one
 * thread, another one that calls this computes all of its parts by itself. */
void share_parts(part *compute, const void *context, int count);

/* Let `count` threads help from now on, thread i on core cores[i]; returns how many will.
 *
 * Unless `lent` is NULL, threads from number `unasked` on help only while *lent is not 0, which
 * may change at any time; it is kept. Meanwhile they leave their cores alone. */
int set_helpers(int count, const int *cores, int unasked, const int *lent);

#endif
