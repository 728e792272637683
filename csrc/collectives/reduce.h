// Element-wise reduction of several buffers into one. No torch here.
#pragma once

#include "types.h"

namespace neuron::collectives {

// dst[i] = sources[0][i] op ... op sources[n-1][i], in this order; 16-bit floats are summed in fp32 and rounded once.
// `average_over`: divisor of Reduction::avg, 1 for a partial result. dst may be one of the sources.
void reduce(void* dst, const void* const* sources, int n, size_t count, DataType dtype, Reduction op, int average_over);

// Whether the combination exists (no order on complex numbers, no bits of floats).
bool reducible(DataType dtype, Reduction op);

}  // namespace neuron::collectives
