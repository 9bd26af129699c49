// A kernel that waits for the host, and what it reads then.

// Words of a box in the host's memory, see `services.kernels.cuda.doorbell`.
constexpr int TICKET = 0, RUNS = 1, START = 2, TOKENS = 4, POSITIONS = 36, SEEN = 68;

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
