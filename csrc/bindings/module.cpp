// torchneuron._C: what Python needs beyond c10's and ATen's own interfaces. Bindings only.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <cstring>

#include "aten/bridge.h"
#include "aten/graph.h"
#include "aten/library.h"
#include "aten/op_table.h"
#include "aten/storage.h"
#include "collectives.h"
#include "compile.h"
#include "fusion.h"
#include "memory.h"
#include "runtime/allocator.h"
#include "runtime/device.h"
#include "runtime/generator.h"
#include "runtime/hooks.h"
#include "runtime/pinned.h"
#include "runtime/profiler.h"
#include "threads.h"

namespace py = pybind11;

namespace neuron {

namespace {

// Raises KeyboardInterrupt in a thread that waits for the device.
void check_signals() {
  if (!PyGILState_GetThisThreadState()) return;  // not a Python thread
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) {
    python_error error;
    error.persist();
    throw std::move(error);
  }
}

void initialize(int device_count, size_t capacity, bool launch_blocking, bool strict, bool fusion) {
  settings() = {device_count, capacity, launch_blocking, strict, fusion};
  register_allocators();
  register_pinned_allocator();
  register_hooks();
  register_library();
  register_profiler();
  register_graph();
  StreamQueue::set_interrupt_check(&check_signals);
}

py::list op_counters() {
  py::list out;
  for (auto* c : all_counters())
    if (c->executed)
      out.append(
          py::make_tuple(c->name, c->executed.load(), c->narrowed.load(), c->fallback.load(), c->row != nullptr));
  return out;
}

// The Python function that is told the name of each fallback; never destroyed, as calls may come at exit.
py::object& fallback_listener() {
  static auto* listener = new py::object(py::none());
  return *listener;
}

void tell_fallback(const OpCounter& c) {
  py::gil_scoped_acquire gil;
  py::object listener = fallback_listener();
  if (!listener.is_none()) listener(c.name);
}

void set_fallback_listener(py::object listener) {
  set_fallback_hook(listener.is_none() ? nullptr : &tell_fallback);
  fallback_listener() = std::move(listener);
}

py::list op_rows() {
  static const char* kinds[] = {"fusible", "library", "view"};
  py::list out;
  for (auto& row : all_rows()) out.append(py::make_tuple(std::string(row.name), kinds[static_cast<int>(row.kind)]));
  return out;
}

// A neuron tensor over the memory of a CPU tensor, whose storage it keeps alive: no copy.
at::Tensor from_host(const at::Tensor& host, c10::DeviceIndex index) {
  TORCH_CHECK(host.device().is_cpu() && host.layout() == c10::kStrided, "from_host takes a strided CPU tensor.");
  index = resolve_device(index);
  device_state(index);
  auto storage = c10::make_intrusive<NeuronStorage>(c10::StorageImpl::use_byte_size_t(), host.storage().nbytes(),
                                                    borrow_host(host.storage(), index), device_allocator(), false);
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(std::move(storage)),
                                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host.dtype());
  impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  return at::Tensor(std::move(impl));
}

// The CPU storage that owns the memory of a neuron storage (from_host, rebase), or None.
std::optional<c10::Storage> host_of(const c10::Storage& storage) {
  const c10::Storage* owner = host_owner(*storage.unsafeGetStorageImpl());
  return owner ? std::optional(*owner) : std::nullopt;
}

// Moves a neuron storage into the memory of a CPU storage of the same size. Every tensor on it follows.
void rebase(const c10::Storage& storage, const c10::Storage& host) {
  TORCH_CHECK(storage.device().type() == kNeuron && host.device().is_cpu() && storage.nbytes() == host.nbytes(),
              "rebase takes a neuron storage and a CPU storage of the same size.");
  synchronize_device(storage.device().index());
  if (storage.nbytes()) std::memcpy(host.mutable_data(), storage.data(), storage.nbytes());
  storage.unsafeGetStorageImpl()->set_data_ptr_noswap(borrow_host(host, storage.device().index()));
  storage.unsafeGetStorageImpl()->set_resizable(false);
}

// A CPU tensor over the memory of a neuron tensor; the caller keeps the neuron tensor alive and synchronises.
at::Tensor as_host(const at::Tensor& t) {
  TORCH_CHECK(is_neuron(t), "as_host takes a neuron tensor.");
  current_queue(t.device().index()).drain();
  at::AutoDispatchBelowADInplaceOrView guard;
  return Bridge(t.device().index()).to_host(t);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  use_torch_threads();
  m.def("initialize", &initialize, py::arg("device_count"), py::arg("capacity"), py::arg("launch_blocking"),
        py::arg("strict"), py::arg("fusion"));
  m.def("device_count", &device_count);
  m.def("initialized", &initialized);
  m.def("in_bad_fork", &in_bad_fork);
  m.def("init_device", [](c10::DeviceIndex i) { device_state(resolve_device(i)); });
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", &set_current_device);
  m.def("synchronize", &synchronize_device, py::call_guard<py::gil_scoped_release>());
  m.def("shutdown", &shutdown, py::call_guard<py::gil_scoped_release>());
  m.def("default_generator", [](c10::DeviceIndex i) { return default_generator(i); });
  m.def("default_stream", [](c10::DeviceIndex i) { return default_stream(i).pack3().stream_id; });

  m.def("is_capturing", [] { return current_capture() != nullptr; });

  bind_memory(m);

  m.def("op_counters", &op_counters);
  m.def("clear_op_counters", &clear_counters);
  m.def("set_fallback_listener", &set_fallback_listener);
  m.def("op_rows", &op_rows);
  m.def("shadowed_operators", &shadowed_operators);
  m.def("from_host", &from_host);
  m.def("host_of", &host_of);
  m.def("rebase", &rebase);
  m.def("as_host", &as_host);
  bind_collectives(m, &check_signals);
  bind_compile(m);
  bind_fusion(m);
}

}  // namespace neuron
