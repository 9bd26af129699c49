/* What is to be known of a row of logits. */
#ifndef SSD_LOGITS_H
#define SSD_LOGITS_H

/* The first of the largest, and how large it is: NaN if any logit is. */
int largest_of_row(int count, const float *row, float *largest);

/* The sum of e to the power of what each is below the largest, which is finite. */
float sum_of_powers(int count, const float *row, float largest);

#endif
