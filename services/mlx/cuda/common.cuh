// What several kernels need.

__device__ inline float summed(float value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  return value;
}
