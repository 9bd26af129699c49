// Branches of draft tokens by blocks that stay on the device until the last one; see persistent.py.
//
// A pass is a list of steps, each divided among all blocks, which wait for each other in between.

constexpr int MOST_DEPTHS = 16;  // of a branch
constexpr int MOST_PARTS = 16;   // of the keys, each with a block of its own
constexpr int PART_STEP = 128;   // a part's keys are a multiple of it
constexpr int ALONE = 256;       // keys that one block takes, if there are no more
constexpr int NAMED = 8;         // tokens after each branch
constexpr int MOST_SCANS = 16;   // parts of a row of logits, each with a block of its own
constexpr int MOST_SPINS = 1 << 20;

// Words of a call, in the host's memory and then on the device: the depths done before; of the trunk
// how many tokens are fed, and the slot of the first; how many branches and depths; the position
// that the first rule is for; 1 once the host wants no further depth; the trunk's tokens and then
// the first of each branch; the last slot of the trunk before each branch; the rule of each
// position. Without branches each token of the trunk is the first of one.
constexpr int CALLED = 0, COUNT = 1, FIRST = 2, BRANCHES = 3, DEPTHS = 4, ORIGIN = 5, STOPPED = 6;
constexpr int FED = 7;
constexpr int FORKS = FED + MOST_ROWS, RULES = FORKS + MOST_ROWS;
constexpr int MOST_RULES = 48;
constexpr int CALL_WORDS = RULES + MOST_RULES * RULE_WORDS;
// Words of the answer: the depths done in all calls, or given up, then the tokens after each branch
// at each depth, the most likely first, and their confidences.
constexpr int DONE = 352, FOUND = 368, FOUND_WORDS = NAMED + NAMED;
static_assert(CALL_WORDS <= DONE);

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
  float found[MOST_ROWS][FOUND_WORDS];
  float scanned[MOST_ROWS][MOST_SCANS][2 * CANDIDATES + 1];  // `Best` of parts of the logits
  Rotation rotations[MOST_ROWS][D / 2];  // of the rows' positions
  alignas(16) float parts[MOST_PARTS * MOST_ROWS * HEADS * Part<D>::NUMBERS];
  alignas(16) T x[MOST_ROWS * WIDTH];
  alignas(16) T qkv[MOST_ROWS * ALL * D];
  alignas(16) T attended[MOST_ROWS * HEADS * D];
  alignas(16) T gated[MOST_ROWS * HIDDEN];
  alignas(16) T logits[MOST_ROWS * COLUMNS];
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

// Rows that are computed together, with neighbouring slots: first some of the trunk, then one of
// each branch. The branches' slots are `scratch` and those after it, in turn.
struct Pass {
  int depth, rows, of_trunk;
  int first_named;  // row whose next tokens are named, like those of all after it
  int slot, scratch, stride;
  const unsigned* forks;

  __device__ bool operator()(int row, int key) const {  // whether it sees that slot
    if (row < of_trunk) return key <= slot + row;
    const int branch = row - of_trunk;
    const bool shared = key <= int(forks[branch]);
    return shared || (key >= scratch && ((key - scratch) & (stride - 1)) == branch);
  }
};

template <typename T, int D, int HEADS, int KV_HEADS, int ROTATED, int WIDTH, int HIDDEN,
          int COLUMNS, int KIND, int WARPS>
struct Drafting {
  using Own = Scratch<T, D, HEADS, KV_HEADS, WIDTH, HIDDEN, COLUMNS>;
  using Named = Best<NAMED, KIND>;
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

  // Rotates a tile's queries, and this part's new keys, which are stored with their values; then
  // attends. A new key is stored by each block that reads it, since none waits for another.
  __device__ void attend(const Layer<T>& layer, const Pass& pass, int parts, int length) const {
    const int rows = pass.rows, start = pass.slot;
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
        const Rotation* rotations = own.rotations[row];
        rotate_head<T, D>(own.qkv + (row * ALL + group) * D, own_gain, head_eps,
                          is_value ? 0 : ROTATED, [&](int pair) { return rotations[pair]; },
                          is_query ? queries + i * D : stored);
      }
      __syncthreads();
      const Found found{parts > 1 ? nullptr : own.attended + head * GROUP * D,
                        own.parts + (long(part) * rows * HEADS + head * GROUP) * Part<D>::NUMBERS};
      attend_tile<T, D, WARPS, GROUP>(memory.left, queries - long(TILE) * tile * D, D, GROUP * D,
                                      1, layer.keys + of_head, D, layer.values + of_head, D,
                                      pass, rows, tile, first, end, scale, found);
    });
  }

  // Attends, in parts if there are many keys; false if the barrier fails.
  template <typename Sync>
  __device__ bool attend_all(const Layer<T>& layer, const Pass& pass, const Sync& sync) const {
    const int rows = pass.rows, keys = pass.slot + rows;
    const int wanted = keys <= ALONE ? 1 : min((keys + PART_STEP - 1) / PART_STEP, MOST_PARTS);
    const int share_of = (keys + wanted - 1) / wanted;
    const int length = (share_of + PART_STEP - 1) / PART_STEP * PART_STEP;
    const int parts = (keys + length - 1) / length;
    attend(layer, pass, parts, length);
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
  __device__ bool run_layer(const Layer<T>& layer, Narrow& narrow, const Pass& pass, const T* next,
                            const Sync& sync) const {
    const int rows = pass.rows;
    narrow.run(memory.narrow, own.x, layer.gain, eps, layer.bias, 0, rows, blocks, own.qkv);
    if (!sync() || !attend_all(layer, pass, sync)) return false;
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

  __device__ Pass pass_of(int depth) const {
    const unsigned* call = own.call;
    const int fed = call[COUNT], branches = call[BRANCHES], first = call[FIRST];
    int stride = 1;
    while (stride < branches) stride *= 2;
    const int of_trunk = depth == 0 ? fed : 0, first_named = branches > 0 ? of_trunk : 0;
    const int slot = depth == 0 ? first : first + fed + depth * stride;
    return Pass{depth, of_trunk + branches, of_trunk, first_named, slot, first + fed, stride,
                call + FORKS};
  }

  // Embeds a row, and finds the angles of its position.
  __device__ void place(int row, long token, int position) const {
    const Angles angles{speeds, float(position)};
    for (int pair = threadIdx.x; pair < ROTATED / 2; pair += WARPS * 32)
      own.rotations[row][pair] = angles(pair);
    for (int i = 8 * threadIdx.x; i < WIDTH; i += 8 * WARPS * 32)
      write_run(own.x + row * WIDTH + i, read_run(ends.embedding + token * WIDTH + i, true));
  }

  // Embeds the rows of the first pass, whose tokens are those of the call.
  __device__ void begin() const {
    const int fed = own.call[COUNT];
    share(fed + own.call[BRANCHES], [&](int row) {
      const int position = row < fed ? own.call[FIRST] + row : own.call[FORKS + row - fed] + 1;
      place(row, own.call[FED + row], position);
    });
  }

  // Position of the token after a branch, and its rule.
  __device__ int position_of(const Pass& pass, int branch) const {
    return own.call[FORKS + branch] + 2 + pass.depth;
  }
  __device__ const unsigned* rule_of(const Pass& pass, int branch) const {
    return own.call + RULES + (position_of(pass, branch) - int(own.call[ORIGIN])) * RULE_WORDS;
  }

  __device__ Named* scanned(int branch) const {
    return reinterpret_cast<Named*>(own.scanned[branch]);
  }

  // Divides each branch's logits, and finds the best columns of each part.
  __device__ void scan(const Pass& pass, int named, int parts) const {
    share(named * parts, [&](int unit) {
      const int branch = unit / parts, part = unit % parts;
      const Row<T> logits{own.logits + long(branch) * COLUMNS, 1};
      scan_columns<NAMED, KIND, WARPS>(logits, COLUMNS * part / parts, COLUMNS * (part + 1) / parts,
                                       ends.ids, rule_of(pass, branch), scanned(branch)[part]);
    });
  }

  // Names the tokens after each branch, and embeds the likeliest for the next pass.
  __device__ void choose(const Pass& pass, int named, int parts) const {
    share(named, [&](int branch) {
      __shared__ Named best;
      __shared__ int token;
      float* found = own.found[branch];
      join_parts<NAMED, KIND, WARPS>(scanned(branch), parts, best);
      name_tokens<NAMED, KIND>(best, ends.ids, rule_of(pass, branch), &token, found, found + NAMED);
      __syncthreads();
      place(branch, token, position_of(pass, branch));
    });
  }

  // Writes what was found at the depth before into the host's memory, and how many are done then.
  __device__ void report(int depth, unsigned done, volatile unsigned* box) const {
    const int count = own.call[BRANCHES] > 0 ? own.call[BRANCHES] : own.call[COUNT];
    for (int i = threadIdx.x; i < count * FOUND_WORDS; i += WARPS * 32)
      box[FOUND + (depth - 1) * MOST_ROWS * FOUND_WORDS + i] = __float_as_uint((&own.found[0][0])[i]);
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) box[DONE] = done;
  }

  // Runs all layers over a pass, whose rows are embedded, and then the head.
  template <typename Sync>
  __device__ bool run_pass(const Layer<T>* layers, int count, Narrow& narrow, const Pass& pass,
                           const Sync& sync) const {
    for (int at = 0; at < count; at++) {
      const T* next = at + 1 < count ? layers[at + 1].qkv : nullptr;
      if (!run_layer(layers[at], narrow, pass, next, sync)) return false;
    }
    Head<T, WIDTH, COLUMNS, WARPS> head;
    head.fetch(ends.head, block, blocks);
    if (!sync()) return false;
    head.run(own.x + pass.first_named * WIDTH, ends.gain, eps, pass.rows - pass.first_named, blocks,
             own.logits);
    return sync();
  }

  __device__ void draft(const Layer<T>* layers, int count, unsigned* box) const {
    const auto sync = [&] { return sync_grid(&own.arrived, blocks); };
    if (block == 0)
      for (int i = threadIdx.x; i < CALL_WORDS; i += WARPS * 32)
        own.call[i] = static_cast<volatile unsigned*>(box)[i];
    Narrow narrow;
    narrow.fetch(layers[0].qkv, ALL * D, block);
    if (!sync()) return;
    const int depths = own.call[DEPTHS];
    const bool is_last = block == blocks - 1;  // it often has no share of a short step
    begin();
    for (int depth = 0; sync(); depth++) {
      const bool ends = depth == depths || (depth > 0 && own.call[STOPPED]);
      if (is_last && depth > 0) report(depth, own.call[CALLED] + (ends ? depths : depth), box);
      if (ends) return;
      const Pass pass = pass_of(depth);
      if (!run_pass(layers, count, narrow, pass, sync)) return;
      const int named = pass.rows - pass.first_named;
      const int parts = max(1, min(min(blocks / named, MOST_SCANS), COLUMNS / Named::COUNT));
      scan(pass, named, parts);
      narrow.fetch(layers[0].qkv, ALL * D, block);
      if (!sync()) return;
      choose(pass, named, parts);
      if (is_last && threadIdx.x == 0)
        own.call[STOPPED] = static_cast<volatile unsigned*>(box)[STOPPED];
    }
  }
};
