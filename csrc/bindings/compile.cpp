// torchneuron._C.Executable: built from the plan that torchneuron/compile/plan.py describes, called with a list.
#include "compile.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/python_numbers.h>

#include <sstream>

#include "compile/executable.h"
#include "compile/fused_step.h"
#include "compile/kernel_step.h"
#include "compile/number_step.h"

namespace py = pybind11;

namespace neuron {

namespace {

using c10::IValue;

struct Slot {
  uint32_t index;
};

IValue to_value(PyObject* o) {
  if (THPVariable_Check(o)) return THPVariable_Unpack(o);
  if (o == Py_None) return {};
  if (PyBool_Check(o)) return o == Py_True;
  if (PyLong_Check(o)) return THPUtils_unpackLong(o);
  if (PyFloat_Check(o)) return PyFloat_AsDouble(o);
  return torch::jit::toIValue(o, c10::PyObjectType::get());
}

py::object from_value(IValue value) {
  if (value.isTensor()) {
    at::Tensor t = std::move(value).toTensor();
    return t.defined() ? py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(t))) : py::none();
  }
  return torch::jit::toPyObject(std::move(value));
}

Operand::Element element_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return Operand::Element::tensor;
    case c10::TypeKind::OptionalType:
      return Operand::Element::optional_tensor;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
      return Operand::Element::integer;
    case c10::TypeKind::FloatType:
    case c10::TypeKind::SymFloatType:
      return Operand::Element::floating;
    case c10::TypeKind::BoolType:
    case c10::TypeKind::SymBoolType:
      return Operand::Element::boolean;
    case c10::TypeKind::NumberType:
      return Operand::Element::scalar;
    default:
      TORCH_CHECK_TYPE(false, "A compiled graph cannot hold a list of ", type.str(), ".");
  }
}

bool is_slot(py::handle value) { return py::isinstance<Slot>(value); }

Operand slot_operand(py::handle value) {
  Operand operand;
  operand.kind = Operand::Kind::slot;
  operand.slot = value.cast<Slot>().index;
  return operand;
}

Operand constant_operand(IValue value) {
  Operand operand;
  operand.constant = std::move(value);
  return operand;
}

// `type`: what the operator's schema says.
Operand read_operand(py::handle value, const c10::TypePtr& type) {
  if (is_slot(value)) return slot_operand(value);
  auto list = type->cast<c10::ListType>();
  if (auto optional = type->cast<c10::OptionalType>()) list = optional->getElementType()->cast<c10::ListType>();
  if (!list || !py::isinstance<py::sequence>(value)) return constant_operand(torch::jit::toIValue(value, type));
  bool dynamic = false;
  for (auto item : value.cast<py::sequence>()) dynamic |= is_slot(item);
  if (!dynamic) return constant_operand(torch::jit::toIValue(value, type));
  Operand operand;
  operand.kind = Operand::Kind::list;
  operand.element = element_of(*list->getElementType());
  for (auto item : value.cast<py::sequence>()) operand.items.push_back(read_operand(item, list->getElementType()));
  return operand;
}

// For steps without a schema: values as they are.
Operand read_plain(py::handle value) {
  return is_slot(value) ? slot_operand(value) : constant_operand(to_value(value.ptr()));
}

std::vector<Operand> read_plain_list(const py::sequence& values) {
  std::vector<Operand> out;
  for (auto value : values) out.push_back(read_plain(value));
  return out;
}

template <class F>
void each_slot_backwards(std::vector<Operand>& operands, F f) {
  for (size_t i = operands.size(); i-- > 0;) {
    if (operands[i].kind == Operand::Kind::slot) f(operands[i]);
    each_slot_backwards(operands[i].items, f);
  }
}

// The last mention of a slot in its last step hands the reference over.
void mark_last_uses(std::vector<Operand>& operands, std::vector<uint32_t> drops) {
  each_slot_backwards(operands, [&](Operand& operand) {
    auto it = std::find(drops.begin(), drops.end(), operand.slot);
    if (it == drops.end()) return;
    operand.kind = Operand::Kind::last_use;
    drops.erase(it);
  });
}

c10::OperatorHandle find_operator(const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
}

std::unique_ptr<OperatorStep> read_operator(const py::dict& step, const std::vector<uint32_t>& drops) {
  auto op = find_operator(step["name"].cast<std::string>(), step["overload"].cast<std::string>());
  torch::jit::ToIValueAllowNumbersAsTensors allow(true);
  std::vector<Operand> arguments;
  auto given = step["args"].cast<py::sequence>();
  auto named = step["kwargs"].cast<py::dict>();
  auto& expected = op.schema().arguments();
  for (size_t i = 0; i < expected.size(); i++) {
    const c10::Argument& argument = expected[i];
    py::str name(argument.name());
    if (i < given.size()) {
      arguments.push_back(read_operand(given[i], argument.type()));
    } else if (named.contains(name)) {
      arguments.push_back(read_operand(named[name], argument.type()));
    } else {
      TORCH_CHECK_VALUE(argument.default_value(), "Argument ", argument.name(), " of ", toString(op.operator_name()),
                        " is missing in a compiled graph.");
      arguments.push_back(constant_operand(*argument.default_value()));
    }
  }
  mark_last_uses(arguments, drops);
  OperatorStep::Site site;
  site.bridged = step["bridged"].cast<bool>();
  site.index = step["device"].cast<c10::DeviceIndex>();
  for (auto dtype : step["dtypes"].cast<py::sequence>())
    site.dtypes.add(reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type);
  return std::make_unique<OperatorStep>(op, std::move(arguments), step["outs"].cast<std::vector<uint32_t>>(), site);
}

std::vector<uint32_t> slots(const py::dict& step, const char* key) { return step[key].cast<std::vector<uint32_t>>(); }

std::vector<std::unique_ptr<OperatorStep>> read_inner(const py::dict& step) {
  std::vector<std::unique_ptr<OperatorStep>> inner;
  for (auto item : step["steps"].cast<py::sequence>()) {
    auto one = item.cast<py::dict>();
    inner.push_back(read_operator(one, slots(one, "drops")));
    inner.back()->drops = slots(one, "drops");
    inner.back()->where = one["where"].cast<std::string>();
  }
  return inner;
}

std::unique_ptr<Step> read_callback(const py::dict& step, const std::vector<uint32_t>& drops) {
  auto arguments = read_plain_list(step["args"].cast<py::sequence>());
  mark_last_uses(arguments, drops);
  auto call = [function = step["function"].cast<py::object>()](std::vector<IValue> values) {
    py::gil_scoped_acquire gil;
    py::tuple args(values.size());
    for (size_t i = 0; i < values.size(); i++) args[i] = from_value(std::move(values[i]));
    values.clear();
    py::object results = py::reinterpret_steal<py::object>(PyObject_CallObject(function.ptr(), args.ptr()));
    if (!results) {
      python_error error;
      error.persist();
      throw std::move(error);
    }
    std::vector<IValue> out;
    for (auto result : results.cast<py::sequence>()) out.push_back(to_value(result.ptr()));
    return out;
  };
  return std::make_unique<CallbackStep>(std::move(call), std::move(arguments),
                                        step["outs"].cast<std::vector<uint32_t>>());
}

// Keeps a Python object until nobody needs it, whoever is the last.
std::shared_ptr<void> keep_alive(py::object object) {
  return {object.release().ptr(), [](void* p) {
            py::gil_scoped_acquire gil;
            Py_DECREF(static_cast<PyObject*>(p));
          }};
}

// What launch_of in torchneuron/nki/torch_ops.py returns.
std::shared_ptr<const KernelLaunch> read_launch(const py::object& given) {
  if (given.is_none()) return nullptr;
  auto launch = std::make_shared<KernelLaunch>();
  for (auto core : given["cores"].cast<py::sequence>())
    launch->cores.push_back({reinterpret_cast<const Program*>(core["program"].cast<uintptr_t>()),
                             core["inputs"].cast<std::vector<uint32_t>>(),
                             core["buffers"].cast<std::vector<std::pair<uint32_t, size_t>>>(),
                             {}});
  size_t i = 0;
  for (auto core : given["cores"].cast<py::sequence>()) {
    for (auto c : core["constants"].cast<std::vector<std::pair<uint32_t, uintptr_t>>>())
      launch->cores[i].constants.emplace_back(c.first, reinterpret_cast<const void*>(c.second));
    i++;
  }
  launch->buffers = given["buffers"].cast<std::vector<std::pair<int64_t, bool>>>();
  for (auto r : given["results"].cast<py::sequence>()) {
    launch->results.push_back({r["buffer"].cast<size_t>(),
                               reinterpret_cast<THPDtype*>(py::object(r["dtype"]).ptr())->scalar_type,
                               r["sizes"].cast<std::vector<int64_t>>(), r["strides"].cast<std::vector<int64_t>>(),
                               r["offset"].cast<int64_t>()});
  }
  launch->keep = keep_alive(given["keep"]);
  return launch;
}

std::unique_ptr<Step> read_kernel(const py::dict& step) {
  auto by_operator = read_operator(step, {});
  auto resolve = [function = keep_alive(step["function"])](const std::vector<at::Tensor>& tensors) {
    py::gil_scoped_acquire gil;
    py::list given;
    for (const at::Tensor& t : tensors) given.append(from_value(t));
    py::object result =
        py::reinterpret_steal<py::object>(PyObject_CallOneArg(static_cast<PyObject*>(function.get()), given.ptr()));
    if (!result) {
      python_error error;
      error.persist();
      throw std::move(error);
    }
    return read_launch(result);
  };
  auto tensors = read_plain_list(step["args"].cast<py::sequence>()[0].cast<py::sequence>());
  return std::make_unique<KernelStep>(step["label"].cast<std::string>(), step["device"].cast<c10::DeviceIndex>(),
                                      std::move(tensors), std::move(resolve), std::move(by_operator));
}

std::unique_ptr<Step> read_step(const py::dict& step) {
  const auto kind = step["kind"].cast<std::string>();
  auto drops = step["drops"].cast<std::vector<uint32_t>>();
  std::unique_ptr<Step> out;
  if (kind == "operator") {
    out = read_operator(step, drops);
  } else if (kind == "scalar") {
    out = std::make_unique<ScalarStep>(step["name"].cast<std::string>(), read_plain_list(step["args"]),
                                       step["outs"].cast<std::vector<uint32_t>>().at(0));
  } else if (kind == "fused") {
    out = std::make_unique<FusedStep>(step["device"].cast<c10::DeviceIndex>(), read_inner(step));
  } else if (kind == "numbers") {
    out = std::make_unique<NumberStep>(read_inner(step));
  } else if (kind == "kernel") {
    out = read_kernel(step);
  } else {
    TORCH_CHECK_VALUE(kind == "python", "No step of a compiled graph is of kind '", kind, "'.");
    out = read_callback(step, drops);
  }
  out->drops = std::move(drops);
  out->where = step["where"].cast<std::string>();
  return out;
}

std::shared_ptr<Executable> build(size_t inputs, size_t slots,
                                  const std::vector<std::pair<uint32_t, at::Tensor>>& constants,
                                  const py::sequence& steps, const py::sequence& outputs) {
  std::vector<std::unique_ptr<Step>> list;
  for (auto step : steps) list.push_back(read_step(step.cast<py::dict>()));
  return std::make_shared<Executable>(inputs, slots, constants, std::move(list), read_plain_list(outputs));
}

// Whether a Python mode wants to see every operator. Some want to see what is not compiled alone, as the one that
// AOTAutograd sets up for the first call.
bool watched_by_python() {
  return c10::impl::TorchDispatchModeTLS::any_modes_set() &&
         py::module_::import("torch.utils._python_dispatch")
             .attr("is_in_any_mode_without_ignore_compile_internals")()
             .cast<bool>();
}

py::list call(const Executable& executable, const py::list& arguments) {
  std::vector<IValue> values;
  values.reserve(arguments.size());
  for (auto argument : arguments) values.push_back(to_value(argument.ptr()));
  // The caller gives its references up: an input's memory is free after its last use.
  PyList_SetSlice(arguments.ptr(), 0, PyList_GET_SIZE(arguments.ptr()), nullptr);
  const bool watched = watched_by_python();
  {
    py::gil_scoped_release no_gil;
    values = executable.run(std::move(values), watched);
  }
  py::list out(values.size());
  for (size_t i = 0; i < values.size(); i++) out[i] = from_value(std::move(values[i]));
  return out;
}

}  // namespace

void bind_compile(py::module_& m) {
  py::class_<Slot>(m, "Slot")
      .def(py::init([](uint32_t index) { return Slot{index}; }))
      .def_readonly("index", &Slot::index)
      .def("__repr__", [](const Slot& s) {
        std::ostringstream out;
        out << "%" << s.index;
        return out.str();
      });
  // AOTAutograd and Dynamo set attributes on what they call.
  py::class_<Executable, std::shared_ptr<Executable>>(m, "Executable", py::dynamic_attr())
      .def(py::init(torch::wrap_pybind_function(&build)), py::arg("inputs"), py::arg("slots"), py::arg("constants"),
           py::arg("steps"), py::arg("outputs"))
      .def("__call__", torch::wrap_pybind_function(&call));
  m.def("runs_bridged", [](const std::string& name, const std::string& overload) {
    return runs_bridged(find_operator(name, overload));
  });
  m.def("computes_numbers", [](const std::string& name, const std::string& overload) {
    return computes_numbers(find_operator(name, overload));
  });
  m.def("scalar_functions", &scalar_functions);
  m.def("fusion_of", [](const std::string& name, const std::string& overload) {
    static const char* names[] = {"none", "program", "view"};
    return names[static_cast<int>(fusion_of(find_operator(name, overload)))];
  });
}

}  // namespace neuron
