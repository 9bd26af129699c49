// Runs services/mlx/cuda/kv_rows.cuh on the host. Test only.
//
// stdin:  rows, slots, the slot of each row, then [rows, HEADS, SIZE] and the buffer
// stdout: the buffer
constexpr int WARPS = 1;
#include "cuda_host.h"

#include "common.cuh"
#include "kv_rows.cuh"

int main() {
  const auto sizes = numbers(2);
  const long rows = long(sizes[0]), slots = long(sizes[1]);
  const auto places = numbers(rows), fresh = numbers(rows * HEADS * SIZE);
  auto buffer = numbers(HEADS * slots * SIZE);
  const std::vector<int> slot_of_row(places.begin(), places.end());
  for (long at = 0; at < HEADS * rows * SIZE; ++at)
    write_number<float, SIZE>(at, rows, fresh.data(), SIZE, HEADS * SIZE, 1, buffer.data(), slots,
                              slot_of_row.data());
  print(buffer);
}
