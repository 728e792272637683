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

void initialize(int device_count, size_t capacity, bool launch_blocking, bool strict) {
  settings() = {device_count, capacity, launch_blocking, strict};
  register_allocators();
  register_pinned_allocator();
  register_hooks();
  register_library();
  register_profiler();
  register_graph();
  StreamQueue::set_interrupt_check(&check_signals);
}

py::dict stat_dict(const StatArray& stats) {
  static const char* kinds[] = {"all", "small_pool", "large_pool"};
  py::dict out;
  for (size_t k = 0; k < stats.size(); k++) {
    py::dict entry;
    entry["current"] = stats[k].current;
    entry["peak"] = stats[k].peak;
    entry["allocated"] = stats[k].allocated;
    entry["freed"] = stats[k].freed;
    out[kinds[k]] = entry;
  }
  return out;
}

py::dict memory_stats(c10::DeviceIndex index) {
  PoolStats s = device_state(resolve_device(index)).pool.stats();
  py::dict out;
  out["allocation"] = stat_dict(s.allocation);
  out["segment"] = stat_dict(s.segment);
  out["active"] = stat_dict(s.active);
  out["inactive_split"] = stat_dict(s.inactive_split);
  out["allocated_bytes"] = stat_dict(s.allocated_bytes);
  out["reserved_bytes"] = stat_dict(s.reserved_bytes);
  out["active_bytes"] = stat_dict(s.active_bytes);
  out["inactive_split_bytes"] = stat_dict(s.inactive_split_bytes);
  out["requested_bytes"] = stat_dict(s.requested_bytes);
  out["num_alloc_retries"] = s.num_alloc_retries;
  out["num_ooms"] = s.num_ooms;
  out["num_device_alloc"] = s.num_device_alloc;
  out["num_device_free"] = s.num_device_free;
  return out;
}

py::list memory_segments(c10::DeviceIndex index) {
  py::list out;
  index = resolve_device(index);
  for (auto& s : device_state(index).pool.snapshot()) {
    py::list blocks;
    for (auto& b : s.blocks) {
      py::dict block;
      block["address"] = b.address;
      block["size"] = b.size;
      block["requested_size"] = b.requested;
      block["state"] = b.state;
      block["frames"] = py::list();
      blocks.append(block);
    }
    py::dict segment;
    segment["device"] = static_cast<int>(index);
    segment["address"] = s.address;
    segment["total_size"] = s.size;
    segment["allocated_size"] = s.allocated;
    segment["active_size"] = s.active;
    segment["requested_size"] = s.requested;
    segment["stream"] = s.owner;
    segment["segment_type"] = s.large ? "large" : "small";
    segment["segment_pool_id"] = py::make_tuple(0, 0);
    segment["is_expandable"] = false;
    segment["frames"] = py::list();
    segment["blocks"] = blocks;
    out.append(segment);
  }
  return out;
}

py::list memory_history(c10::DeviceIndex index) {
  py::list out;
  index = resolve_device(index);
  for (auto& e : device_state(index).pool.history()) {
    py::dict entry;
    entry["action"] = e.action;
    entry["addr"] = e.address;
    entry["size"] = e.size;
    entry["stream"] = e.owner;
    entry["time_us"] = e.time_us;
    entry["frames"] = py::list();
    out.append(entry);
  }
  return out;
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
        py::arg("strict"));
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

  m.def("memory_stats", &memory_stats);
  m.def("memory_segments", &memory_segments);
  m.def("memory_history", &memory_history);
  m.def("record_memory_history",
        [](c10::DeviceIndex i, size_t n) { device_state(resolve_device(i)).pool.record_history(n); });
  m.def("memory_info", [](c10::DeviceIndex i) { return device_allocator()->getMemoryInfo(resolve_device(i)); });
  m.def("set_capacity", [](c10::DeviceIndex i, size_t n) { device_state(resolve_device(i)).pool.set_capacity(n); });
  m.def("empty_cache", [] { device_allocator()->emptyCache(); }, py::call_guard<py::gil_scoped_release>());
  m.def("reset_peak_memory_stats", [](c10::DeviceIndex i) { device_allocator()->resetPeakStats(i); });
  m.def("reset_accumulated_memory_stats", [](c10::DeviceIndex i) { device_allocator()->resetAccumulatedStats(i); });

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
}

}  // namespace neuron
