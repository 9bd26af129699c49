// Runs services/kernels/cuda/product.cuh on the host. Test only.
//
// stdin:  rows, inputs, outputs, how many rows are added to the outputs (1: to each), whether the
//         rows are normed, then x, w, what is added, and the gains
// stdout: out [rows, outputs]
constexpr int WARPS = BLOCK_WARPS;
#include "cuda_host.h"

#include "tile_host.h"

#include "common.cuh"
#include "product.cuh"

int main() {
  int rows, inputs, outputs, added, normed;
  if (scanf("%d%d%d%d%d", &rows, &inputs, &outputs, &added, &normed) != 5) return 1;
  constexpr bool GATED = BLOCK_GATED;
  const auto x = numbers(size_t(rows) * inputs);
  const auto w = numbers(size_t(outputs) * inputs * (GATED ? 2 : 1));
  const auto more = numbers(size_t(added) * outputs), gains = numbers(normed ? inputs : 0);
  const Norm<float> norm{normed ? gains.data() : nullptr, 0.5f};
  const More<float> adds{added ? more.data() : nullptr, added == 1 ? 0 : outputs};
  std::vector<float> out(size_t(rows) * outputs);
  for (int row = 0; row < rows; row += 8 * BLOCK_TILES)
    for (int first = 0; first < outputs; first += (GATED ? 8 : 16) * BLOCK_GROUPS)
      run_block([&] {
        multiply_rows<float, BLOCK_TILES, BLOCK_GROUPS, WARPS, GATED>(
            x.data(), w.data(), norm, adds, rows, inputs, outputs, row, first, out.data());
      });
  print(out);
}
