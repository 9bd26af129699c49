// Products of few rows whose weights are fetched while the rows are not computed yet.

constexpr int MOST_ROWS = 8;  // of a product

// The best of some columns by `rank_of` their scores, and the sum of all exponentials, divided by the
// largest.
struct Best {
  unsigned long long rank = 0;
  float top = -1e30f, sum = 0.0f;

  __device__ void add(float score, int column) {
    const unsigned long long own = rank_of(score, column);
    rank = own > rank ? own : rank;
    add_sum(score, 1.0f);
  }

  __device__ void add_sum(float other_top, float other_sum) {
    const float higher = fmaxf(top, other_top);
    sum = sum * expf(top - higher) + other_sum * expf(other_top - higher);
    top = higher;
  }

  __device__ void add(const Best& other) {
    rank = other.rank > rank ? other.rank : rank;
    add_sum(other.top, other.sum);
  }

  // The probability of the best column.
  __device__ float share() const {
    const unsigned bits = unsigned(rank >> 32);
    const float score = __uint_as_float(bits & 0x80000000u ? bits ^ 0x80000000u : ~bits);
    return expf(score - top) / sum;
  }
};

// The best of what the threads of a block have; the first one gets it.
template <int WARPS>
__device__ inline Best find_best_of_block(Best own) {
  __shared__ Best found[WARPS];
  const auto gather = [](Best best) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2)
      best.add(Best{__shfl_xor_sync(0xffffffffu, best.rank, lane),
                    __shfl_xor_sync(0xffffffffu, best.top, lane),
                    __shfl_xor_sync(0xffffffffu, best.sum, lane)});
    return best;
  };
  const Best of_warp = gather(own);
  __syncthreads();
  if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = of_warp;
  __syncthreads();
  Best all = found[0];
  for (int warp = 1; warp < WARPS; warp++) all.add(found[warp]);
  return all;
}

// 16 outputs of up to 8 rows by a block, or 16 gated ones from twice as many: each warp multiplies
// its share of the inputs.
template <typename T, int INPUTS, bool GATED, int WARPS>
struct Product {
  static constexpr int GROUPS = GATED ? 2 : 1, STEPS = (INPUTS + 32 * WARPS - 1) / (32 * WARPS);
  static constexpr int MOST_AHEAD = GATED ? 6 : 9, CHUNKS = (STEPS + MOST_AHEAD - 1) / MOST_AHEAD;
  static constexpr int AHEAD = (STEPS + CHUNKS - 1) / CHUNKS;
  struct Sums {
    float products[WARPS][16 * GROUPS][MOST_ROWS], squares[WARPS][MOST_ROWS];
  };

  const T* w;
  int outputs, unit;
  Run<T> weights[AHEAD][2 * GROUPS];

  __device__ static int input_of(int step) {
    return (threadIdx.x / 32 * STEPS + step) * 32 + threadIdx.x % 4 * 8;
  }

  __device__ void fetch_chunk(int chunk) {
    const int line = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int step = chunk * AHEAD + i, at = input_of(step);
      const bool there = step < STEPS && at < INPUTS && 16 * unit < outputs;
#pragma unroll
      for (int j = 0; j < 2 * GROUPS; j++) {
        const int output = min(16 * unit + j % 2 * 8 + line, outputs - 1);
        weights[i][j] = read_run(w + (long(j / 2) * outputs + output) * INPUTS + at, there);
      }
    }
  }

  __device__ void fetch(const T* of, int count, int first) {
    w = of, outputs = count, unit = first;
    fetch_chunk(0);
  }

  // Of x [rows, INPUTS], normed if there is a gain; `more` [rows or 1, outputs] is added.
  __device__ void run(Sums& sums, const T* x, const T* gain, float eps, const T* more, int more_row,
                      int rows, int blocks, T* out) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4;
    while (16 * unit < outputs) {
      float products[GROUPS][4] = {}, squares = 0.0f;
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (chunk > 0) fetch_chunk(chunk);
        Run<T> row[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
          const int step = chunk * AHEAD + i, at = input_of(step);
          const bool there = step < STEPS && at < INPUTS;
          row[i] = read_run(x + line * INPUTS + at, there && line < rows);
          if (gain == nullptr) continue;
          const Run<T> gains = read_run(gain + at, there);
#pragma unroll
          for (int k = 0; k < 8; k++) {
            const float value = float(row[i].at[k]);
            squares += value * value;
            row[i].at[k] = T(value * float(gains.at[k]));
          }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
#pragma unroll
          for (int g = 0; g < GROUPS; g++)
            add_products(products[g], weights[i][2 * g], weights[i][2 * g + 1], row[i]);
      }
      const int first = 16 * unit;
      unit += blocks;
      if (16 * unit < outputs) fetch_chunk(0);
      squares += __shfl_xor_sync(0xffffffffu, squares, 1);
      squares += __shfl_xor_sync(0xffffffffu, squares, 2);
      __syncthreads();  // what was there may still be read
      if (lane % 4 == 0) sums.squares[warp][line] = squares;
#pragma unroll
      for (int g = 0; g < GROUPS; g++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          sums.products[warp][16 * g + i / 2 * 8 + line][lane % 4 * 2 + i % 2] = products[g][i];
      __syncthreads();
      if (threadIdx.x < 16 * MOST_ROWS)
        write(sums, first, gain != nullptr, eps, more, more_row, rows, out);
    }
  }

  __device__ void write(const Sums& sums, int first, bool normed, float eps, const T* more,
                        int more_row, int rows, T* out) const {
    const int row = threadIdx.x / 16, place = threadIdx.x % 16, output = first + place;
    if (row >= rows || output >= outputs) return;
    float squares = 0.0f, total[GROUPS] = {};
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) {
      squares += sums.squares[warp][row];
#pragma unroll
      for (int g = 0; g < GROUPS; g++) total[g] += sums.products[warp][16 * g + place][row];
    }
    const float factor = normed ? rsqrtf(squares / INPUTS + eps) : 1.0f;
    float value = factor * total[0];
    if constexpr (GATED) value = value / (1.0f + __expf(-value)) * factor * total[1];
    if (more != nullptr) value += float(more[row * more_row + output]);
    out[row * outputs + output] = T(value);
  }
};

// The logits of one row: each warp has 16 columns of its own.
template <typename T, int INPUTS, int COLUMNS, int KIND, int WARPS>
struct Head {
  static constexpr int STEPS = (INPUTS + 31) / 32, CHUNK = 8;

  const T* w;
  int unit;
  Run<T> weights[CHUNK][2];

  __device__ void fetch_chunk(int first) {
    const int line = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      const int at = (first + i) * 32 + threadIdx.x % 4 * 8;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int column = min(16 * unit + 8 * j + line, COLUMNS - 1);
        const bool there = at < INPUTS && 16 * unit < COLUMNS;
        weights[i][j] = read_run(w + long(column) * INPUTS + at, there);
      }
    }
  }

  __device__ void fetch(const T* of, int block, int blocks) {
    w = of, unit = threadIdx.x / 32 * blocks + block;
    fetch_chunk(0);
  }

  // Rerotations the best of the columns, to the first thread. `normed` [INPUTS] is the block's.
  __device__ Best run(const T* x, const T* gain, float eps, T* normed, const int* ids,
                      const unsigned* words, int blocks, T* out) {
    const Rule rule(words);
    Best best;
    float squares = 0.0f;
    for (int i = 8 * threadIdx.x; i < INPUTS; i += 8 * WARPS * 32) {
      const Run<T> own = read_run(x + i, true);
#pragma unroll
      for (int k = 0; k < 8; k++) squares += float(own.at[k]) * float(own.at[k]);
    }
    const float factor = rsqrtf(sum_block<WARPS>(squares) / INPUTS + eps);
    for (int i = threadIdx.x; i < INPUTS; i += WARPS * 32)
      normed[i] = T(float(x[i]) * factor * float(gain[i]));
    __syncthreads();
    const int lane = threadIdx.x % 32, line = lane / 4;
    for (; 16 * unit < COLUMNS; unit += WARPS * blocks, fetch_chunk(0)) {
      float products[4] = {};
      for (int first = 0; first < STEPS; first += CHUNK) {
        if (first > 0) fetch_chunk(first);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
          const int at = (first + i) * 32 + lane % 4 * 8;
          const Run<T> row = read_run(normed + at, at < INPUTS && line == 0);
          add_products(products, weights[i][0], weights[i][1], row);
        }
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int column = 16 * unit + 8 * j + line;
        if (lane % 4 > 0 || column >= COLUMNS) continue;
        const T logit = T(products[2 * j]);
        out[column] = logit;
        float noise = 0.0f;
        if constexpr (KIND == 1)
          noise = rule.temperature * gumbel_of(rule.bits_of(unsigned(ids[column])));
        best.add(float(logit) + noise, column);
      }
    }
    return find_best_of_block<WARPS>(best);
  }
};
