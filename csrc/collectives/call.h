// A collective as the algorithms see it: bytes in, bytes out. No torch here.
#pragma once

#include <cstddef>
#include <vector>

#include "types.h"

namespace neuron::collectives {

struct Piece {
  std::byte* data = nullptr;  // null: this rank has no such piece
  size_t bytes = 0;
};

// Inputs and outputs are one piece, or one per rank, or none, as the operation and the rank's role say. all_reduce
// works in place when both pieces are the same memory.
struct Call {
  Signature signature;
  std::vector<Piece> in, out;
  size_t most = 0;      // bytes of the biggest piece that one rank sends; the same on all ranks where they can know it
  bool uneven = false;  // all_to_all with pieces of any size: `most` is this rank's own
};

}  // namespace neuron::collectives
