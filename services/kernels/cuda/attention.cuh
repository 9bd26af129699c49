// Sixteen queries against the keys that they share, on the tensor cores; see attention.py.
//
// A warp takes 16 keys at a time and keeps a running maximum, a sum and weighted values of each
// query; in the end the warps are merged. A query's bits do not depend on who is beside it.

#define NO_KEY __int_as_float(0xff800000)  // minus infinity
#define NO_NUMBER __int_as_float(0x7fffffff)

constexpr int TILE = 16;  // queries of a block, and keys that a warp takes at once

// The bits of all lanes with the same `lane % 4`.
__device__ inline unsigned joined_by_place(unsigned bits) {
#pragma unroll
  for (int lane = 4; lane < 32; lane *= 2) bits |= __shfl_xor_sync(0xffffffffu, bits, lane);
  return bits;
}

// What a warp knows of its queries: a lane has numbers of two, `lane / 4` and the eighth after it.
template <int D>
struct Held {
  float highest[2] = {-1e30f, -1e30f};  // finite, so that to have seen no key is no special case
  float sum[2] = {};                    // of the lane's own keys
  float values[D / 8][4] = {};          // of query i / 2: numbers j % 8 of those 2 * (lane % 4) + i % 2
};

template <int D>
__device__ void merge(Held<D>& own, const Held<D>& other) {
  float kept[2], added[2];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float top = fmaxf(own.highest[r], other.highest[r]);
    kept[r] = __expf(own.highest[r] - top), added[r] = __expf(other.highest[r] - top);
    own.sum[r] = kept[r] * own.sum[r] + added[r] * other.sum[r];
    own.highest[r] = top;
  }
#pragma unroll
  for (int j = 0; j < D / 8; j++)
#pragma unroll
    for (int i = 0; i < 4; i++)
      own.values[j][i] = kept[i / 2] * own.values[j][i] + added[i / 2] * other.values[j][i];
}

// What the later half of a block's warps leave for the first one.
template <int D, int WARPS>
using Left = float[WARPS / 2][sizeof(Held<D>) / sizeof(float)][32];

// Merges what the warps of a block hold into the first one's.
template <int D, int WARPS>
__device__ void merge_warps(Held<D>& own, Left<D, WARPS>& left) {
  constexpr int NUMBERS = sizeof(Held<D>) / sizeof(float);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int half = WARPS / 2; half > 0; half /= 2) {
    if (warp >= half && warp < 2 * half) {
      const auto* from = reinterpret_cast<const float*>(&own);
#pragma unroll
      for (int i = 0; i < NUMBERS; i++) left[warp - half][i][lane] = from[i];
    }
    __syncthreads();
    if (warp < half) {
      Held<D> other;
      auto* to = reinterpret_cast<float*>(&other);
#pragma unroll
      for (int i = 0; i < NUMBERS; i++) to[i] = left[warp][i][lane];
      merge(own, other);
    }
    __syncthreads();
  }
}

// Adds the values of 16 keys: `weights` as `add_products` leaves them for the first eight and the
// others, `values` [D / 64][4] those of the lane's keys 2 * (lane % 4), the next, and the eighth
// after both; numbers 8 * (lane / 4) and on of each 64.
template <typename T, int D>
__device__ void add_values(Held<D>& own, const float (&weights)[2][4],
                           const Run<T> (&values)[D / 64][4]) {
  const Four<T> upper = {T(weights[0][0]), T(weights[0][1]), T(weights[1][0]), T(weights[1][1])};
  const Four<T> lower = {T(weights[0][2]), T(weights[0][3]), T(weights[1][2]), T(weights[1][3])};
#pragma unroll
  for (int j = 0; j < D / 8; j++) {
    const auto& of = values[j / 8];
    const int i = j % 8;
    const Four<T> column = {of[0].at[i], of[1].at[i], of[2].at[i], of[3].at[i]};
    add_fours(own.values[j], upper, lower, column);
  }
}

// Writes what was found of a query to `out`: of some of its heads, `row` from one row to the next.
template <typename T, int D>
struct Result {
  T* out;
  long row;

  __device__ void write(const Held<D>& own, int r, float sum, int row_at, int head) const {
    const int place = threadIdx.x % 4;
#pragma unroll
    for (int b = 0; b < D / 64; b++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        Run<T> found;
#pragma unroll
        for (int j = 0; j < 8; j++)
          // Not `sum > 0`: what is no number must stay one that is seen.
          found.at[j] = T(sum == 0.0f ? 0.0f : own.values[8 * b + j][2 * r + i] / sum);
        write_run(out + row_at * row + head * D + 64 * b + 8 * (2 * place + i), found);
      }
  }
};

// The same from a part of the keys, to be merged: weighted values, the highest score, the sum.
template <int D>
struct Part {
  static constexpr int NUMBERS = D + 2;
  float* out;
  long row;

  __device__ void write(const Held<D>& own, int r, float sum, int row_at, int head) const {
    const int place = threadIdx.x % 4;
    float* to = out + row_at * row + head * NUMBERS;
#pragma unroll
    for (int b = 0; b < D / 64; b++)
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 8; j++)
          to[64 * b + 8 * (2 * place + i) + j] = own.values[8 * b + j][2 * r + i];
    if (place == 0) to[D] = own.highest[r], to[D + 1] = sum;
  }
};

// The key that a part begins with. The first `few` parts have `length` keys, the next few / 2 twice
// as many, all later ones four times, since starting and ending a block costs time, too.
__device__ inline int begin_part(int part, int length, int few) {
  const int doubled = min(max(part - few, 0), few / 2);
  return length * (part + doubled + 3 * max(part - few - few / 2, 0));
}

// What all parts of a query's keys have, by a block; `step` from one part to the next.
template <typename T, int D, int WARPS>
__device__ void merge_parts(const float* parts, int count, long step, T* out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float top = -1e30f, sum = 0.0f, values[D / 32] = {};
  for (int part = lane; part < count; part += 32) top = fmaxf(top, parts[part * step + D]);
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2)
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, lanes));
  for (int part = lane; part < count; part += 32) {
    const float* from = parts + part * step;
    sum += __expf(from[D] - top) * from[D + 1];
  }
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, lanes);
  // The weights need no part before theirs, so that several parts are loaded at a time.
#pragma unroll 8
  for (int part = warp; part < count; part += WARPS) {
    const float* from = parts + part * step;
    const float weight = __expf(from[D] - top);
#pragma unroll
    for (int i = 0; i < D / 32; i++) values[i] += weight * from[32 * i + lane];
  }
  __shared__ float found[WARPS][D];
#pragma unroll
  for (int i = 0; i < D / 32; i++) found[warp][32 * i + lane] = values[i];
  __syncthreads();
  for (int at = threadIdx.x; at < D; at += 32 * WARPS) {
    float value = 0.0f;
#pragma unroll
    for (int from = 0; from < WARPS; from++) value += found[from][at];
    out[at] = T(sum == 0.0f ? 0.0f : value / sum);
  }
}

// The slots that a row sees; each step is from one element to the next.
struct Mask {
  const bool* mask;
  long row_step, step;
  __device__ bool operator()(int row, int key) const { return mask[row * row_step + key * step]; }
};

// The queries of one head of keys: [rows, GROUP], of which this block has those from 16 * tile on,
// against the keys from `first` on, of which a row sees some; each step is from one element to the
// next.
template <typename T, int D, int WARPS, int GROUP, typename Sees, typename Out>
__device__ void attend_tile(Left<D, WARPS>& left, const T* q, long q_head, long q_row, long q_step,
                            const T* k, long k_step, const T* v, long v_step, const Sees& sees,
                            int rows, int tile, int first, int keys, float scale, const Out& out) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, line = lane / 4, place = lane % 4;
  int row_at[2];
  bool there[2];
  Run<T> query[2][D / 32], near[2][D / 32];
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int at = TILE * tile + 8 * r + line;
    there[r] = at < rows * GROUP;
    row_at[r] = min(at / GROUP, rows - 1);
    const T* from = q + at % GROUP * q_head + row_at[r] * q_row;
#pragma unroll
    for (int s = 0; s < D / 32; s++)
#pragma unroll
      for (int i = 0; i < 8; i++)
        query[r][s].at[i] = there[r] ? from[(32 * s + 8 * place + i) * q_step] : T(0.0f);
  }
  const auto read_keys = [&](int start) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int key = start + 8 * half + line;
#pragma unroll
      for (int s = 0; s < D / 32; s++)
        near[half][s] = read_run(k + key * k_step + 32 * s + 8 * place, key < keys);
    }
  };

  Held<D> own;
  read_keys(first + TILE * warp);
  for (int start = first + TILE * warp; start < keys; start += TILE * WARPS) {
    float score[2][4] = {}, weights[2][4];
    unsigned seen = 0;  // a bit for each of the lane's keys: by one of its queries, then by any
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int s = 0; s < D / 32; s++)
        add_products(score[half], query[0][s], query[1][s], near[half][s]);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int key = start + 8 * half + 2 * place + i % 2;
        const bool own_key = there[i / 2] && key < keys && sees(row_at[i / 2], key);
        score[half][i] = own_key ? score[half][i] * scale : NO_KEY;
        seen |= unsigned(own_key) << (2 * half + i % 2);
      }
    }
    read_keys(start + TILE * WARPS);
    seen = joined_by_place(seen);
    if (!__any_sync(0xffffffffu, seen)) continue;

    Run<T> values[D / 64][4];
    unsigned broken = 0;
#pragma unroll
    for (int n = 0; n < 4; n++)
#pragma unroll
      for (int b = 0; b < D / 64; b++) {
        const int key = start + 8 * (n / 2) + 2 * place + n % 2;
        values[b][n] = read_run(v + key * v_step + 64 * b + 8 * line, seen >> n & 1);
        if (!is_finite(values[b][n])) broken |= 1u << n;
      }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float top = own.highest[r];
#pragma unroll
      for (int n = 0; n < 4; n++) top = fmaxf(top, score[n / 2][2 * r + n % 2]);
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
      top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
      const float shrink = __expf(own.highest[r] - top);
      own.highest[r] = top, own.sum[r] *= shrink;
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const float weight = __expf(score[n / 2][2 * r + n % 2] - top);
        weights[n / 2][2 * r + n % 2] = weight;
        own.sum[r] += weight;
      }
#pragma unroll
      for (int j = 0; j < D / 8; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) own.values[j][2 * r + i] *= shrink;
    }
    // What is no number would reach those who do not see it: times a weight of zero it is none.
    if (__any_sync(0xffffffffu, broken)) {
      broken = joined_by_place(broken);
#pragma unroll
      for (int n = 0; n < 4; n++) {
        if (!(broken >> n & 1)) continue;
        for (int b = 0; b < D / 64; b++) values[b][n] = {};
        for (int r = 0; r < 2; r++)
          if (score[n / 2][2 * r + n % 2] != NO_KEY) own.sum[r] = NO_NUMBER;
      }
    }
    add_values<T, D>(own, weights, values);
  }

  merge_warps<D, WARPS>(own, left);
  if (warp > 0) return;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = own.sum[r];
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const int at = TILE * tile + 8 * r + line;
    if (there[r]) out.write(own, r, sum, at / GROUP, at % GROUP);
  }
}
