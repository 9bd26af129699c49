// The threads of a GPU's block on the host: fibers that take turns on one thread. Blocks that wait
// for each other have a thread each. Test only.
#pragma once
#include <ucontext.h>

#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

namespace host {

constexpr int LANES = 32, STACK = 256 * 1024;

struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  int index;
  int exchanges;
  bool is_done;
};

inline thread_local std::vector<Fiber> fibers;  // kept for the next block
inline thread_local int count;                  // of those that run
inline thread_local Fiber* current;
inline thread_local std::function<void(int)> body;
inline thread_local ucontext_t finished;

inline void give_way() {
  Fiber* const from = current;
  do {
    current = &fibers[(current->index + 1) % count];
    if (current == from) return;
  } while (current->is_done);
  swapcontext(&from->context, &current->context);
}

inline bool others_run() {
  for (int i = 0; i < count; i++)
    if (&fibers[i] != current && !fibers[i].is_done) return true;
  return false;
}

// A barrier of some of the fibers.
struct Barrier {
  int size, arrived = 0;
  void wait() {
    const int round = arrived++ / size;
    while (arrived < (round + 1) * size) {
      if (!others_run()) abort();  // those it waits for have ended
      give_way();
    }
  }
};

inline thread_local Barrier all{0};
inline thread_local std::vector<Barrier> simds;  // one for every 32 fibers

// Whether values go to the first or the second of two places: a fiber puts the next one down
// before others of its 32 have read the last one.
inline int exchange_place() { return current->exchanges++ % 2; }
inline void await_lanes() { simds[current->index / LANES].wait(); }

inline void start() {
  body(current->index);
  Fiber* const from = current;
  from->is_done = true;
  give_way();
  if (current == from) setcontext(&finished);
}

// Runs `function(thread)` for every thread of one block.
inline void run_block(int threads, const std::function<void(int)>& function) {
  body = function;
  count = threads;
  all = {threads};
  simds.assign((threads + LANES - 1) / LANES, {LANES});
  if (int(fibers.size()) < threads) fibers = std::vector<Fiber>(threads);
  for (int i = 0; i < threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.index = i;
    fiber.exchanges = 0;
    fiber.is_done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = STACK;
    makecontext(&fiber.context, start, 0);
  }
  current = &fibers[0];
  swapcontext(&finished, &current->context);
}

}  // namespace host
