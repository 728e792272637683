// Rows that more than one file registers.
#pragma once

#include "rows.h"

namespace neuron::fusion {

extern const Row r_copy;  // from any type to any type

}  // namespace neuron::fusion
