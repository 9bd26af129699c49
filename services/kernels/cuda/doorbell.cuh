// A kernel that waits for the host, and what it reads then.

// Words of a box in the host's memory, see `services.kernels.cuda.doorbell`.
constexpr int TICKET = 0, RUNS = 1, START = 2, TOKENS = 4, POSITIONS = 36, SEEN = 68;

// The rest of a box for branches, see `services.kernels.cuda.branch_doorbell`.
constexpr int RULE_WORDS = 6, FORKS = 68, RULES = 164, VIEWS = 1316, VIEW = 512;
constexpr int DONE = VIEWS + 32 * VIEW / 32, FOUND = DONE + 12, FOUND_WORDS = 1024;

// Whether the host rings for this pass within so many nanoseconds, and has it run; one thread.
__device__ inline bool await_ring(const volatile int* box, int ticket, unsigned long long timeout) {
  unsigned long long begun, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
  while (box[TICKET] != ticket) {
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    if (now - begun > timeout) return false;
    __nanosleep(200);
  }
  __threadfence_system();
  return box[RUNS] != 0;
}

// Whether a row sees a slot: those before the pass, and of its own those whose bits are set.
__device__ inline bool sees(int slot, int start, int rows, unsigned bits) {
  const int own = slot - start;
  return own < 0 || (own < rows && (bits >> own & 1u));
}

// Whether a row of branches, which go to the slots from `first` on, sees a slot: itself and, once
// the bell was rung, those before the views, and of these what the box says.
__device__ inline bool sees_branch(int slot, int row, int first, bool rang, const int* box) {
  const int at = slot - box[START], word = VIEWS + (row * VIEW + at) / 32;
  if (slot == first + row || !rang) return slot == first + row;
  return at < 0 || (at < VIEW && (unsigned(box[word]) >> at % 32 & 1u));
}

// The guess of this rank, other than the excluded token.
__device__ inline int pick_guess(const float* ids, int width, int rank, int excluded) {
  int at = 0;
  for (; at < width - 1; at++)
    if (int(ids[at]) != excluded && rank-- == 0) break;
  return int(ids[at]);
}

// Writes what was found after a pass to a box, and then that it is there; one block.
__device__ inline void send_found(const float* found, int count, int pass, int ticket, int* box) {
  float* to = reinterpret_cast<float*>(box + FOUND + pass * FOUND_WORDS);
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = found[i];
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x == 0) *const_cast<volatile int*>(box + DONE + pass) = ticket;
}
