// What Python sees of fusion: counters, the log of programs, and the observer of `torchneuron explain`.
#include "fusion.h"

#include <pybind11/stl.h>

#include <atomic>
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
  py::object program, recorded, closed, ran;
};
Listeners& listeners() {
  static auto* all = new Listeners;
  return *all;
}
std::atomic<bool> numbers_calls{false};  // whether `recorded` is there; read without the GIL

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
  if (!numbers_calls) return fusion::kNobody;
  py::gil_scoped_acquire gil;
  return listeners().recorded ? listeners().recorded().cast<uint32_t>() : fusion::kNobody;
}

// A program and what it ran on, as plain data.
py::dict structure_of(const TileProgram& program) {
  constexpr const char* kExtentNames[] = {"full", "row", "column"};
  constexpr const char* kFrom[] = {"access", "scalar", "step"};
  constexpr const char* kKinds[] = {"load", "map", "reduce", "accumulate", "gather", "scatter", "store"};
  auto name = [&](Extent e) { return kExtentNames[static_cast<int>(e)]; };
  py::list accesses, values, steps;
  for (auto& a : program.accesses()) accesses.append(py::make_tuple(info(a.dtype).name, name(a.extent)));
  for (auto& v : program.values()) {
    const bool constant = v.from == TileProgram::Value::From::scalar && v.index & 0x8000;
    values.append(py::make_tuple(constant ? "constant" : kFrom[static_cast<int>(v.from)], name(v.extent),
                                 constant ? v.index & 0x7fff : v.index));
  }
  for (auto& s : program.steps()) {
    py::list in;
    for (ValueId v : s.in)
      if (v != TileProgram::kNone) in.append(v);
    steps.append(py::make_tuple(kKinds[static_cast<int>(s.kind)], info(s.op).name, name(s.extent),
                                s.out == TileProgram::kNone ? py::object(py::none()) : py::int_(s.out), py::tuple(in),
                                s.access));
  }
  py::dict out;
  out["accesses"] = accesses;
  out["values"] = values;
  out["steps"] = steps;
  out["constants"] = program.constants();
  out["has_rows"] = program.has_rows();
  return out;
}
py::tuple data_of(const fusion::ProgramRun& run) {
  py::list places;
  for (auto& p : run.places) {
    py::list dims;
    for (int d = 0; d < p.ndim; d++) dims.append(py::make_tuple(p.size[d], p.stride[d]));
    places.append(py::make_tuple(p.storage, p.offset, py::tuple(dims)));
  }
  return py::make_tuple(run.rows, run.cols, places, run.numbers, run.memory);
}

void tell_closed(fusion::Closed why, const std::vector<fusion::ProgramFacts>& programs) {
  py::gil_scoped_acquire gil;
  Listeners& all = listeners();
  py::list list;
  for (auto& p : programs) {
    py::list calls, runs;
    for (auto [name, number] : p.calls)
      calls.append(py::make_tuple(name, number == fusion::kNobody ? py::object(py::none()) : py::int_(number)));
    list.append(py::make_tuple(calls, p.elements, p.rows, p.bytes, p.bytes_alone));
    if (!all.ran || p.runs.empty()) continue;
    for (auto& run : p.runs) runs.append(data_of(run));
    all.ran(calls, structure_of(p.program), runs);
  }
  if (all.closed) all.closed(fusion::name_of(why), list);
}

void update_observer() {
  static const fusion::Observer plain{false, tell_recorded, tell_closed}, whole{true, tell_recorded, tell_closed};
  numbers_calls = static_cast<bool>(listeners().recorded);
  fusion::set_observer(listeners().ran ? &whole : listeners().closed ? &plain : nullptr);
}
py::object or_null(py::object f) { return f.is_none() ? py::object() : f; }

// `recorded()` returns the number of a call; `closed(why, programs)` has (calls, elements, rows, bytes, bytes alone) of
// each program, and (name, number or None) of each call. None and None: nobody watches.
void set_fusion_observer(py::object recorded, py::object closed) {
  listeners().recorded = or_null(std::move(recorded));
  listeners().closed = or_null(std::move(closed));
  update_observer();
}

// `ran(calls, structure, runs)` is told of each program: a dictionary, and (rows, columns, places, numbers, memory) of
// each member of its lists of tensors. None: nobody watches.
void set_structure_observer(py::object ran) {
  listeners().ran = or_null(std::move(ran));
  update_observer();
}

// Makes the machine code of a plan's programs as it is for operands that are tensors of the programs' shapes.
void make_code(const fusion::Plan& plan) {
  for (const fusion::Launch& launch : plan.launches)
    for (const Loop& loop : launch.program.plan().loops) {
      Loop::Layout layout;
      for (size_t k = 0; k < loop.inputs.size(); k++)
        if (launch.program.extent(loop.inputs[k]) == Extent::full) layout.vectors |= uint64_t{1} << k;
      loop.function(launch.program, layout);
    }
}

// Seconds of making a plan of what is pending on the current device, with its machine code, and of finding a known one.
py::tuple window_costs(int repeats) {
  const auto [graph, live] = fusion::Window::current(current_device()).pending();
  TORCH_CHECK(!graph.nodes.empty(), "nothing is pending: call fusible operators first");
  auto mean_of = [&](auto f) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; i++) f();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / repeats;
  };
  const double make = mean_of([&] { make_code(fusion::fuse(graph, live)); });
  return py::make_tuple(make, mean_of([&] { fusion::find_or_fuse(graph, live); }));
}

}  // namespace

void bind_fusion(py::module_& m) {
  m.def("fusion_stats", &fusion_stats);
  m.def("reset_fusion_stats", &reset_fusion_stats);
  m.def("set_program_listener", &set_program_listener);
  m.def("set_fusion_observer", &set_fusion_observer);
  m.def("set_structure_observer", &set_structure_observer);
  m.def("window_costs", &window_costs);
}

}  // namespace neuron
