/* Attention of the rows of one sequence. */
#ifndef SSD_ATTENTION_H
#define SSD_ATTENTION_H

/* One call; strides are in elements, the last axis of all arrays is contiguous. The slots up to
 * `old` are in k and v, those from there on in fresh_k and fresh_v. */
struct attention {
    const float *q, *k, *v;
    const unsigned char *mask; /* [queries, slots] of 0 and 1, or NULL */
    float *out;                /* [queries, heads, size] */
    const float *fresh_k, *fresh_v;
    long q_head, q_row, k_head, k_row, v_head, v_row, mask_row, fresh_head, fresh_row;
    int heads, kv_heads, queries, slots, old, size;
    int causal; /* query i sees slots 0 to slots - queries + i */
    float scale;
};

void cpu_attention(const struct attention *call);

#endif
