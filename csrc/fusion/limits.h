// Rule: limits. A window closes at a number of nodes, or when it alone keeps many bytes alive, whatever the clock says.
//
// Reason: the fuser's time grows with the nodes, and inputs that the user has dropped are held until the window closes.
// Time plays no part, so that a run can be repeated: the same calls make the same programs.
#pragma once

#include <cstddef>

namespace neuron::fusion {

inline constexpr size_t kMaxWindowNodes = 64;
inline constexpr size_t kMaxOrphanBytes = size_t{256} << 20;  // of storages that nobody else holds

}  // namespace neuron::fusion
