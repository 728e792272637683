// The fuser: a graph of nodes with known liveness becomes programs.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "graph.h"

namespace neuron::fusion {

// One program of a plan, and where its accesses and numbers come from.
struct Launch {
  TileProgram program;
  std::vector<uint16_t> operands;                      // of each access
  std::vector<std::pair<uint16_t, uint16_t>> numbers;  // node and position of each scalar of the program
  std::vector<uint16_t> nodes;
  uint16_t space, row_space;  // kNone without reductions
};

struct Plan {
  std::vector<Launch> launches;
  std::vector<uint16_t> temporaries;  // dead storages that need memory because programs hand values on through them
  uint32_t stores_elided = 0;         // results that no program writes
  uint32_t fused = 0;                 // nodes that share a program with another node
};

// `live[s]`: somebody will look at storage s afterwards.
Plan fuse(const Graph& graph, const std::vector<uint8_t>& live);

// Runs a plan of this graph, or of one with an equal signature and liveness. `scalars`: the graph's, or others in their
// places. `memory[s]`: address of storage s; of temporaries, memory for as long as the call lasts; of dead storages,
// anything. `launched` is called around each program (before: true).
void execute(const Plan& plan, const Graph& graph, std::span<const uint32_t> scalars, std::span<char* const> memory,
             const TileParallel& parallel, const std::function<void(const Launch&, bool before)>& launched = {});

// A plan in readable form, for logs.
std::string describe(const Plan& plan, const Graph& graph);

}  // namespace neuron::fusion
