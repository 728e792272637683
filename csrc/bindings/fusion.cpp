// What Python sees of fusion: counters, the log of programs, and the observer of `torchneuron explain`.
#include "fusion.h"

#include <chrono>

#include "fusion/cache.h"
#include "fusion/log.h"
#include "fusion/observer.h"
#include "fusion/stats.h"
#include "fusion/window.h"
#include "runtime/device.h"

namespace py = pybind11;

namespace neuron {

namespace {

py::dict fusion_stats() {
  py::dict out;
#define X(name) out[#name] = fusion::g_stats.name.load();
  NEURON_FUSION_COUNTERS(X)
#undef X
  return out;
}

void reset_fusion_stats() {
#define X(name) fusion::g_stats.name = 0;
  NEURON_FUSION_COUNTERS(X)
#undef X
}

// Functions of Python's that C++ calls; never destroyed, as calls may come at exit.
struct Listeners {
  py::object program, recorded, closed;
};
Listeners& listeners() {
  static auto* all = new Listeners;
  return *all;
}

// A listener, or None.
void set_program_listener(py::object listener) {
  const bool on = !listener.is_none();
  listeners().program = std::move(listener);
  fusion::set_log_listener(on ? [](const std::string& text) {
    py::gil_scoped_acquire gil;
    listeners().program(text);
  }
                              : fusion::LogListener{});
}

uint32_t tell_recorded() {
  py::gil_scoped_acquire gil;
  return listeners().recorded().cast<uint32_t>();
}

void tell_closed(fusion::Closed why, const std::vector<fusion::ProgramFacts>& programs) {
  py::gil_scoped_acquire gil;
  py::list list;
  for (auto& p : programs) {
    py::list calls;
    for (auto [name, number] : p.calls)
      calls.append(py::make_tuple(name, number == fusion::kNobody ? py::object(py::none()) : py::int_(number)));
    list.append(py::make_tuple(calls, p.elements, p.rows, p.bytes, p.bytes_alone));
  }
  listeners().closed(fusion::name_of(why), list);
}

// `recorded()` returns the number of a call; `closed(why, programs)` has (calls, elements, rows, bytes, bytes alone) of
// each program, and (name, number or None) of each call. None and None: nobody watches.
void set_fusion_observer(py::object recorded, py::object closed) {
  static const fusion::Observer observer{tell_recorded, tell_closed};
  const bool on = !recorded.is_none();
  if (!on) fusion::set_observer(nullptr);
  listeners().recorded = std::move(recorded);
  listeners().closed = std::move(closed);
  if (on) fusion::set_observer(&observer);
}

// Seconds of making a plan of what is pending on the current device, and of finding a known one.
py::tuple window_costs(int repeats) {
  const auto [graph, live] = fusion::Window::current(current_device()).pending();
  TORCH_CHECK(!graph.nodes.empty(), "nothing is pending: call fusible operators first");
  auto mean_of = [&](auto f) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; i++) f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / repeats;
  };
  const double make = mean_of([&] { fusion::fuse(graph, live); });
  return py::make_tuple(make, mean_of([&] { fusion::find_or_fuse(graph, live); }));
}

}  // namespace

void bind_fusion(py::module_& m) {
  m.def("fusion_stats", &fusion_stats);
  m.def("reset_fusion_stats", &reset_fusion_stats);
  m.def("set_program_listener", &set_program_listener);
  m.def("set_fusion_observer", &set_fusion_observer);
  m.def("window_costs", &window_costs);
}

}  // namespace neuron
