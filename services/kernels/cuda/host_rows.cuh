// Words of a result, written into the host's memory; see host_rows.py.

// This thread's share of the words, where `threads` write them together.
__device__ inline void send_words(const unsigned* from, long words, long thread, long threads,
                                  unsigned* to) {
  for (long at = thread; at < words; at += threads) to[at] = from[at];
}
