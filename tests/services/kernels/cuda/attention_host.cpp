// Runs services/kernels/cuda/attention.cuh on the host. Test only.
//
// stdin:  heads, kv heads, queries, keys, keys of the first parts or 0, how many of these there are,
//         all parts, then q, k, v, mask as numbers
// stdout: out [queries, heads, D]
constexpr int D = SIZE, WARPS = 4, GROUP = SHARING;
#include "cuda_host.h"

#include "common.cuh"
#include "tile_host.h"
#include "attention.cuh"

int main() {
  int heads, kv, queries, keys, part, few, parts;
  if (scanf("%d%d%d%d%d%d%d", &heads, &kv, &queries, &keys, &part, &few, &parts) != 7) return 1;
  if (heads != kv * GROUP) return 1;
  // None is left over, none begins behind the keys.
  if (part && !(begin_part(parts - 1, part, few) < keys && keys <= begin_part(parts, part, few)))
    return 2;
  const auto q = numbers(heads * queries * D), k = numbers(kv * keys * D), v = numbers(k.size());
  const auto seen = numbers(queries * keys);
  auto mask = std::make_unique<bool[]>(seen.size());
  for (size_t i = 0; i < seen.size(); i++) mask[i] = seen[i] != 0;
  std::vector<float> out(q.size());
  constexpr int NUMBERS = Part<D>::NUMBERS;
  std::vector<float> found(long(parts) * queries * heads * NUMBERS);
  const auto attend = [&](int head, int tile, int first, int end, const auto& to) {
    run_block([&, head, tile] {
      static Left<D, WARPS> left;
      attend_tile<float, D, WARPS, GROUP>(
          left, &q[head * GROUP * queries * D], queries * D, D, 1, &k[head * keys * D], D,
          &v[head * keys * D], D, Mask{mask.get(), keys, 1}, queries, tile, first, end, 1.0f / sqrtf(D),
          to);
    });
  };
  for (int head = 0; head < kv; head++)
    for (int tile = 0; tile * TILE < queries * GROUP; tile++) {
      if (!part) attend(head, tile, 0, keys, Result<float, D>{&out[head * GROUP * D], heads * D});
      for (int at = 0; part && at < parts; at++)
        attend(head, tile, begin_part(at, part, few), min(keys, begin_part(at + 1, part, few)),
               Part<D>{&found[(long(at) * queries * heads + head * GROUP) * NUMBERS],
                       heads * NUMBERS});
    }
  for (int row = 0; part && row < queries * heads; row++)
    run_block([&, row] {
      merge_parts<float, D, WARPS>(&found[row * NUMBERS], parts, long(queries) * heads * NUMBERS,
                                   &out[row * D]);
    });
  print(out);
}
