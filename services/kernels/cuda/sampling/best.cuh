// The best columns of one row of logits, found by one block; see best.py.

// Puts a rank among these, which are in falling order, if the least of them is smaller.
template <int HELD>
__device__ inline void insert_rank(unsigned long long (&held)[HELD], unsigned long long rank) {
  if (rank <= held[HELD - 1]) return;
  held[HELD - 1] = rank;
#pragma unroll
  for (int i = HELD - 1; i > 0; i--) {
    const unsigned long long upper = held[i - 1], lower = held[i];
    held[i - 1] = upper > lower ? upper : lower;
    held[i] = upper > lower ? lower : upper;
  }
}

__device__ inline unsigned long long highest_of(unsigned long long rank) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    const unsigned long long other = __shfl_xor_sync(0xffffffffu, rank, lane);
    rank = other > rank ? other : rank;
  }
  return rank;
}

// Writes the columns [WIDTH], their values [WIDTH] and the logarithm of the sum of all
// exponentials. WIDTH is at most `head`.
template <int WIDTH, int WARPS, typename Values>
__device__ void find_best(const Values& values, int head, float* out) {
  // The fewer threads, the more columns has each.
  constexpr int HELD = WIDTH < 4 ? WIDTH : 4, STRIDE = 32 * WARPS, FETCHED = WARPS > 8 ? 8 : 32;
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  __shared__ unsigned long long found[2][WARPS];
  __shared__ float maxima[WARPS], sums[WARPS];

  unsigned long long held[HELD] = {};
  float highest = -1e30f, sum = 0.0f;
  visit_columns<STRIDE, FETCHED>(values, head, [&](float value, int column) {
    const float top = fmaxf(highest, value);
    sum = sum * expf(highest - top) + expf(value - top);
    highest = top;
    insert_rank(held, rank_of(value, column));
  });
  float top = highest;
#pragma unroll
  for (int other = 16; other > 0; other /= 2)
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, other));
  const float total = summed(sum * expf(highest - top));
  if (lane == 0) {
    maxima[warp] = top;
    sums[warp] = total;
  }

  int left = HELD;
  for (int place = 0; place < WIDTH; place++) {
    const unsigned long long own = highest_of(held[0]);
    if (lane == 0) found[place % 2][warp] = own;
    __syncthreads();
    const unsigned long long best = highest_of(found[place % 2][lane % WARPS]);
    if (held[0] == best) {
      const int column = column_of(best);
      out[place] = float(column);
      out[WIDTH + place] = values(column);
#pragma unroll
      for (int i = 1; i < HELD; i++) held[i - 1] = held[i];
      held[HELD - 1] = 0;
      // What it held may be used up: what comes after it is looked for again.
      if (--left == 0 && place + 1 < WIDTH) {
        left = HELD;
        visit_columns<STRIDE>(values, head, [&](float value, int at) {
          const unsigned long long rank = rank_of(value, at);
          if (rank < best) insert_rank(held, rank);
        });
      }
    }
  }
  if (thread == 0) {
    float peak = maxima[0], all = 0.0f;
    for (int w = 1; w < WARPS; w++) peak = fmaxf(peak, maxima[w]);
    for (int w = 0; w < WARPS; w++) all += sums[w] * expf(maxima[w] - peak);
    out[2 * WIDTH] = peak + logf(all);
  }
}
