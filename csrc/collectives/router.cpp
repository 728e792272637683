#include "router.h"

#include "engine.h"

namespace neuron::collectives {

namespace {

constexpr int64_t kProbePeriodNs = 200'000;

struct Busy {
  std::map<int, int>& counts;
  int rank;
  Busy(std::map<int, int>& c, int r) : counts(c), rank(r) { counts[r]++; }
  Busy(const Busy&) = delete;
  ~Busy() {
    if (--counts[rank] == 0) counts.erase(rank);
  }
};

}  // namespace

Task<> Router::send(int to, uint64_t tag, const std::byte* data, size_t bytes) {
  Busy busy(busy_, to);
  if (remote_ranks_.count(to))
    co_await remote_->send(to, tag, data, bytes);
  else
    co_await local_->send(to, tag, data, bytes);
}

Task<int> Router::receive(int from, uint64_t tag, std::byte* data, size_t bytes) {
  if (from == kAnySource && !remote_ranks_.empty()) from = co_await find_sender(tag);
  Busy busy(busy_, from);
  if (!remote_ranks_.count(from)) co_return co_await local_->receive(from, tag, data, bytes);
  co_await remote_->receive(from, tag, data, bytes);
  co_return from;
}

// Asks shared memory and one rank of the other hosts after the other.
Task<int> Router::find_sender(uint64_t tag) {
  while (true) {
    int from = kAnySource;
    if (local_->probe(tag, from)) co_return from;
    for (int rank : remote_ranks_)
      if (co_await remote_->probe(rank, tag)) co_return rank;
    const int64_t next = clock_ns() + kProbePeriodNs;
    co_await until([next] { return clock_ns() >= next; });
  }
}

std::vector<int> Router::busy() const {
  std::vector<int> out;
  for (auto& [rank, count] : busy_)
    if (rank != kAnySource) out.push_back(rank);
  return out;
}

}  // namespace neuron::collectives
