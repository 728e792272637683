// Plans by signature, for all windows of the process.
#pragma once

#include <memory>
#include <vector>

#include "fuser.h"

namespace neuron::fusion {

// The plan of a graph whose storages are live or not; made if there is none yet.
std::shared_ptr<const Plan> find_or_fuse(const Graph& graph, const std::vector<uint8_t>& live);

}  // namespace neuron::fusion
