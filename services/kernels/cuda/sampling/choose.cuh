// The target's choice of a token after a row of logits, by one block; see choose.py.

constexpr int UNDECIDED = -1, BROKEN = -2;
constexpr float CLOSE = 1e-5f;   // of two scores, relative to their size
constexpr float BORDER = 1e-4f;  // of probabilities, and relative to one of them

// The best so far, and the next one's score.
struct Contest {
  float best, second;
  int token;

  __device__ void enter(float score, int id) {
    if (score > best) {
      second = best;
      best = score;
      token = id;
    } else {
      second = fmaxf(second, score);
    }
  }

  // Of equal scores the first token's counts; the other one is as good as it.
  __device__ void join(const Contest& other) {
    const bool wins = other.best > best || (other.best == best && unsigned(other.token) < unsigned(token));
    second = fmaxf(fmaxf(second, other.second), wins ? best : other.best);
    if (wins) {
      best = other.best;
      token = other.token;
    }
  }

  __device__ float margin() const { return CLOSE * (1.0f + fabsf(best)); }

  __device__ int decide() const { return second < best - margin() ? token : UNDECIDED; }
};

__device__ inline Contest no_contest() {
  return {-__int_as_float(0x7f800000), -__int_as_float(0x7f800000), -1};
}

// What all threads of the block have seen; each gets it.
template <int WARPS>
__device__ inline Contest join_block(Contest own) {
  __shared__ Contest seen[WARPS];
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2)
    own.join({__shfl_xor_sync(0xffffffffu, own.best, lane),
              __shfl_xor_sync(0xffffffffu, own.second, lane),
              __shfl_xor_sync(0xffffffffu, own.token, lane)});
  __syncthreads();
  if (threadIdx.x % 32 == 0) seen[threadIdx.x / 32] = own;
  __syncthreads();
  Contest all = seen[0];
  for (int warp = 1; warp < WARPS; warp++) all.join(seen[warp]);
  return all;
}

// Of all tokens.
template <int WARPS, typename Values>
__device__ int choose_of_all(const Values& values, int count, const Rule& rule) {
  Contest own = no_contest();
  bool broken = false;
  visit_columns<32 * WARPS>(values, count, [&](float value, int column) {
    broken |= value != value;
    if (rule.temperature == 0.0f) return own.enter(value, column);
    const float scaled = value / rule.temperature;
    const unsigned bits = rule.bits_of(unsigned(column));
    if (scaled + most_gumbel_of(bits) < own.best - 2.0f * own.margin()) return;
    own.enter(scaled + gumbel_of(bits), column);
  });
  const bool any = max_block<WARPS>(broken ? 1.0f : 0.0f) > 0.0f;
  const Contest all = join_block<WARPS>(own);
  if (any) return BROKEN;
  return rule.temperature == 0.0f ? all.token : all.decide();
}

// Puts numbers, one for each thread, in falling order.
template <int THREADS>
__device__ inline void sort_block(unsigned long long* ranks) {
  const int own = threadIdx.x;
  for (int run = 2; run <= THREADS; run *= 2)
    for (int apart = run / 2; apart > 0; apart /= 2) {
      __syncthreads();
      const int other = own ^ apart;
      const unsigned long long a = ranks[own], b = ranks[other];
      __syncthreads();
      const bool larger = ((own & run) == 0) == (own < other);
      ranks[own] = larger == (a > b) ? a : b;
    }
  __syncthreads();
}

// The sum of a thread's value and those of the threads before it.
template <int THREADS>
__device__ inline float sum_until(float value) {
  __shared__ float sums[THREADS];
  const int own = threadIdx.x;
  sums[own] = value;
  for (int apart = 1; apart < THREADS; apart *= 2) {
    __syncthreads();
    const float before = own >= apart ? sums[own - apart] : 0.0f;
    __syncthreads();
    sums[own] += before;
  }
  return sums[own];
}

// The best columns of a row in falling order, so many that the filters' border is among them, in
// `ranks`; their number, or more than there are threads.
template <int WARPS, typename Values>
__device__ int collect_best(const Values& values, int count, const Rule& rule, float highest,
                            float total, unsigned long long* ranks) {
  constexpr int THREADS = 32 * WARPS;
  __shared__ int found;
  for (float distance = 3.0f;; distance += 1.0f) {
    if (threadIdx.x == 0) found = 0;
    ranks[threadIdx.x] = 0;
    __syncthreads();
    float mass = 0.0f;
    bool out = false;
    visit_columns<THREADS>(values, count, [&](float value, int column) {
      if (value < highest - distance) {
        out |= value > -__int_as_float(0x7f800000);  // a grammar leaves few
        return;
      }
      mass += expf(value - highest);
      const int place = atomicAdd(&found, 1);
      if (place < THREADS) ranks[place] = rank_of(value, column);
    });
    mass = sum_block<WARPS>(mass);
    const bool more = max_block<WARPS>(out ? 1.0f : 0.0f) > 0.0f;
    const int size = found;
    const bool enough = (rule.top_k > 0 && size > rule.top_k) ||
                        (rule.top_p < 1.0f && mass > (rule.top_p + 2.0f * BORDER) * total) ||
                        (rule.min_p > 0.0f && expf(-distance) < rule.min_p * (1.0f - 2.0f * BORDER));
    if (enough || !more || size > THREADS) {
      sort_block<THREADS>(ranks);
      return size;
    }
    __syncthreads();
  }
}

// Of the tokens that the filters keep.
template <int WARPS, typename Values>
__device__ int choose_of_best(const Values& values, int count, const Rule& rule) {
  constexpr int THREADS = 32 * WARPS;
  __shared__ unsigned long long ranks[THREADS];
  float highest = -1e30f, sum = 0.0f;
  bool broken = false;
  visit_columns<THREADS>(values, count, [&](float value, int) {
    broken |= value != value;
    const float top = fmaxf(highest, value);
    sum = sum * expf(highest - top) + expf(value - top);
    highest = top;
  });
  if (max_block<WARPS>(broken ? 1.0f : 0.0f) > 0.0f) return BROKEN;
  const float top = max_block<WARPS>(highest);
  const float total = sum_block<WARPS>(sum * expf(highest - top));
  if (!(total > 0.0f && total < 1e30f)) return UNDECIDED;  // infinite logits

  int size = collect_best<WARPS>(values, count, rule, top, total, ranks);
  if (size > THREADS) return UNDECIDED;
  if (rule.top_k > 0 && size > rule.top_k) size = rule.top_k;
  const int own = threadIdx.x, column = column_of(ranks[own]);
  const bool there = own < size;
  const float value = there ? values(column) : top;
  const float share = there ? expf(value - top) / total : 0.0f, least = rule.min_p / total;
  const float before = sum_until<THREADS>(share) - share;
  const bool kept = there && (own == 0 || ((rule.top_p >= 1.0f || before < rule.top_p + BORDER) &&
                                           share >= least * (1.0f - BORDER)));
  const bool near = kept && own > 0 &&
                    ((rule.top_p < 1.0f && before >= rule.top_p - BORDER) ||
                     (rule.min_p > 0.0f && share < least * (1.0f + BORDER)));
  Contest contest = no_contest();
  if (kept) contest.enter(value / rule.temperature + gumbel_of(rule.bits_of(unsigned(column))), own);
  const int unsure = -int(max_block<WARPS>(near ? -float(own) : -float(THREADS)));
  const int winner = join_block<WARPS>(contest).decide();
  return winner < 0 || winner >= unsure ? UNDECIDED : column_of(ranks[winner]);
}

// Writes the token, or one of the negative numbers above.
template <int WARPS, typename Values>
__device__ void choose_token(const Values& values, int count, const unsigned* words, int* token) {
  const Rule rule(words);
  const bool filtered = rule.temperature > 0.0f && rule.has_filter();
  const int chosen = filtered ? choose_of_best<WARPS>(values, count, rule)
                              : choose_of_all<WARPS>(values, count, rule);
  if (threadIdx.x == 0) *token = chosen;
}
