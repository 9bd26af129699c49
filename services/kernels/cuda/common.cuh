// What several kernels need.

__device__ inline float summed(float value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  return value;
}

// Calls visit(value, column) for this thread's columns of a row, in rising order, of which every
// `STRIDE`th is its own. Several are fetched at once: one after the other, each would be waited for.
template <int STRIDE, int FETCHED = 8, typename Values, typename Visit>
__device__ inline void visit_columns(const Values& values, int head, Visit visit) {
  for (int first = threadIdx.x; first < head; first += FETCHED * STRIDE) {
    float found[FETCHED];
#pragma unroll
    for (int i = 0; i < FETCHED; i++) {
      const int column = first + i * STRIDE;
      found[i] = values(column < head ? column : head - 1);
    }
#pragma unroll
    for (int i = 0; i < FETCHED; i++) {
      const int column = first + i * STRIDE;
      if (column < head) visit(found[i], column);
    }
  }
}

// A row of numbers that are `step` apart.
template <typename T>
struct Row {
  const T* row;
  long step;
  __device__ float operator()(int column) const { return float(row[column * step]); }
};

// The sum and the maximum of what the threads of a block have; all of them get it.
template <int WARPS>
__device__ inline float sum_block(float value) {
  __shared__ float sums[WARPS];
  value = summed(value);
  __syncthreads();  // what was there may still be read
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = value;
  __syncthreads();
  float all = 0.0f;
  for (int warp = 0; warp < WARPS; warp++) all += sums[warp];
  return all;
}

template <int WARPS>
__device__ inline float max_block(float value) {
  __shared__ float maxima[WARPS];
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, lane));
  __syncthreads();
  if (threadIdx.x % 32 == 0) maxima[threadIdx.x / 32] = value;
  __syncthreads();
  float all = maxima[0];
  for (int warp = 1; warp < WARPS; warp++) all = fmaxf(all, maxima[warp]);
  return all;
}

// Larger for larger values, and of the same ones for the smaller column.
__device__ inline unsigned long long rank_of(float value, int column) {
  unsigned bits = __float_as_uint(value);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (unsigned long long)(bits) << 32 | (0xffffffffu - unsigned(column));
}

__device__ inline int column_of(unsigned long long rank) {
  return int(0xffffffffu - unsigned(rank));
}
