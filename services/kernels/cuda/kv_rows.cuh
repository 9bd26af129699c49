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

// One number of a head in the rows of these slots goes to the slots from `to` on, row by row: the
// slots rise, none of them lies before its new one, and they may overlap.
template <typename T, int D>
__device__ inline void move_number(long at, T* all, long slots, const int* from, int count,
                                   int to) {
  T* head = all + at / D * slots * D + at % D;
  for (int row = 0; row < count; ++row) head[long(to + row) * D] = head[long(from[row]) * D];
}
