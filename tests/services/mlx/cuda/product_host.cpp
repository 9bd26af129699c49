// Runs services/mlx/cuda/product.cuh on the host. Test only.
//
// stdin:  rows, inputs, outputs, whether something is added, then x, w and what is added
// stdout: out [rows, outputs]
constexpr int WARPS = BLOCK_WARPS;
#include "cuda_host.h"

// In the place of tile.cuh, whose tensor cores do not multiply floats.
template <typename T>
struct Run {
  T at[8];
};

template <typename T>
Run<T> read_run(const T* from, bool there) {
  Run<T> found = {};
  if (there) std::copy_n(from, 8, found.at);
  return found;
}

template <typename T>
void fetch_run(Run<T>* to, const T* from, bool there) {
  *to = read_run(from, there);
}

void end_fetch_group() {}

template <int LEFT>
void await_fetch_groups() {}

// Each lane leaves its runs where those that need them find them.
template <typename T>
void add_products(float (&sums)[4], const Run<T>& upper, const Run<T>& lower, const Run<T>& row) {
  static Run<T> left[THREADS][3];
  auto& warp = *warps[threadIdx.x / LANES];
  const int lane = threadIdx.x % LANES, first = threadIdx.x - lane;
  left[threadIdx.x][0] = upper, left[threadIdx.x][1] = lower, left[threadIdx.x][2] = row;
  warp.arrive_and_wait();
  for (int i = 0; i < 4; i++)
    for (int part = 0; part < 4; part++)
      for (int k = 0; k < 8; k++) {
        const int output = first + lane / 4 * 4 + part;
        const int other = first + (lane % 4 * 2 + i % 2) * 4 + part;
        sums[i] += left[output][i / 2].at[k] * left[other][2].at[k];
      }
  warp.arrive_and_wait();
}

#include "product.cuh"

int main() {
  int rows, inputs, outputs, adds;
  if (scanf("%d%d%d%d", &rows, &inputs, &outputs, &adds) != 4) return 1;
  constexpr bool GATED = BLOCK_GATED;
  const auto x = numbers(size_t(rows) * inputs);
  const auto w = numbers(size_t(outputs) * inputs * (GATED ? 2 : 1));
  const auto more = numbers(adds ? size_t(rows) * outputs : 0);
  std::vector<float> out(size_t(rows) * outputs);
  for (int row = 0; row < rows; row += 8 * BLOCK_TILES)
    for (int first = 0; first < outputs; first += (GATED ? 8 : 16) * BLOCK_GROUPS)
      run_block([&] {
        multiply_rows<float, BLOCK_TILES, BLOCK_GROUPS, WARPS, GATED>(
            x.data(), w.data(), adds ? more.data() : nullptr, rows, inputs, outputs, row, first,
            out.data());
      });
  print(out);
}
