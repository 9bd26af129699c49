// Runs services/kernels/cuda/persistent.cuh on the host, each block by its own thread. Test only.
//
// stdin:  blocks, slots, embedding rows, words of the call, whether heads are normed, the radians of
//         a position; then a layer's arrays in the order of `Layer`, the embedding, gain, head and
//         ids, and the words of the call in halves
// stdout: the bytes of `Scratch`, what was found, then keys and values of all layers
constexpr int WARPS = 8;
#include "cuda_host.h"

#include "common.cuh"
#include "tile_host.h"
#include "attention.cuh"
#include "rotate.cuh"
#include "sampling/rule.cuh"
#include "sampling/best.cuh"
#include "sampling/guess.cuh"
#include "early_product.cuh"
#include "persistent.cuh"

constexpr int D = SIZE, HEADS = 4, KV_HEADS = 2, WIDTH = 256, HIDDEN = 104, COLUMNS = 140;
constexpr int LAYERS = 2;
using Branches = Drafting<float, D, HEADS, KV_HEADS, D, WIDTH, HIDDEN, COLUMNS, CHOICE, WARPS>;

int main() {
  int blocks, slots, vocabulary, words, normed;
  if (scanf("%d%d%d%d%d", &blocks, &slots, &vocabulary, &words, &normed) != 5) return 1;
  const auto speeds = numbers(D / 2);
  std::vector<std::vector<float>> held;
  const auto read = [&](size_t count) {
    held.push_back(numbers(count));
    return held.back().data();
  };
  held.reserve(1000);
  Layer<float> layers[LAYERS];
  for (auto& layer : layers) {
    layer.gain = read(WIDTH);
    layer.qkv = read(Branches::ALL * D * WIDTH);
    layer.bias = read(Branches::ALL * D);
    layer.head_gains = normed ? read(2 * D) : nullptr;
    layer.output = read(WIDTH * HEADS * D);
    layer.mlp_gain = read(WIDTH);
    layer.gate_up = read(2 * HIDDEN * WIDTH);
    layer.down = read(WIDTH * HIDDEN);
    layer.keys = read(KV_HEADS * slots * D);
    layer.values = read(KV_HEADS * slots * D);
  }
  const float *embedding = read(size_t(vocabulary) * WIDTH), *gain = read(WIDTH);
  const float* head = read(COLUMNS * WIDTH);
  const auto named = numbers(COLUMNS);
  const std::vector<int> ids(named.begin(), named.end());
  const auto call = words_of(numbers(2 * words));
  const Ends<float> ends{embedding, gain, head, ids.data()};

  static Branches::Own own;
  std::vector<unsigned> box(FOUND + MOST_DEPTHS * MOST_ROWS * FOUND_WORDS);
  std::copy(call.begin(), call.end(), box.begin());
  box[DONE] = box[CALLED];
  std::vector<std::thread> running;
  for (int block = 0; block < blocks; block++)
    running.emplace_back([&, block] {
      static thread_local Branches::Memory memory;
      static thread_local float queries[TILE * D];
      run_block([&] {
        Branches{memory, queries, own, ends, speeds.data(), 1e-5f, 1e-5f, 1.0f / sqrtf(D), slots,
              block, blocks}
            .draft(layers, LAYERS, box.data());
      });
    });
  for (auto& one : running) one.join();
  if (box[DONE] != box[CALLED] + box[DEPTHS]) return 2;
  print({float(sizeof(own))});
  std::vector<float> found;
  for (unsigned at = FOUND; at < box.size(); at++) found.push_back(__uint_as_float(box[at]));
  print(found);
  for (const auto& layer : layers) {
    print({layer.keys, layer.keys + KV_HEADS * slots * D});
    print({layer.values, layer.values + KV_HEADS * slots * D});
  }
}
