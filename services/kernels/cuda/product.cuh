// A few rows times weights that are read once for all of them; see product.py.

constexpr int STEP = 32;       // inputs that a warp multiplies at once
constexpr int TOGETHER = 4;    // steps that lie side by side
constexpr int PARTS = 8;       // sums of an output, each over its share of the inputs
constexpr int DEPTH = 4;       // steps whose weights are on the way

// What is added to each output, of one row or of each.
template <typename T>
struct More {
  const T* at;
  int step;  // from row to row
};

// The RMS norm of each row before it is multiplied; without a gain there is none.
template <typename T>
struct Norm {
  const T* gain;
  float eps;
};

// Finds the factor of each of COUNT rows from `first` on, in an order that depends on nothing else.
template <typename T, int COUNT, int WARPS>
__device__ inline void find_factors(const T* x, float eps, int rows, int inputs, int first,
                                    float (&factors)[COUNT]) {
  const int lane = threadIdx.x % 32;
  for (int r = threadIdx.x / 32; r < COUNT; r += WARPS) {
    float squares = 0.0f;
    for (int at = 8 * lane; at < inputs; at += 8 * 32) {
      const Run<T> run = read_run(x + long(first + r) * inputs + at, first + r < rows);
#pragma unroll
      for (int i = 0; i < 8; i++) squares += float(run.at[i]) * float(run.at[i]);
    }
    const float all = summed(squares);
    if (lane == 0) factors[r] = rsqrtf(all / inputs + eps);
  }
  __syncthreads();
}

// 16 * GROUPS outputs from `first` on, of 8 * TILES rows of x [rows, inputs] from `first_row` on,
// normed first, with `more` added. If GATED there are twice as many outputs, and each
// that is written is the one of the second half times the sigmoid-weighted one of the first.
// How an output is summed does not depend on how many there are, nor on how many rows.
template <typename T, int TILES, int GROUPS, int WARPS, bool GATED>
__device__ void multiply_rows(const T* x, const T* w, Norm<T> norm, More<T> more, int rows,
                              int inputs, int outputs, int first_row, int first, T* out) {
  constexpr int LINES = 2 * GROUPS, SHARES = PARTS / WARPS, OUTPUTS = 16 * GROUPS;
  constexpr int ROWS = 8 * TILES, WRITTEN = GATED ? OUTPUTS / 2 : OUTPUTS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int line = lane / 4, begin = lane % 4 * 8;
  const T *weights[LINES], *row[TILES];
#pragma unroll
  for (int i = 0; i < LINES; i++) {
    const int half = GATED ? i / GROUPS : 0, own = 8 * (i - half * GROUPS) + line;
    weights[i] = w + (long(half) * outputs + min(first + own, outputs - 1)) * inputs;
  }
#pragma unroll
  for (int t = 0; t < TILES; t++)
    row[t] = x + long(min(first_row + 8 * t + line, rows - 1)) * inputs;

  // A lane fetches what it will need itself, so nobody has to wait for others.
  using Fetched = Run<T>[DEPTH][LINES][WARPS * 32];
  using Sums = float[PARTS][ROWS][OUTPUTS];
  constexpr size_t SIZE = sizeof(Fetched) > sizeof(Sums) ? sizeof(Fetched) : sizeof(Sums);
  alignas(32) __shared__ char memory[SIZE];
  auto& fetched = reinterpret_cast<Fetched&>(memory);
  const auto find = [&](int step) {
    const int part = step / TOGETHER % SHARES * WARPS + warp;
    const int turn = step / (TOGETHER * SHARES);
    return ((turn * PARTS + part) * TOGETHER + step % TOGETHER) * STEP + begin;
  };
  const auto fetch = [&](int step) {
    const int at = find(step);
#pragma unroll
    for (int i = 0; i < LINES; i++)
      fetch_run(&fetched[step % DEPTH][i][threadIdx.x], weights[i] + at, at < inputs);
    end_fetch_group();
  };
#pragma unroll
  for (int step = 0; step < DEPTH - 1; step++) fetch(step);

  float own_factors[TILES] = {};
  if (norm.gain != nullptr) {
    __shared__ float factors[ROWS];
    find_factors<T, ROWS, WARPS>(x, norm.eps, rows, inputs, first_row, factors);
#pragma unroll
    for (int t = 0; t < TILES; t++) own_factors[t] = factors[8 * t + line];
  }
  const auto read = [&](int step, Run<T>(&own)[TILES]) {
    const int at = find(step);
#pragma unroll
    for (int t = 0; t < TILES; t++)
      own[t] = read_run(row[t] + at, at < inputs && first_row + 8 * t + line < rows);
    if (norm.gain == nullptr) return;
    const Run<T> gain = read_run(norm.gain + at, at < inputs);
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        own[t].at[i] = T(float(own[t].at[i]) * own_factors[t] * float(gain.at[i]));
  };

  float sums[SHARES][GROUPS][TILES][4] = {};
  Run<T> own[2][TILES];
  read(0, own[0]);
  for (int turn = 0; turn * PARTS * TOGETHER * STEP < inputs; turn++)
#pragma unroll
    for (int later = 0; later < SHARES * TOGETHER; later++) {
      const int step = turn * SHARES * TOGETHER + later;
      fetch(step + DEPTH - 1);
      read(step + 1, own[(later + 1) % 2]);
      await_fetch_groups<DEPTH - 1>();
#pragma unroll
      for (int g = 0; g < GROUPS; g++) {
        const Run<T> upper = fetched[step % DEPTH][2 * g][threadIdx.x];
        const Run<T> lower = fetched[step % DEPTH][2 * g + 1][threadIdx.x];
#pragma unroll
        for (int t = 0; t < TILES; t++)
          add_products(sums[later / TOGETHER][g][t], upper, lower, own[later % 2][t]);
      }
    }

  await_fetch_groups<0>();
  __syncthreads();
  auto& parts = reinterpret_cast<Sums&>(memory);
#pragma unroll
  for (int s = 0; s < SHARES; s++)
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
#pragma unroll
      for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          parts[s * WARPS + warp][8 * t + lane % 4 * 2 + i % 2][16 * g + i / 2 * 8 + line] =
              sums[s][g][t][i];
  __syncthreads();
  const auto total = [&](int r, int o) {
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < PARTS; part++) sum += parts[part][r][o];
    return float(T(sum));
  };
  for (int at = threadIdx.x; at < ROWS * WRITTEN; at += WARPS * 32) {
    const int r = at / WRITTEN, o = at % WRITTEN;
    if (first_row + r >= rows || first + o >= outputs) continue;
    const long place = long(first_row + r) * outputs + first + o;
    float value = total(r, o);
    if constexpr (GATED) value = value / (1.0f + __expf(-value)) * total(r, o + WRITTEN);
    if (more.at != nullptr) value += float(more.at[(first_row + r) * long(more.step) + first + o]);
    out[place] = T(value);
  }
}
