// Runs services/kernels/cuda/kv_rows.cuh on the host. Test only.
//
// stdin:  rows, slots, where those rows are to be moved or -1, the slot of each row, the buffer, and
//         unless they are moved [rows, HEADS, SIZE]
// stdout: the buffer
constexpr int WARPS = 1;
#include "cuda_host.h"

#include "common.cuh"
#include "kv_rows.cuh"

int main() {
  const auto sizes = numbers(3);
  const long rows = long(sizes[0]), slots = long(sizes[1]), to = long(sizes[2]);
  const auto places = numbers(rows);
  auto buffer = numbers(HEADS * slots * SIZE);
  const std::vector<int> slot_of_row(places.begin(), places.end());
  if (to >= 0) {
    for (long at = 0; at < HEADS * SIZE; ++at)
      move_number<float, SIZE>(at, buffer.data(), slots, slot_of_row.data(), int(rows), int(to));
  } else {
    const auto fresh = numbers(rows * HEADS * SIZE);
    for (long at = 0; at < HEADS * rows * SIZE; ++at)
      write_number<float, SIZE>(at, rows, fresh.data(), SIZE, HEADS * SIZE, 1, buffer.data(), slots,
                                slot_of_row.data());
  }
  print(buffer);
}
