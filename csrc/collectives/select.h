// Which algorithm a collective uses. No torch here.
#pragma once

#include <cstddef>

#include "types.h"

namespace neuron::collectives {

enum class Algorithm : uint8_t { mesh, ring, doubling, tree, direct, hierarchical };
const char* name_of(Algorithm a);

struct Topology {
  int ranks = 1, hosts = 1;
  bool even = true;  // every host has the same number of ranks
};

// Whether few steps are better than few bytes, among ranks on several hosts. Between two, they are as many bytes.
bool steps_count(size_t bytes, int ranks);

// By operation, size and topology; TORCH_NEURON_COLLECTIVE_ALGORITHM (`all_reduce=ring,broadcast=tree`) overrides it.
// Throws std::invalid_argument if the override names what does not exist.
Algorithm choose(Kind kind, size_t bytes, const Topology& topology);

}  // namespace neuron::collectives
