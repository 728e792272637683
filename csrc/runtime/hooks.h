#pragma once

#include <c10/core/StorageImpl.h>

namespace neuron {

void register_hooks();

// Gives a neuron storage `bytes` of memory and keeps what fits of its contents.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

}  // namespace neuron
