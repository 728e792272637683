#include "collectives.h"

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "collectives/process_group.h"

namespace py = pybind11;

namespace neuron {

void bind_collectives(py::module_& m, void (*check_signals)()) {
  set_collective_interrupt_check(check_signals);
  py::module_::import("torch._C._distributed_c10d");
  using Options = ProcessGroupNeuron::NeuronOptions;
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(m, "ProcessGroupNeuronOptions",
                                                                           "What a process group was made with.")
      .def("__deepcopy__", [](const Options& self, const py::dict&) { return c10::make_intrusive<Options>(self); });
  py::class_<ProcessGroupNeuron, c10d::Backend, c10::intrusive_ptr<ProcessGroupNeuron>>(
      m, "ProcessGroupNeuron", "torch.distributed over neuron devices.")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       std::chrono::milliseconds timeout, std::string name, std::vector<uint64_t> global_ranks) {
             py::gil_scoped_release release;
             return c10::make_intrusive<ProcessGroupNeuron>(store, rank, size, timeout, std::move(name),
                                                            std::move(global_ranks));
           }),
           py::arg("store"), py::arg("rank"), py::arg("size"), py::arg("timeout"), py::arg("name"),
           py::arg("global_ranks"))
      .def("flight_report", &ProcessGroupNeuron::flight_report, "What each rank of this host is doing or did last.")
      .def("algorithm", &ProcessGroupNeuron::algorithm, py::arg("operation"), py::arg("bytes"),
           "Name of the algorithm that an operation of this size uses.")
      .def_property_readonly("options", &ProcessGroupNeuron::options)
      .def("comm_split_count", &ProcessGroupNeuron::splits)
      // Ranks outside of a new group have nothing to do for it.
      .def("perform_nocolor_split", [](ProcessGroupNeuron&, const c10::Device&) {});
  m.def("stop_collectives", &stop_collectives, py::call_guard<py::gil_scoped_release>());
}

}  // namespace neuron
