#include "memory.h"

#include <torch/csrc/profiler/combined_traceback.h>

#include "runtime/allocator.h"
#include "runtime/device.h"

namespace py = pybind11;

namespace neuron {

namespace {

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

AllocationContext python_stack() { return torch::CapturedTraceback::gather(true, false, false); }

// For each context the Python frames of the allocation, innermost first: dictionaries of filename, line and name.
std::vector<py::list> frames_of(const std::vector<AllocationContext>& contexts) {
  std::vector<torch::CapturedTraceback*> known;
  for (auto& c : contexts)
    if (c) known.push_back(static_cast<torch::CapturedTraceback*>(c.get()));
  const torch::SymbolizedTracebacks symbolized = torch::symbolize(known);
  std::vector<py::dict> frames;
  for (auto& f : symbolized.all_frames) {
    py::dict frame;
    frame["filename"] = f.filename;
    frame["line"] = f.lineno;
    frame["name"] = f.funcname;
    frames.push_back(frame);
  }
  std::vector<py::list> out(contexts.size());
  auto next = symbolized.tracebacks.begin();
  for (size_t i = 0; i < contexts.size(); i++)
    if (contexts[i])
      for (uint64_t frame : *next++) out[i].append(frames[frame]);
  return out;
}

void record_memory_history(c10::DeviceIndex index, size_t max_entries, bool stacks) {
  device_state(resolve_device(index)).pool.record_history(max_entries, stacks ? &python_stack : nullptr);
}

py::list memory_segments(c10::DeviceIndex index) {
  py::list out;
  index = resolve_device(index);
  const auto segments = device_state(index).pool.snapshot();
  std::vector<AllocationContext> contexts;
  for (auto& s : segments)
    for (auto& b : s.blocks) contexts.push_back(b.context);
  const auto stacks = frames_of(contexts);
  auto frames = stacks.begin();
  for (auto& s : segments) {
    py::list blocks;
    for (auto& b : s.blocks) {
      py::dict block;
      block["address"] = b.address;
      block["size"] = b.size;
      block["requested_size"] = b.requested;
      block["state"] = b.state;
      block["frames"] = *frames++;
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
  const auto history = device_state(index).pool.history();
  std::vector<AllocationContext> contexts;
  for (auto& e : history) contexts.push_back(e.context);
  const auto stacks = frames_of(contexts);
  auto frames = stacks.begin();
  for (auto& e : history) {
    py::dict entry;
    entry["action"] = e.action;
    entry["addr"] = e.address;
    entry["size"] = e.size;
    entry["stream"] = e.owner;
    entry["time_us"] = e.time_us;
    entry["frames"] = *frames++;
    out.append(entry);
  }
  return out;
}

}  // namespace

void bind_memory(py::module_& m) {
  m.def("memory_stats", &memory_stats);
  m.def("memory_segments", &memory_segments);
  m.def("memory_history", &memory_history);
  m.def("record_memory_history", &record_memory_history);
  m.def("memory_info", [](c10::DeviceIndex i) { return device_allocator()->getMemoryInfo(resolve_device(i)); });
  m.def("set_capacity", [](c10::DeviceIndex i, size_t n) { device_state(resolve_device(i)).pool.set_capacity(n); });
  m.def("empty_cache", [] { device_allocator()->emptyCache(); }, py::call_guard<py::gil_scoped_release>());
  m.def("reset_peak_memory_stats", [](c10::DeviceIndex i) { device_allocator()->resetPeakStats(i); });
  m.def("reset_accumulated_memory_stats", [](c10::DeviceIndex i) { device_allocator()->resetAccumulatedStats(i); });
}

}  // namespace neuron
