// Every collective over a bulletin board: each rank reads what it needs straight from the windows of the others.
#pragma once

#include "../board.h"
#include "../call.h"

namespace neuron::collectives::mesh {

Task<> run(Board& board, uint64_t operation, const Call& call);

}  // namespace neuron::collectives::mesh
