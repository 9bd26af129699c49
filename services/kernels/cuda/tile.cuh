// Products of 16 outputs and 8 rows on the tensor cores, for half precision.
//
// A lane holds eight neighbouring inputs of an output (lane / 4), of the eighth after it, and of
// a row (lane / 4), so that it reads 16 bytes of each. Which inputs the tensor core takes to
// belong together does not matter, as long as both sides agree.

template <typename T>
struct alignas(8 * sizeof(T)) Run {
  T at[8];
};

template <typename T>
__device__ inline Run<T> read_run(const T* from, bool there) {
  const int4 found = there ? *reinterpret_cast<const int4*>(from) : make_int4(0, 0, 0, 0);
  return reinterpret_cast<const Run<T>&>(found);
}

template <typename T>
__device__ inline void write_run(T* to, const Run<T>& run) {
  *reinterpret_cast<int4*>(to) = reinterpret_cast<const int4&>(run);
}

// The exponent's bits of both halves of a word.
template <typename T>
constexpr unsigned EXPONENTS = 0x7c007c00u;
template <>
constexpr unsigned EXPONENTS<__nv_bfloat16> = 0x7f807f80u;

// Whether all of a run are numbers: an exponent of ones, and no other, carries into the sign.
template <typename T>
__device__ inline bool is_finite(const Run<T>& run) {
  constexpr unsigned ONES = EXPONENTS<T>, LOWEST = ONES & ~(ONES << 1);
  const auto* words = reinterpret_cast<const unsigned*>(&run);
  unsigned carried = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) carried |= (words[i] & ONES) + LOWEST;
  return !(carried & 0x80008000u);
}

// Begins to fetch a run into shared memory, or zeros.
template <typename T>
__device__ inline void fetch_run(Run<T>* to, const T* from, bool there) {
  const unsigned at = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
               "r"(there ? 16 : 0)
               : "memory");
}

__device__ inline void end_fetch_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most LEFT of this thread's groups are under way.
template <int LEFT>
__device__ inline void await_fetch_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

#define MULTIPLY_TILE(TYPE)                                                                      \
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE                                     \
      ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                               \
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                               \
      : "r"(upper[0]), "r"(lower[0]), "r"(upper[1]), "r"(lower[1]), "r"(row[0]), "r"(row[1]))

__device__ inline void multiply_half(float (&sums)[4], const unsigned* upper,
                                     const unsigned* lower, const unsigned* row, __half) {
  MULTIPLY_TILE("f16");
}

__device__ inline void multiply_half(float (&sums)[4], const unsigned* upper,
                                     const unsigned* lower, const unsigned* row, __nv_bfloat16) {
  MULTIPLY_TILE("bf16");
}

// Adds the products of 32 inputs: a lane has those of outputs lane / 4 and lane / 4 + 8 with rows
// 2 * (lane % 4) and the next.
template <typename T>
__device__ inline void add_products(float (&sums)[4], const Run<T>& upper, const Run<T>& lower,
                                    const Run<T>& row) {
  const auto* u = reinterpret_cast<const unsigned*>(&upper);
  const auto* l = reinterpret_cast<const unsigned*>(&lower);
  const auto* r = reinterpret_cast<const unsigned*>(&row);
  multiply_half(sums, u, l, r, T());
  multiply_half(sums, u + 2, l + 2, r + 2, T());
}

// Two inputs of a line, and the two that the tensor core takes eight places behind them.
template <typename T>
struct alignas(4 * sizeof(T)) Four {
  T at[4];
};

// Adds the products of 16 inputs, places as in `add_products`.
template <typename T>
__device__ inline void add_fours(float (&sums)[4], const Four<T>& upper, const Four<T>& lower,
                                 const Four<T>& row) {
  const auto read = [](const Four<T>& four) { return reinterpret_cast<const unsigned*>(&four); };
  multiply_half(sums, read(upper), read(lower), read(row), T());
}
