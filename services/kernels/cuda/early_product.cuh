// Products of few rows whose weights are fetched while the rows are not computed yet.

constexpr int MOST_ROWS = 16, OCTETS = MOST_ROWS / 8;  // of a product

// Multiplies by the gains of a norm; the sum of the squares, of which its factor is made.
template <typename T>
__device__ inline float norm_run(Run<T>& row, const Run<T>& gains) {
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < 8; k++) {
    const float value = float(row.at[k]);
    squares += value * value;
    row.at[k] = T(value * float(gains.at[k]));
  }
  return squares;
}

// 16 outputs of all rows by a block, or 16 gated ones from twice as many: each warp multiplies
// its share of the inputs.
template <typename T, int INPUTS, bool GATED, int WARPS>
struct Product {
  static_assert(32 * WARPS >= 16 * MOST_ROWS, "a thread writes each output");
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
      float products[OCTETS][GROUPS][4] = {}, squares[OCTETS] = {};
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        if (chunk > 0) fetch_chunk(chunk);
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++) {
          if (8 * octet >= rows) break;
          Run<T> row[AHEAD];
#pragma unroll
          for (int i = 0; i < AHEAD; i++) {
            const int step = chunk * AHEAD + i, at = input_of(step), own = 8 * octet + line;
            const bool there = step < STEPS && at < INPUTS;
            row[i] = read_run(x + own * INPUTS + at, there && own < rows);
            if (gain != nullptr) squares[octet] += norm_run(row[i], read_run(gain + at, there));
          }
#pragma unroll
          for (int i = 0; i < AHEAD; i++)
#pragma unroll
            for (int g = 0; g < GROUPS; g++)
              add_products(products[octet][g], weights[i][2 * g], weights[i][2 * g + 1], row[i]);
        }
      }
      const int first = 16 * unit;
      unit += blocks;
      if (16 * unit < outputs) fetch_chunk(0);
      __syncthreads();  // what was there may still be read
#pragma unroll
      for (int octet = 0; octet < OCTETS; octet++) {
        squares[octet] += __shfl_xor_sync(0xffffffffu, squares[octet], 1);
        squares[octet] += __shfl_xor_sync(0xffffffffu, squares[octet], 2);
        if (lane % 4 == 0) sums.squares[warp][8 * octet + line] = squares[octet];
#pragma unroll
        for (int g = 0; g < GROUPS; g++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            sums.products[warp][16 * g + i / 2 * 8 + line][8 * octet + lane % 4 * 2 + i % 2] =
                products[octet][g][i];
      }
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

// The logits of all rows: each warp has 16 columns of its own.
template <typename T, int INPUTS, int COLUMNS, int WARPS>
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

  // Of x [rows, INPUTS], normed.
  __device__ void run(const T* x, const T* gain, float eps, int rows, int blocks, T* out) {
    const int lane = threadIdx.x % 32, line = lane / 4;
    for (; 16 * unit < COLUMNS; unit += WARPS * blocks, fetch_chunk(0)) {
      float products[OCTETS][4] = {}, squares[OCTETS] = {};
      for (int first = 0; first < STEPS; first += CHUNK) {
        if (first > 0) fetch_chunk(first);
#pragma unroll
        for (int octet = 0; octet < OCTETS; octet++) {
          if (8 * octet >= rows) break;
#pragma unroll
          for (int i = 0; i < CHUNK; i++) {
            const int at = (first + i) * 32 + lane % 4 * 8, own = 8 * octet + line;
            Run<T> row = read_run(x + own * INPUTS + at, at < INPUTS && own < rows);
            squares[octet] += norm_run(row, read_run(gain + at, at < INPUTS));
            add_products(products[octet], weights[i][0], weights[i][1], row);
          }
        }
      }
#pragma unroll
      for (int octet = 0; octet < OCTETS; octet++) {
        float sum = squares[octet];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        const float factor = rsqrtf(sum / INPUTS + eps);
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int place = lane % 4 * 2 + i, row = 8 * octet + place;
          const float of_row = __shfl_sync(0xffffffffu, factor, 4 * place);
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const int column = 16 * unit + 8 * j + line;
            if (row < rows && column < COLUMNS)
              out[long(row) * COLUMNS + column] = T(products[octet][2 * j + i] * of_row);
          }
        }
      }
    }
  }
};
