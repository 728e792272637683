// Page-locked host memory, as far as a software device has any use for it: a caching host allocator whose pointers
// `is_pinned()` recognises and whose blocks wait for the streams that copy from or to them.
#pragma once

#include <c10/core/Allocator.h>

namespace neuron {

c10::Allocator* pinned_allocator();
bool is_pinned_pointer(const void* data);
void register_pinned_allocator();

}  // namespace neuron
