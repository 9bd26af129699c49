/* Helper threads that share the parts of a computation with the thread that asks for it. */
#ifndef SSD_THREADS_H
#define SSD_THREADS_H

/* Computes the part of this number; parts may be computed in any order, at the same time. */
typedef void part(int number);

/* Compute parts 0 to count - 1 and return when all are done. Not for two threads at once. */
void share_parts(part *compute, int count);

/* Let `count` threads help from now on, thread i on core cores[i]; returns how many will. */
int set_helpers(int count, const int *cores);

#endif
