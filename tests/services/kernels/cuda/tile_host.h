// In the place of tile.cuh, whose tensor cores do not multiply floats. Test only.
template <typename T>
struct Run {
  T at[8];
};

template <typename T>
Run<T> read_run(const T* from, bool there) {
  Run<T> found = {};
  if (there) std::copy_n(from, 8, found.at);
  return found;
}

template <typename T>
void fetch_run(Run<T>* to, const T* from, bool there) {
  *to = read_run(from, there);
}

template <typename T>
void write_run(T* to, const Run<T>& run) {
  std::copy_n(run.at, 8, to);
}

template <typename T>
bool is_finite(const Run<T>& run) {
  return std::all_of(run.at, run.at + 8, [](float number) { return std::isfinite(number); });
}

void end_fetch_group() {}

template <int LEFT>
void await_fetch_groups() {}

template <typename T>
struct Four {
  T at[4];
};

// Each lane leaves its inputs where those that need them find them.
template <typename Inputs>
void add(float (&sums)[4], const Inputs& upper, const Inputs& lower, const Inputs& row) {
  static thread_local Inputs places[2][THREADS][3];
  auto& left = places[host::exchange_place()];
  const int lane = threadIdx.x % LANES, first = threadIdx.x - lane;
  left[threadIdx.x][0] = upper, left[threadIdx.x][1] = lower, left[threadIdx.x][2] = row;
  host::await_lanes();
  for (int i = 0; i < 4; i++)
    for (int part = 0; part < 4; part++)
      for (size_t k = 0; k < std::size(upper.at); k++) {
        const int output = first + lane / 4 * 4 + part;
        const int other = first + (lane % 4 * 2 + i % 2) * 4 + part;
        sums[i] += left[output][i / 2].at[k] * left[other][2].at[k];
      }
}

template <typename T>
void add_products(float (&sums)[4], const Run<T>& upper, const Run<T>& lower, const Run<T>& row) {
  add(sums, upper, lower, row);
}

template <typename T>
void add_fours(float (&sums)[4], const Four<T>& upper, const Four<T>& lower, const Four<T>& row) {
  add(sums, upper, lower, row);
}
