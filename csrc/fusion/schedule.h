// Which program each node goes to.
#pragma once

#include <vector>

#include "graph.h"

namespace neuron::fusion {

struct Group {
  uint16_t space = kNone, row_space = kNone;
  bool long_rows = false;       // rows too long to be kept whole
  std::vector<uint16_t> nodes;  // in order of the calls
};

std::vector<Group> schedule(const Graph& graph);

// Whether an input or output of a node has one element for each row or column of its program.
Extent extent_in(const Group& group, const Node& node, int index, bool output);

}  // namespace neuron::fusion
