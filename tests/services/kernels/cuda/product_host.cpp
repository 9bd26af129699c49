// Runs services/kernels/cuda/product.cuh on the host. Test only.
//
// stdin:  rows, inputs, outputs, whether something is added, then x, w and what is added
// stdout: out [rows, outputs]
constexpr int WARPS = BLOCK_WARPS;
#include "cuda_host.h"

#include "tile_host.h"

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
