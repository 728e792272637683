// Collectives over point-to-point messages, for ranks that share no memory. Each file is one way to do it; select.cpp
// chooses.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "../call.h"
#include "../link.h"

namespace neuron::collectives {

constexpr size_t kSegmentBytes = 2 << 20;

// Memory for what travels: unlike the frame of a coroutine, it outlives an operation that fails. One operation after
// the other uses it, because memory that is touched for the first time costs more than the network.
class Scratch {
 public:
  std::byte* take(size_t bytes) {
    if (used_ == blocks_.size()) blocks_.emplace_back();
    Block& block = blocks_[used_++];
    if (block.bytes < bytes) block = {std::make_unique_for_overwrite<std::byte[]>(bytes), bytes};
    return block.data.get();
  }
  // What was taken is free again; of big messages nothing is kept.
  void reset() {
    used_ = 0;
    std::erase_if(blocks_, [](const Block& block) { return block.bytes > kSegmentBytes; });
  }

 private:
  struct Block {
    std::unique_ptr<std::byte[]> data;
    size_t bytes = 0;
  };
  std::vector<Block> blocks_;
  size_t used_ = 0;
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

inline void copy(const Piece& to, const Piece& from) {
  if (to.data != from.data && to.bytes) std::memcpy(to.data, from.data, to.bytes);
}

// Big pieces travel in segments, some at once: while one is added up, others are on their way, and little memory is
// needed.
constexpr int kSegmentsAtOnce = 4;
using Room = std::array<std::byte*, 2>;  // for two segments

inline Piece segment_of(const Piece& piece, size_t offset) {
  const size_t begin = std::min(offset, piece.bytes);
  return {piece.data + begin, std::min(piece.bytes - begin, kSegmentBytes)};
}

// Runs part(offset, first step, room), a task of `steps` steps, for all segments of pieces that have `most` bytes at
// most.
template <class Part>
Task<> in_segments(Party& party, size_t most, int steps, Part part) {
  auto lane = [](Party& party, size_t most, Part& part, int number, int steps) -> Task<> {
    const size_t bytes = std::min(most, kSegmentBytes);
    const Room room{party.scratch.take(bytes), party.scratch.take(bytes)};
    for (size_t offset = number * kSegmentBytes; offset < most; offset += kSegmentsAtOnce * kSegmentBytes)
      co_await part(offset, static_cast<uint64_t>(number * steps), room);
  };
  std::vector<Task<>> lanes;
  for (int i = 0; i < kSegmentsAtOnce && i * kSegmentBytes < most; i++)
    lanes.push_back(lane(party, most, part, i, steps));
  co_await all(std::move(lanes));
}

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
