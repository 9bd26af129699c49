// A few rows times weights that are read once for all of them; see product.py.

template <typename T, int COUNT>
struct alignas(COUNT * sizeof(T)) Run {
  T at[COUNT];
};

// One warp's outputs, from `first` on, of ROWS rows of x [rows, inputs] from `first_row` on.
// The sum of an output does not depend on how many there are of either.
template <typename T, int ROWS, int OUTPUTS, int RUN>
__device__ void multiply_rows(const T* x, const T* w, int rows, int inputs, int outputs,
                              int first_row, int first, T* out) {
  const int lane = threadIdx.x % 32;
  if (first >= outputs) return;
  const T *row[ROWS], *weights[OUTPUTS];
#pragma unroll
  for (int r = 0; r < ROWS; r++) row[r] = x + long(min(first_row + r, rows - 1)) * inputs;
#pragma unroll
  for (int o = 0; o < OUTPUTS; o++) weights[o] = w + long(min(first + o, outputs - 1)) * inputs;

  float sums[OUTPUTS][ROWS] = {};
#pragma unroll 2
  for (int at = lane * RUN; at < inputs; at += 32 * RUN) {
    Run<T, RUN> read[OUTPUTS];
#pragma unroll
    for (int o = 0; o < OUTPUTS; o++) read[o] = *reinterpret_cast<const Run<T, RUN>*>(weights[o] + at);
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const Run<T, RUN> own = *reinterpret_cast<const Run<T, RUN>*>(row[r] + at);
#pragma unroll
      for (int o = 0; o < OUTPUTS; o++)
#pragma unroll
        for (int i = 0; i < RUN; i++) sums[o][r] += float(read[o].at[i]) * float(own.at[i]);
    }
  }

#pragma unroll
  for (int o = 0; o < OUTPUTS; o++)
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      const float total = summed(sums[o][r]);
      if (lane == 0 && first_row + r < rows && first + o < outputs)
        out[long(first_row + r) * outputs + first + o] = T(total);
    }
}
