// A chain of draft tokens by blocks that stay on the device until the last one; see persistent.py.
//
// A pass is a list of steps, each divided among all blocks, which wait for each other in between.

constexpr int MOST_DEPTHS = 16;  // of a chain
constexpr int MOST_PARTS = 16;   // of the keys, each with a block of its own
constexpr int PART_STEP = 128;   // a part's keys are a multiple of it
constexpr int ALONE = 256;       // keys that one block takes, if there are no more
constexpr int MOST_BLOCKS = 1024;
constexpr int MOST_SPINS = 1 << 20;

// Words of a call, in the host's memory and then on the device: the depths done before, the number
// of rows, their first slot, the number of depths; the rows' tokens, and the rule of each depth.
constexpr int CALLED = 0, COUNT = 1, FIRST = 2, DEPTHS = 3, FED = 4;
constexpr int RULES = FED + MOST_ROWS, CALL_WORDS = RULES + MOST_DEPTHS * RULE_WORDS;
// Words of the answer: the depths done in all calls, then each one's token and confidence.
constexpr int DONE = 128, DRAFTED = DONE + 2;

template <typename T>
struct Layer {
  const T *gain, *qkv, *bias, *head_gains, *output, *mlp_gain, *gate_up, *down;
  T *keys, *values;  // [KV_HEADS, slots, D]
};

template <typename T>
struct Ends {
  const T *embedding, *gain, *head;
  const int* ids;  // of the head's columns
};

// What a pass leaves for its next steps.
template <typename T, int D, int HEADS, int KV_HEADS, int WIDTH, int HIDDEN, int COLUMNS>
struct Scratch {
  static constexpr int ALL = HEADS + 2 * KV_HEADS;
  unsigned long long arrived;  // blocks at all barriers so far
  unsigned call[CALL_WORDS];
  Best best[MOST_BLOCKS];  // of each block's columns
  float rotations[MOST_ROWS][D / 2][2];  // cosine and sine of the rows' angles
  alignas(16) float parts[MOST_PARTS * MOST_ROWS * HEADS * Part<D>::NUMBERS];
  alignas(16) T x[MOST_ROWS * WIDTH];
  alignas(16) T qkv[MOST_ROWS * ALL * D];
  alignas(16) T attended[MOST_ROWS * HEADS * D];
  alignas(16) T gated[MOST_ROWS * HIDDEN];
  alignas(16) T logits[COLUMNS];
};

// A barrier of all blocks, after which each sees what the others have written. False if one of them
// did not arrive: then it has no place on the device.
__device__ inline bool sync_grid(unsigned long long* arrived, int blocks) {
  __shared__ bool arrived_all;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const unsigned long long goal = (atomicAdd(arrived, 1ull) / blocks + 1) * blocks;
    int spins = 0;
    while (*static_cast<volatile unsigned long long*>(arrived) < goal && spins < MOST_SPINS) {
      __nanosleep(0);
      spins++;
    }
    __threadfence();
    arrived_all = spins < MOST_SPINS;
  }
  __syncthreads();
  return arrived_all;
}

struct Causal {
  int start;
  __device__ bool operator()(int row, int key) const { return key <= start + row; }
};

template <typename T, int D, int HEADS, int KV_HEADS, int ROTATED, int WIDTH, int HIDDEN,
          int COLUMNS, int KIND, int WARPS>
struct Drafting {
  using Own = Scratch<T, D, HEADS, KV_HEADS, WIDTH, HIDDEN, COLUMNS>;
  static constexpr int GROUP = HEADS / KV_HEADS, ALL = Own::ALL;
  using Narrow = Product<T, WIDTH, false, WARPS>;
  using Attended = Product<T, HEADS * D, false, WARPS>;
  using Gated = Product<T, WIDTH, true, WARPS>;
  using Down = Product<T, HIDDEN, false, WARPS>;
  // Writes a query's result, or what `Part` does of a part of its keys. Divides once: code that is
  // run once is fetched as slowly as it is long.
  struct Found {
    T* whole;  // [rows, HEADS, D], or null
    float* part;
    __device__ void write(const Held<D>& held, int r, float sum, int row, int head) const {
      const float factor = whole == nullptr ? 1.0f : sum == 0.0f ? 0.0f : 1.0f / sum;
      const long at = long(row) * HEADS + head;
      float* to = part + at * Part<D>::NUMBERS;
#pragma unroll
      for (int b = 0; b < D / 64; b++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int place = 64 * b + 8 * (2 * (threadIdx.x % 4) + i);
          Run<T> found;
#pragma unroll
          for (int j = 0; j < 8; j++) {
            const float value = held.values[8 * b + j][2 * r + i] * factor;
            if (whole == nullptr) to[place + j] = value;
            found.at[j] = T(value);
          }
          if (whole != nullptr) write_run(whole + at * D + place, found);
        }
      if (whole == nullptr && threadIdx.x % 4 == 0) to[D] = held.highest[r], to[D + 1] = sum;
    }
  };
  union Memory {  // of a block
    typename Gated::Sums sums;
    typename Narrow::Sums narrow;
    Left<D, WARPS> left;
    alignas(16) T normed[WIDTH];
  };

  Memory& memory;
  T* queries;  // [TILE, D], of the block
  Own& own;
  const Ends<T>& ends;
  const float* speeds;
  float eps, head_eps, scale;
  int slots, block, blocks;

  // Calls work(unit) for this block's share; each call may use the same memory.
  template <typename Work>
  __device__ void share(int units, const Work& work) const {
    for (int unit = block; unit < units; unit += blocks) {
      __syncthreads();
      work(unit);
    }
  }

  // As `rotate_head`, by angles whose cosine and sine are known.
  __device__ void rotate_head(const T* from, const T* gain, int rotated,
                              const float (*rotations)[2], T* to) const {
    const int lane = threadIdx.x % 32, half = rotated / 2;
    float share = 1.0f;
    if (gain != nullptr) {
      float squares = 0.0f;
      for (int i = lane; i < D; i += 32) squares += float(from[i]) * float(from[i]);
      share = rsqrtf(summed(squares) / D + head_eps);
    }
    const auto read = [&](int i) {
      return gain == nullptr ? float(from[i]) : float(T(float(from[i]) * share * float(gain[i])));
    };
    for (int i = lane; i < half; i += 32) {
      const float first = read(i), second = read(i + half);
      const float cosine = rotations[i][0], sine = rotations[i][1];
      to[i] = T(first * cosine - second * sine);
      to[i + half] = T(first * sine + second * cosine);
    }
    for (int i = rotated + lane; i < D; i += 32) to[i] = T(read(i));
  }

  // Rotates a tile's queries, and this part's new keys, which are stored with their values; then
  // attends. A new key is stored by each block that reads it, since none waits for another.
  __device__ void attend(const Layer<T>& layer, int rows, int start, int parts, int length) const {
    const int tiles = (rows * GROUP + TILE - 1) / TILE, warp = threadIdx.x / 32;
    share(KV_HEADS * tiles * parts, [&](int unit) {
      const int part = unit % parts, tile = unit / parts % tiles, head = unit / parts / tiles;
      const int first = part * length, end = min(first + length, start + rows);
      const long of_head = long(head) * slots * D;
      const T* gain = layer.head_gains;
      const int tile_queries = min(rows * GROUP - TILE * tile, TILE);
      for (int i = warp; i < tile_queries + 2 * rows; i += WARPS) {
        const bool is_query = i < tile_queries, is_value = !is_query && (i - tile_queries) % 2;
        const int at = TILE * tile + i, row = is_query ? at / GROUP : (i - tile_queries) / 2;
        if (!is_query && (start + row < first || start + row >= end)) continue;
        const int group = is_query ? head * GROUP + at % GROUP
                                   : HEADS + (is_value ? KV_HEADS : 0) + head;
        const T* own_gain = gain == nullptr || is_value ? nullptr : is_query ? gain : gain + D;
        T* stored = (is_value ? layer.values : layer.keys) + of_head + long(start + row) * D;
        rotate_head(own.qkv + (row * ALL + group) * D, own_gain, is_value ? 0 : ROTATED,
                  own.rotations[row], is_query ? queries + i * D : stored);
      }
      __syncthreads();
      const Found found{parts > 1 ? nullptr : own.attended + head * GROUP * D,
                        own.parts + (long(part) * rows * HEADS + head * GROUP) * Part<D>::NUMBERS};
      attend_tile<T, D, WARPS, GROUP>(memory.left, queries - long(TILE) * tile * D, D, GROUP * D,
                                      1, layer.keys + of_head, D, layer.values + of_head, D,
                                      Causal{start}, rows, tile, first, end, scale, found);
    });
  }

  // Attends, in parts if there are many keys; false if the barrier fails.
  template <typename Sync>
  __device__ bool attend_all(const Layer<T>& layer, int rows, int start, const Sync& sync) const {
    const int keys = start + rows;
    const int wanted = keys <= ALONE ? 1 : min((keys + PART_STEP - 1) / PART_STEP, MOST_PARTS);
    const int share_of = (keys + wanted - 1) / wanted;
    const int length = (share_of + PART_STEP - 1) / PART_STEP * PART_STEP;
    const int parts = (keys + length - 1) / length;
    attend(layer, rows, start, parts, length);
    if (parts == 1) return true;
    if (!sync()) return false;
    constexpr int NUMBERS = Part<D>::NUMBERS;
    share(rows * HEADS, [&](int unit) {
      merge_parts<T, D, WARPS>(own.parts + long(unit) * NUMBERS, parts,
                               long(rows) * HEADS * NUMBERS, own.attended + long(unit) * D);
    });
    return true;
  }

  // Runs one layer, whose first weights are fetched, and fetches `next`, those of the next one, if
  // there is one; false if the barrier fails.
  template <typename Sync>
  __device__ bool run_layer(const Layer<T>& layer, Narrow& narrow, int rows, int start,
                            const T* next, const Sync& sync) const {
    narrow.run(memory.narrow, own.x, layer.gain, eps, layer.bias, 0, rows, blocks, own.qkv);
    if (!sync() || !attend_all(layer, rows, start, sync)) return false;
    Attended output;
    output.fetch(layer.output, WIDTH, block);
    if (!sync()) return false;
    output.run(reinterpret_cast<typename Attended::Sums&>(memory), own.attended, nullptr, eps,
               own.x, WIDTH, rows, blocks, own.x);
    Gated gated;
    gated.fetch(layer.gate_up, HIDDEN, block);
    if (!sync()) return false;
    gated.run(memory.sums, own.x, layer.mlp_gain, eps, nullptr, 0, rows, blocks, own.gated);
    Down down;
    down.fetch(layer.down, WIDTH, block);
    if (!sync()) return false;
    down.run(reinterpret_cast<typename Down::Sums&>(memory), own.gated, nullptr, eps, own.x, WIDTH,
             rows, blocks, own.x);
    if (next != nullptr) narrow.fetch(next, ALL * D, block);
    return next == nullptr || sync();
  }

  __device__ const unsigned* rule_of(int depth) const {
    return own.call + RULES + depth * RULE_WORDS;
  }

  // One block reads the call, or tells the token after the last depth; then it embeds the tokens
  // and finds the angles of their positions.
  __device__ void begin(unsigned* box, int depth) const {
    if (depth == 0) {
      for (int i = threadIdx.x; i < CALL_WORDS; i += WARPS * 32)
        own.call[i] = static_cast<volatile unsigned*>(box)[i];
    } else {
      __shared__ int token;
      __shared__ float named, sure;
      if constexpr (KIND == 2) {
        guess_tokens<1, KIND, WARPS>(Row<T>{own.logits, 1}, COLUMNS, ends.ids, rule_of(depth - 1),
                                     &token, &named, &sure);
      } else {
        Best best;
        for (int at = threadIdx.x; at < blocks; at += WARPS * 32) best.add(own.best[at]);
        best = find_best_of_block<WARPS>(best);
        if (threadIdx.x == 0) token = ends.ids[column_of(best.rank)], sure = best.share();
      }
      if (threadIdx.x == 0) {
        volatile unsigned* to = box;
        own.call[FED] = token;
        to[DRAFTED + 2 * depth] = token;
        to[DRAFTED + 2 * depth + 1] = __float_as_uint(sure);
        __threadfence_system();
        to[DONE] = own.call[CALLED] + depth;
      }
    }
    __syncthreads();
    const int fed = own.call[COUNT], rows = depth == 0 ? fed : 1;
    const int start = own.call[FIRST] + (depth == 0 ? 0 : fed + depth - 1);
    for (int i = threadIdx.x; i < rows * (ROTATED / 2); i += WARPS * 32) {
      const int row = i / (ROTATED / 2), pair = i % (ROTATED / 2);
      float* rotation = own.rotations[row][pair];
      sincosf(float(start + row) * speeds[pair], rotation + 1, rotation);
    }
    for (int i = 8 * threadIdx.x; i < rows * WIDTH; i += 8 * WARPS * 32) {
      const long token = own.call[FED + i / WIDTH];
      write_run(own.x + i, read_run(ends.embedding + token * WIDTH + i % WIDTH, true));
    }
  }

  __device__ void draft(const Layer<T>* layers, int count, unsigned* box) const {
    const auto sync = [&] { return sync_grid(&own.arrived, blocks); };
    for (int depth = 0;; depth++) {
      Narrow narrow;
      narrow.fetch(layers[0].qkv, ALL * D, block);
      if (block == 0) begin(box, depth);
      if (depth > 0 && depth == int(own.call[DEPTHS])) return;
      if (!sync()) return;
      const int fed = own.call[COUNT], rows = depth == 0 ? fed : 1;
      const int start = own.call[FIRST] + (depth == 0 ? 0 : fed + depth - 1);
      for (int at = 0; at < count; at++) {
        const T* next = at + 1 < count ? layers[at + 1].qkv : nullptr;
        if (!run_layer(layers[at], narrow, rows, start, next, sync)) return;
      }
      Head<T, WIDTH, COLUMNS, KIND, WARPS> head;
      head.fetch(ends.head, block, blocks);
      if (!sync()) return;
      const Best best = head.run(own.x + (rows - 1) * WIDTH, ends.gain, eps, memory.normed,
                                 ends.ids, rule_of(depth), blocks, own.logits);
      if (threadIdx.x == 0) own.best[block] = best;
      if (!sync()) return;
    }
  }
};
