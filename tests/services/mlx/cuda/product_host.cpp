// Runs services/mlx/cuda/product.cuh on the host. Test only.
//
// stdin:  rows, inputs, outputs, then x and w as numbers
// stdout: out [rows, outputs]
constexpr int WARPS = 1;
#include "cuda_host.h"

#include "common.cuh"
#include "product.cuh"

int main() {
  int rows, inputs, outputs;
  if (scanf("%d%d%d", &rows, &inputs, &outputs) != 3) return 1;
  const auto x = numbers(size_t(rows) * inputs), w = numbers(size_t(outputs) * inputs);
  std::vector<float> out(size_t(rows) * outputs);
  run_block([&] {
    for (int row = 0; row < rows; row += WARP_ROWS)
      for (int first = 0; first < outputs + WARP_OUTPUTS; first += WARP_OUTPUTS)
        multiply_rows<float, WARP_ROWS, WARP_OUTPUTS, LANE_RUN>(
            x.data(), w.data(), rows, inputs, outputs, row, first, out.data());
  });
  print(out);
}
