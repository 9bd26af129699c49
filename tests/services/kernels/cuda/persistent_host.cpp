// Runs services/kernels/cuda/persistent.cuh on the host, each block by its own thread. Test only.
//
// stdin:  blocks, slots, tokens of the store, fed tokens, depths, embedding rows, the radians of a
//         position, whether heads are normed; then a layer's arrays in the order of `Layer`, the
//         embedding, gain, head, ids and fed tokens, and the words of the rules in halves
// stdout: the bytes of `Scratch`, token and confidence of each depth, then keys and values of all
//         layers
constexpr int WARPS = 8;
#include "cuda_host.h"

#include "common.cuh"
#include "tile_host.h"
#include "attention.cuh"
#include "sampling/rule.cuh"
#include "sampling/best.cuh"
#include "sampling/guess.cuh"
#include "early_product.cuh"
#include "persistent.cuh"

constexpr int D = SIZE, HEADS = 4, KV_HEADS = 2, WIDTH = 256, HIDDEN = 104, COLUMNS = 100;
constexpr int LAYERS = 2;
using Chain = Drafting<float, D, HEADS, KV_HEADS, D, WIDTH, HIDDEN, COLUMNS, CHOICE, WARPS>;

int main() {
  int blocks, slots, length, fed, depths, vocabulary, normed;
  if (scanf("%d%d%d%d%d%d%d", &blocks, &slots, &length, &fed, &depths, &vocabulary, &normed) != 7)
    return 1;
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
    layer.qkv = read(Chain::ALL * D * WIDTH);
    layer.bias = read(Chain::ALL * D);
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
  const auto named = numbers(COLUMNS), tokens = numbers(fed);
  const std::vector<int> ids(named.begin(), named.end());
  const auto rules = words_of(numbers(2 * depths * RULE_WORDS));
  const Ends<float> ends{embedding, gain, head, ids.data()};

  static Chain::Own own;
  unsigned box[192] = {};
  box[DONE] = box[CALLED] = 0xfffffffe;
  box[COUNT] = fed, box[FIRST] = length, box[DEPTHS] = depths;
  std::copy(tokens.begin(), tokens.end(), box + FED);
  std::copy(rules.begin(), rules.end(), box + RULES);
  std::vector<std::thread> running;
  for (int block = 0; block < blocks; block++)
    running.emplace_back([&, block] {
      static thread_local Chain::Memory memory;
      static thread_local float queries[TILE * D];
      run_block([&] {
        Chain{memory, queries, own, ends, speeds.data(), 1e-5f, 1e-5f, 1.0f / sqrtf(D), slots,
              block, blocks}
            .draft(layers, LAYERS, box);
      });
    });
  for (auto& one : running) one.join();
  if (box[DONE] != 0xfffffffe + depths) return 2;
  print({float(sizeof(own))});
  for (int depth = 1; depth <= depths; depth++)
    print({float(box[DRAFTED + 2 * depth]), __uint_as_float(box[DRAFTED + 2 * depth + 1])});
  for (const auto& layer : layers) {
    print({layer.keys, layer.keys + KV_HEADS * slots * D});
    print({layer.values, layer.values + KV_HEADS * slots * D});
  }
}
