// Copies: host to device, device to host, between devices and within one, of every shape and type.
//
// Both ends are host-addressable, so PyTorch's CPU copy does the work. Big plain copies between pinned and device
// memory that the caller declares non_blocking go to the stream and overlap with the host; all others happen here.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/item.h>
#include <ATen/ops/zero.h>
#include <torch/library.h>

#include <cstring>

#include "fusion/record.h"
#include "graph.h"
#include "library.h"
#include "runtime/pinned.h"
#include "runtime/profiler.h"

namespace neuron {

namespace {

using at::Tensor;

// Waking the worker costs about 30 us, a memcpy of a MiB about 100 us.
constexpr size_t kAsyncBytes = 1 << 20;

struct CopyTask final : Task {
  CopyTask(c10::Storage f, c10::Storage t, const void* s, void* d, size_t n)
      : from(std::move(f)), to(std::move(t)), src(s), dst(d), bytes(n) {}
  void run() override { std::memcpy(dst, src, bytes); }
  c10::Storage from, to;  // held until the copy is done
  const void* src;
  void* dst;
  size_t bytes;
};

bool plain_bytes(const Tensor& src, const Tensor& dst) {
  return src.layout() == c10::kStrided && dst.layout() == c10::kStrided && !src.is_nested() && !dst.is_nested() &&
         !src.is_quantized() && !dst.is_quantized() && src.dtype() == dst.dtype() && src.sizes() == dst.sizes() &&
         src.is_contiguous() && dst.is_contiguous() && !src.is_conj() && !dst.is_conj() && !src.is_neg() &&
         !dst.is_neg();
}

bool copy_on_stream(const Tensor& src, const Tensor& dst) {
  const Tensor& host = is_neuron(src) ? dst : src;
  const Tensor& device = is_neuron(src) ? src : dst;
  if (is_neuron(host) || settings().launch_blocking || src.nbytes() < kAsyncBytes || !plain_bytes(src, dst) ||
      !is_pinned_pointer(host.const_data_ptr()))
    return false;
  current_queue(device.device().index())
      .enqueue(std::make_unique<CopyTask>(src.storage(), dst.storage(), src.const_data_ptr(), dst.mutable_data_ptr(),
                                          src.nbytes()),
               /*kick=*/true);
  return true;
}

void copy_any(const Tensor& src, const Tensor& dst, bool non_blocking) {
  TORCH_CHECK(
      !dst._is_zerotensor(),
      "ZeroTensors are immutable. Please materialize the tensor using `.clone()`, if you want a mutable zero tensor.");
  if (src._is_zerotensor()) {
    dst.zero_();
    return;
  }
  Capture* capture = current_capture();
  if (C10_UNLIKELY(capture && !is_neuron(dst))) forbid_in_capture("A copy to the host");
  if (non_blocking && !capture && src.layout() == c10::kStrided && !src.is_nested() && copy_on_stream(src, dst)) return;
  if (is_neuron(src) && is_neuron(dst) && fusion::record_copy(src, dst)) return;
  const c10::DeviceIndex index = is_neuron(dst) ? dst.device().index() : src.device().index();
  begin_library_call(index);
  if (is_neuron(src) && src.device().index() != index) begin_library_call(src.device().index());
  static OpCounter& count = counter("aten::copy_");
  DtypeUse use;
  use.wide_int = dst.scalar_type() == c10::ScalarType::Long;  // a copy moves any type
  account(count, use);
  if (!capture && plain_bytes(src, dst) && src.nbytes() < 4096) {
    if (src.nbytes()) std::memmove(dst.mutable_data_ptr(), src.const_data_ptr(), src.nbytes());
    return;
  }
  Bridge bridge(index);
  Tensor to = bridge.to_host(dst, true), from = bridge.to_host(src);
  {
    KernelScope scope(index);
    DeviceActivity activity(count.name, index);
    if (C10_LIKELY(!capture)) {
      to.copy_(from);
    } else {
      capture->touch(src, false);
      capture->touch(dst, true);
      capture->step(count.name, [to, from, index] {
        KernelScope scope(index);
        to.copy_(from);
      });
    }
  }
  bridge.finish();
}

Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  copy_any(self, dst, non_blocking);
  return dst;
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  if (!self.is_same(src)) copy_any(src, self, non_blocking);
  return self;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  dst.resize_(self.sizes());
  copy_any(self, dst, false);
  return dst;
}

c10::Scalar local_scalar_dense(const Tensor& self) {
  forbid_in_capture("Reading a value");
  begin_library_call(self.device().index());
  Bridge bridge(self.device().index());
  Tensor host = bridge.to_host(self);
  KernelScope scope(self.device().index());
  return host.item();
}

}  // namespace

namespace {
void register_copies(torch::Library& m) {
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("copy_", TORCH_FN(copy_));
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  register_copies(m);
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
}
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) { register_copies(m); }
TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) { register_copies(m); }
TORCH_LIBRARY_IMPL(aten, QuantizedPrivateUse1, m) { register_copies(m); }
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) { register_copies(m); }

}  // namespace neuron
