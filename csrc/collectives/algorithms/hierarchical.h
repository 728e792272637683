#pragma once

#include "../board.h"
#include "link_algorithms.h"

namespace neuron::collectives::hierarchical {

// all_reduce in three stages: within each host a reduce_scatter through shared memory; between the hosts an all_reduce
// of each slice among the ranks that hold it (`across`); within each host an all_gather. The network carries every byte
// once per host instead of once per rank.
Task<> all_reduce(Board& board, Party& across, uint64_t operation, const Call& call, int ranks);

}  // namespace neuron::collectives::hierarchical
