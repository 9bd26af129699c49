// Runs services/kernels/cuda/doorbell.cuh on the host. Test only.
//
// stdin:  base, first, rows, slots, the 16 words of views of each row as halves, then width, rank,
//         excluded, and that many ids, then count, pass, ticket, and that many numbers
// stdout: what each row sees, unless the bell was rung, and then; the token; what was sent, and that
//         it is there
constexpr int WARPS = 1;
#include "cuda_host.h"

#define __nanosleep(time)
#define __threadfence_system()
struct Extent {
  int x = THREADS;
} blockDim;

#include "common.cuh"
#include "doorbell.cuh"

int main() {
  const auto sizes = numbers(4);
  const int first = int(sizes[1]), rows = int(sizes[2]), slots = int(sizes[3]);
  std::vector<int> box(FOUND + 2 * FOUND_WORDS);
  box[START] = int(sizes[0]);
  const auto words = words_of(numbers(2 * rows * VIEW / 32));
  std::copy(words.begin(), words.end(), box.begin() + VIEWS);
  std::vector<float> out;
  for (const bool rang : {false, true})
    for (int row = 0; row < rows; ++row)
      for (int slot = 0; slot < slots; ++slot)
        out.push_back(sees_branch(slot, row, first, rang, box.data()));
  const auto asked = numbers(3);
  const auto ids = numbers(int(asked[0]));
  out.push_back(pick_guess(ids.data(), int(asked[0]), int(asked[1]), int(asked[2])));
  const auto told = numbers(3);
  const auto found = numbers(int(told[0]));
  run_block([&] { send_found(found.data(), int(told[0]), int(told[1]), int(told[2]), box.data()); });
  const auto* sent = reinterpret_cast<float*>(box.data() + FOUND + int(told[1]) * FOUND_WORDS);
  out.insert(out.end(), sent, sent + found.size());
  out.push_back(box[DONE + int(told[1])]);
  print(out);
}
