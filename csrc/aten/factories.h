// Tensors without contents, for the kernels that fill them.
#pragma once

#include <ATen/core/Tensor.h>

#include "storage.h"

namespace neuron {

// A one-dimensional tensor of no elements over `bytes` of memory; the caller sets its sizes.
at::Tensor uninitialised(size_t bytes, caffe2::TypeMeta type, c10::DeviceIndex index);

}  // namespace neuron
