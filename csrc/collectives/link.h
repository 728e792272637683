// Point-to-point messages between the ranks of a group. No torch here.
#pragma once

#include <cstddef>
#include <cstdint>

#include "task.h"

namespace neuron::collectives {

constexpr int kAnySource = -1;

// The receiver expected another size than the sender sent.
struct LengthMismatch {
  int sender;
  uint64_t sent, expected;
};

class Link {
 public:
  virtual ~Link() = default;
  // Messages with one tag between two ranks arrive in order. Small ones are done once they are on their way; others
  // when the receiver has them.
  virtual Task<> send(int to, uint64_t tag, const std::byte* data, size_t bytes) = 0;
  // Returns the sender. The size must be the sender's.
  virtual Task<int> receive(int from, uint64_t tag, std::byte* data, size_t bytes) = 0;
};

}  // namespace neuron::collectives
