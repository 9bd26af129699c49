// One query of one head against all its keys; see attention.py.

#define NO_KEY __int_as_float(0xff800000)  // minus infinity

template <typename T>
struct alignas(2 * sizeof(T)) Pair {
  T first;
  T second;
};

// `mask` says which keys are seen; each step is from one element to the next.
template <typename T, int D, int WARPS>
__device__ void attend_one(
    const T* q, long q_step, const T* k, long k_step, const T* v, long v_step,
    const bool* mask, long mask_step, int keys, float scale, T* out) {
  constexpr int PAIRS = D / 64;
  constexpr int AT_ONCE = 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __shared__ float maxima[WARPS], sums[WARPS], parts[WARPS][D];

  float query[2 * PAIRS], held[2 * PAIRS];
#pragma unroll
  for (int i = 0; i < 2 * PAIRS; i++) {
    const int at = (i / 2) * 64 + 2 * lane + i % 2;
    query[i] = float(q[at * q_step]) * scale;
    held[i] = 0.0f;
  }

  // Finite, so that a warp that has seen no key yet is no special case.
  float highest = -1e30f, sum = 0.0f;
  for (int start = warp * AT_ONCE; start < keys; start += WARPS * AT_ONCE) {
    float score[AT_ONCE];
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      const int at = start + j;
      const bool seen = at < keys && mask[at * mask_step];
      float product = 0.0f;
      if (seen) {
        const auto* row = reinterpret_cast<const Pair<T>*>(k + at * k_step) + lane;
#pragma unroll
        for (int i = 0; i < PAIRS; i++) {
          const Pair<T> pair = row[i * 32];
          product += query[2 * i] * float(pair.first) + query[2 * i + 1] * float(pair.second);
        }
      }
      score[j] = seen ? product : NO_KEY;
    }
    float top = highest;
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      score[j] = summed(score[j]);
      top = fmaxf(top, score[j]);
    }
    const float shrink = __expf(highest - top);
    highest = top;
    sum *= shrink;
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; i++) held[i] *= shrink;
#pragma unroll
    for (int j = 0; j < AT_ONCE; j++) {
      if (score[j] == NO_KEY) continue;
      const float weight = __expf(score[j] - top);
      sum += weight;
      const auto* row = reinterpret_cast<const Pair<T>*>(v + (start + j) * v_step) + lane;
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        const Pair<T> pair = row[i * 32];
        held[2 * i] += weight * float(pair.first);
        held[2 * i + 1] += weight * float(pair.second);
      }
    }
  }

#pragma unroll
  for (int i = 0; i < 2 * PAIRS; i++) parts[warp][(i / 2) * 64 + 2 * lane + i % 2] = held[i];
  if (lane == 0) {
    maxima[warp] = highest;
    sums[warp] = sum;
  }
  __syncthreads();

  for (int at = threadIdx.x; at < D; at += WARPS * 32) {
    float top = maxima[0], total = 0.0f, value = 0.0f;
    for (int w = 1; w < WARPS; w++) top = fmaxf(top, maxima[w]);
    for (int w = 0; w < WARPS; w++) {
      const float weight = __expf(maxima[w] - top);
      total += weight * sums[w];
      value += weight * parts[w][at];
    }
    // Not `total > 0`: what is no number must stay one that is seen.
    out[at] = T(total == 0.0f ? 0.0f : value / total);
  }
}
