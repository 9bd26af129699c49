// A row's keys or values in a buffer of slots; see kv_rows.py.

// Number `at` of [heads, rows, D], which lie by these strides, goes to [heads, slots, D].
template <typename T, int D>
__device__ inline void write_number(long at, long rows, const T* from, long head_stride,
                                    long row_stride, long stride, T* to, long slots,
                                    const int* slot_of_row) {
  const long i = at % D, row = at / D % rows, head = at / D / rows;
  to[(head * slots + slot_of_row[row]) * D + i] =
      from[head * head_stride + row * row_stride + i * stride];
}
