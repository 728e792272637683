#include "threads.h"

#include <ATen/Parallel.h>

#include "core/executor.h"

namespace neuron {

void use_torch_threads() {
  set_parallel_for([](int64_t n, const Range& body) { at::parallel_for(0, n, 1, body); });
}

}  // namespace neuron
