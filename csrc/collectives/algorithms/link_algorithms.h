// Collectives over point-to-point messages, for ranks that share no memory. Each file is one way to do it; select.cpp
// chooses.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "../call.h"
#include "../link.h"

namespace neuron::collectives {

// Memory of an operation for what travels: unlike the frame of a coroutine, it outlives an operation that fails.
class Scratch {
 public:
  std::byte* take(size_t bytes) {
    return blocks_.emplace_back(std::make_unique_for_overwrite<std::byte[]>(bytes)).get();
  }

  void clear() { blocks_.clear(); }

 private:
  std::vector<std::unique_ptr<std::byte[]>> blocks_;
};

// The ranks that take part, in order, as the link names them; `me` is this rank's place.
struct Party {
  Link& link;
  std::vector<int> ranks;
  int me;
  uint64_t tag;  // of this operation; algorithms add small numbers
  Scratch& scratch;
  int size() const { return static_cast<int>(ranks.size()); }
  Task<> send(int to, uint64_t step, const std::byte* data, size_t bytes) {
    return link.send(ranks[to], tag + step, data, bytes);
  }
  Task<int> receive(int from, uint64_t step, std::byte* data, size_t bytes) {
    return link.receive(ranks[from], tag + step, data, bytes);
  }
};

// Sends to one member and receives from another, side by side.
Task<> exchange(Party& party, int to, const std::byte* out, size_t out_bytes, int from, std::byte* in, size_t in_bytes,
                uint64_t step);

namespace ring {
// In place; bandwidth-optimal: every rank sends and receives 2 (n-1)/n of the data, in 2 (n-1) steps.
Task<> all_reduce(Party& party, const Call& call);
Task<> reduce_scatter(Party& party, const Call& call);
Task<> all_gather(Party& party, const Call& call);
}  // namespace ring

namespace doubling {
// log2(n) steps with all of the data: for small messages.
Task<> all_reduce(Party& party, const Call& call);
Task<> barrier(Party& party);
}  // namespace doubling

namespace tree {
// log2(n) levels.
Task<> broadcast(Party& party, const Call& call);
Task<> reduce(Party& party, const Call& call);
}  // namespace tree

namespace direct {
// Every pair that has something to say talks to each other: all_to_all, gather, scatter.
Task<> exchange_all(Party& party, const Call& call);
}  // namespace direct

}  // namespace neuron::collectives
