// torchneuron._core: the software NeuronCore for Python. No torch here.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "clock.h"
#include "error.h"
#include "executor.h"
#include "lane_ops.h"
#include "packed_types.h"
#include "simd/kernels.h"

namespace py = pybind11;
using namespace neuron;

namespace {

// ---- Python -> instructions ----------------------------------------------------------------------------------------
// An access is (storage, dtype, offset, ((stride, size), ...)) or that and (reg, reg_stride, indexing, index_stride,
// index_limit, index access or None, (reg_low, reg_high) or None).
// A number that a kernel gave.
template <class T>
T number(py::handle value, Opcode opcode, const std::string& name) {
  try {
    return value.cast<T>();
  } catch (const py::cast_error&) {
    throw ValidationError(spec(opcode).name, name,
                          py::repr(value).cast<std::string>() +
                              (std::is_integral_v<T> ? " is not an integer of 64 bits" : " is not a number"));
  }
}

Access parse_access(const py::tuple& t, Opcode opcode) {
  Access a;
  a.storage = t[0].cast<uint32_t>();
  a.dtype = static_cast<Dtype>(t[1].cast<int>());
  a.offset = number<int64_t>(t[2], opcode, "offset");
  const auto dims = py::reinterpret_borrow<py::tuple>(t[3]);
  if (dims.size() > kMaxDims) throw py::value_error("too many dimensions in an access");
  for (auto d : dims) {
    const auto pair = py::reinterpret_borrow<py::tuple>(d);
    a.dims[a.ndim++] = {number<int64_t>(pair[0], opcode, "step"), number<int64_t>(pair[1], opcode, "size")};
  }
  if (t.size() > 4) {
    a.reg = t[4].cast<int>();
    a.reg_stride = number<int64_t>(t[5], opcode, "step");
    a.indexing = static_cast<Access::Indexing>(t[6].cast<int>());
    a.index_stride = t[7].cast<int64_t>();
    a.index_limit = t[8].cast<int64_t>();
    if (!t[9].is_none())
      a.index = std::make_shared<Access>(parse_access(py::reinterpret_borrow<py::tuple>(t[9]), opcode));
    if (!t[10].is_none()) std::tie(a.reg_low, a.reg_high) = t[10].cast<std::pair<int64_t, int64_t>>();
  }
  return a;
}

Instruction parse(int opcode, int engine, const py::tuple& operands, const py::dict& attrs, const py::tuple& list,
                  uint32_t source) {
  Instruction in;
  in.opcode = static_cast<Opcode>(opcode);
  in.engine = static_cast<Engine>(engine);
  in.source = source;
  for (auto o : operands) {
    Operand& operand = in.operands.emplace_back();
    if (o.is_none()) continue;
    if (py::isinstance<py::tuple>(o)) {
      operand.kind = Operand::Kind::tile;
      operand.access = parse_access(py::reinterpret_borrow<py::tuple>(o), in.opcode);
    } else {
      operand.kind = Operand::Kind::immediate;
      const auto& specs = in.spec().operands;
      const size_t i = in.operands.size() - 1;
      operand.immediate = number<double>(o, in.opcode, i < specs.size() ? std::string(specs[i].name) : "operand");
    }
  }
  static const auto by_name = [] {
    std::unordered_map<std::string, const Attribute*> m;
    for (const Attribute& a : attributes()) m.emplace(a.name, &a);
    return m;
  }();
  for (auto [key, value] : attrs) {
    const auto name = key.cast<std::string>();
    by_name.at(name)->set(in, number<double>(value, in.opcode, name));
  }
  for (auto v : list) in.list.push_back(number<int64_t>(v, in.opcode, "list"));
  return in;
}

struct PyCore {
  std::shared_ptr<Program> program;
  Core core;
  Instruction pending;  // step mode: a rendezvous that others have not reached

  PyCore(std::shared_ptr<Program> p, int program_id, int rank) : program(p), core(*p, program_id, rank) {}
};

// What is followed is where registers say now.
void follow_here(PyCore& c, Instruction& in) {
  const auto moves = [&](const Operand& o) { return o.is_tile() && o.access.reg >= 0 && c.core.is_inside(o.access); };
  if (std::ranges::none_of(in.operands, moves)) return c.program->follow(in, false);
  Instruction here = in;
  for (Operand& o : here.operands)
    if (moves(o)) o.access = c.core.placed(o.access);
  c.program->follow(here, false);
  in.accumulate = here.accumulate;
  in.unwritten = here.unwritten;
}

// Validates, follows and runs one instruction. True: it waits for other cores.
bool step(PyCore& c, int opcode, int engine, const py::tuple& operands, const py::dict& attrs, const py::tuple& list,
          uint32_t source) {
  Instruction in = parse(opcode, engine, operands, attrs, list, source);
  c.program->validate(in);
  follow_here(c, in);
  in.runtime_reads = nullptr;  // what registers say is known
  if (in.spec().rendezvous) {
    c.pending = std::move(in);
    return true;
  }
  py::gil_scoped_release unlocked;
  if (in.unwritten) c.program->tracker().settle(c.program->storages(), in, c.core.leave_out(in));
  c.core.execute(in);
  return false;
}

// Lets the waiting cores meet: returns which may go on. The others have ended; Deadlock if none may.
std::vector<bool> meet(const std::vector<PyCore*>& cores, const std::vector<bool>& waits) {
  std::vector<Core*> all;
  std::vector<const Instruction*> waiting;
  for (size_t i = 0; i < cores.size(); ++i) {
    all.push_back(&cores[i]->core);
    waiting.push_back(waits[i] ? &cores[i]->pending : nullptr);
  }
  std::vector<bool> released;
  if (!rendezvous(all, waiting, released)) throw deadlock(all, waiting);
  return released;
}

py::dict describe(const InstructionSpec& s) {
  py::dict d;
  d["opcode"] = static_cast<int>(s.opcode);
  d["name"] = std::string(s.name);
  py::list engines;
  for (int e = 1; e < static_cast<int>(Engine::count); ++e)
    if (s.engines >> e & 1) engines.append(std::string(kEngineNames[e]));
  d["engines"] = engines;
  d["default_engine"] = std::string(kEngineNames[static_cast<int>(s.prefer)]);
  d["min_generation"] = s.min_generation;
  d["semantics"] = std::string(s.semantics);
  d["extension"] = s.extension;
  py::list costs;
  for (const Cost& c : s.costs) {
    py::list conditions;
    for (int i = 0; i < static_cast<int>(Condition::count); ++i)
      if (c.conditions >> i & 1) conditions.append(std::string(kConditionWords[i]));
    py::dict row;
    row["formula"] = formula(c, Target());
    row["conditions"] = conditions;
    row["since"] = c.since;
    row["source"] = std::string(c.source);
    costs.append(row);
  }
  d["costs"] = costs;
  py::list operands;
  for (const OperandSpec& o : s.operands) {
    py::dict p;
    p["name"] = std::string(o.name);
    p["role"] = static_cast<int>(o.role);
    py::list memories, types;
    for (int m = 0; m < static_cast<int>(Memory::count); ++m)
      if (o.memories >> m & 1) memories.append(std::string(kMemoryNames[m]));
    for (int t = 0; t < kDtypes; ++t)
      if (o.types >> t & 1) types.append(std::string(kDtypeTable[t].name));
    p["memories"] = memories;
    p["dtypes"] = types;
    p["max_free"] = o.max_free;
    p["optional"] = o.optional;
    operands.append(p);
  }
  d["operands"] = operands;
  return d;
}

template <class Table>
py::dict names(const Table& table) {
  py::dict d;
  int i = 0;
  for (const auto& row : table) {
    if constexpr (requires { row.name; })
      d[py::str(std::string(row.name))] = i++;
    else
      d[py::str(std::string(row))] = i++;
  }
  return d;
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The software NeuronCore: instruction table, programs, executor and clock.";
  register_packed_types(m);

  static py::exception<Error> error(m, "Error");
  static py::exception<ValidationError> validation(m, "ValidationError", error.ptr());
  static py::exception<OutOfBounds> bounds(m, "OutOfBounds", error.ptr());
  static py::exception<UninitialisedRead> uninitialised(m, "UninitialisedRead", error.ptr());
  static py::exception<CapacityError> capacity(m, "CapacityError", error.ptr());
  static py::exception<Deadlock> deadlock(m, "Deadlock", error.ptr());
  static constexpr auto raise = [](const py::object& type, const Error& e) {
    py::object x = type(e.what());
    x.attr("instruction") = e.instruction;
    x.attr("operand") = e.operand;
    x.attr("limit") = e.limit;
    x.attr("source") = e.source;
    PyErr_SetObject(type.ptr(), x.ptr());
  };
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const ValidationError& e) {
      raise(validation, e);
    } catch (const OutOfBounds& e) {
      raise(bounds, e);
    } catch (const UninitialisedRead& e) {
      raise(uninitialised, e);
    } catch (const CapacityError& e) {
      raise(capacity, e);
    } catch (const Deadlock& e) {
      raise(deadlock, e);
    } catch (const Error& e) {
      raise(error, e);
    }
  });

  m.attr("DTYPES") = names(kDtypeTable);
  py::dict sizes;
  for (const auto& row : kDtypeTable) sizes[py::str(std::string(row.name))] = row.size;
  m.attr("DTYPE_SIZES") = sizes;
  m.attr("ALU_OPS") = names(kAluTable);
  m.attr("FUNCTIONS") = names(kFunctionTable);
  m.attr("ENGINES") = names(kEngineNames);
  m.attr("MEMORIES") = names(kMemoryNames);
  m.attr("PARTITIONS") = kPartitions;
  m.attr("PSUM_BANKS") = kPsumBanks;
  m.attr("PSUM_BANK_BYTES") = kPsumBankBytes;
  py::list instructions;
  for (const InstructionSpec& s : all_instructions()) instructions.append(describe(s));
  m.attr("INSTRUCTIONS") = instructions;
  py::list rules;
  for (std::string_view rule : clock_rules()) rules.append(std::string(rule));
  m.attr("CLOCK_RULES") = rules;

  constexpr const char* kLaneNames[] = {"f32", "i32", "any"};
  py::dict lane_ops;  // (inputs, lanes of inputs, lanes of the result, meaning) by name
  for (const LaneOpInfo& o : kLaneOpTable)
    lane_ops[py::str(o.name)] =
        py::make_tuple(o.inputs, kLaneNames[static_cast<int>(o.in)], kLaneNames[static_cast<int>(o.out)], o.meaning);
  m.attr("LANE_OPS") = lane_ops;
  m.def("alu_class", [](int op) { return static_cast<int>(info(static_cast<AluOp>(op)).cls); });
  m.def("alu_inputs", [](int op) { return info(static_cast<AluOp>(op)).inputs; });
  m.def("simd_level", [] { return std::string(kernels().name); });

  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init<int>(), py::arg("generation"))
      .def(
          "add_storage",
          [](Program& p, std::string name, int memory, int64_t partitions, int64_t row_bytes, int64_t address,
             int64_t partition_start, bool external, uint32_t source) {
            return p.add_storage({std::move(name), static_cast<Memory>(memory), partitions, row_bytes, address,
                                  partition_start, external, source});
          },
          py::arg("name"), py::arg("memory"), py::arg("partitions"), py::arg("row_bytes"), py::arg("address") = -1,
          py::arg("partition_start") = 0, py::arg("external") = false, py::arg("source") = 0)
      .def("add_register", &Program::add_register)
      // For who runs it in C++; valid while the object lives.
      .def_property_readonly("address", [](const Program& p) { return reinterpret_cast<uintptr_t>(&p); })
      .def("append",
           [](Program& p, int opcode, int engine, const py::tuple& operands, const py::dict& attrs,
              const py::tuple& list, uint32_t source) {
             Instruction in = parse(opcode, engine, operands, attrs, list, source);
             p.validate(in);
             p.append(std::move(in));
           })
      .def("seal", &Program::seal, py::arg("several") = false)
      .def(
          "check_capacity",
          [](Program& p, int64_t sbuf_bytes) { Program::check_capacity(p.storages(), p.tracker().live(), sbuf_bytes); })
      .def("check_results", [](Program& p, const std::vector<uint32_t>& results) { p.check_results(results); })
      .def_property_readonly("loop_depth", &Program::loop_depth)
      .def_property_readonly("proves_unwritten_rows", &Program::proves_unwritten_rows)
      .def("first_read", [](const Program& p) { return p.tracker().first_read(p.storages()); })
      .def("follow_shared", [](Program& p) { p.shared_uses().follow(); })
      .def("set_check", [](Program& p, bool on) { p.tracker().check() = on; })
      .def("mark_written", [](Program& p, uint32_t s) { p.tracker().mark_all(s); })
      .def("all_written", [](const Program& p, uint32_t s) { return p.tracker().map(s).everywhere(); })
      .def("__len__", [](const Program& p) { return p.instructions().size(); })
      .def("disassemble",
           [](const Program& p) {
             std::string out;
             for (const auto& in : p.instructions()) out += disassemble(p.storages(), in) + "\n";
             return out;
           })
      .def("live_bytes",
           [](Program& p, int memory) {  // (first, last, bytes per partition, name) of each buffer, instruction counts
             py::list out;
             for (const auto& r : p.tracker().live().ranges()) {
               const Storage& s = p.storages()[r.storage];
               if (static_cast<int>(s.memory) == memory && r.first >= 0)
                 out.append(py::make_tuple(r.first, r.last, s.row_bytes, s.name));
             }
             return out;
           })
      .def("source", [](const Program& p, uint32_t i) { return p.instructions().at(i).source; })
      .def("name", [](const Program& p, uint32_t i) { return std::string(p.instructions().at(i).spec().name); });

  py::class_<PyCore>(m, "Core")
      .def(py::init<std::shared_ptr<Program>, int, int>(), py::arg("program"), py::arg("program_id") = 0,
           py::arg("rank") = 0)
      .def("bind", [](PyCore& c, uint32_t s, uintptr_t p) { c.core.bind(s, reinterpret_cast<void*>(p)); })
      .def("allocate", [](PyCore& c, uint32_t s) { c.core.allocate(s); })
      .def("release",
           [](PyCore& c, uint32_t s) {
             c.core.release(s);
             c.program->tracker().release(s);
           })
      .def("reg", [](const PyCore& c, int r) { return c.core.reg(r); })
      .def("set_reg", [](PyCore& c, int r, int64_t v) { c.core.set_reg(r, v); })
      .def("seed", [](PyCore& c, uint32_t s) { c.core.seed(s); })
      .def("step", &step)
      .def(
          "memory",
          [](PyCore& c, uint32_t s) {  // (address, bytes from partition to partition)
            return std::pair(reinterpret_cast<uintptr_t>(c.core.memory(s)), c.core.pitch(s));
          },
          "Where a buffer lies: (address, bytes from one partition to the next).");

  m.def("meet", &meet);
  m.def("find_race", [](const Program& a, const Program& b, const std::vector<std::pair<uint32_t, uint32_t>>& same) {
    py::object found = py::none();
    if (const auto race = find_race(a.shared_uses(), b.shared_uses(), same)) {
      auto use = [](const SharedUses::Use& u) {
        return py::make_tuple(std::string(spec(u.opcode).name), u.write, u.source);
      };
      found = py::make_tuple(a.storages()[race->first.storage].name, race->byte, use(race->first), use(race->second));
    }
    return found;  // (buffer, byte, (instruction, whether it writes, line) of a and of b)
  });
  m.def("run", [](const std::vector<PyCore*>& cores) {
    std::vector<Core*> all;
    for (PyCore* c : cores) all.push_back(&c->core);
    static const std::function<void()> signals = [] {  // Ctrl-C ends what runs for long
      py::gil_scoped_acquire locked;
      if (PyErr_CheckSignals()) throw py::error_already_set();
    };
    for (Core* c : all) c->set_interrupt(&signals);
    py::gil_scoped_release unlocked;
    run(all);
  });

  py::class_<Target>(m, "Target")
      .def(py::init<>())
      .def_readwrite("generation", &Target::generation)
      .def("set_clock", [](Target& t, int engine, double ghz) { t.clock_ghz.at(engine) = ghz; })
#define FIELD(NAME) .def_readwrite(#NAME, &Target::NAME)
          FIELD(sbuf_bytes) FIELD(dma_engines) FIELD(dma_bytes_per_ns) FIELD(dma_row_ns) FIELD(dma_row_overhead_ns)
              FIELD(dma_start_ns) FIELD(instruction_ns) FIELD(min_cycles) FIELD(access_cycles) FIELD(hbm_bytes_per_ns)
                  FIELD(stride_bytes) FIELD(shared_ports) FIELD(pe_warm_ns);
#undef FIELD

  m.def("predict", [](const Program& p, const Target& t) {
    const Timeline line = predict(p, t);
    py::list events;
    for (const Event& e : line.events) {
      const Instruction& in = p.instructions()[e.instruction];
      const std::string_view of = e.flops > 0 ? info(in.operand(1).access.dtype).name : "";  // matmul's stationary
      events.append(py::make_tuple(e.instruction, std::string(kEngineNames[static_cast<int>(e.engine)]), e.start_ns,
                                   e.end_ns, e.bytes, e.hbm_bytes, e.flops, std::string(of), e.waits_for, e.times));
    }
    py::list loops;  // (line, trips, trips on the timeline)
    for (const LoopNote& l : line.loops) loops.append(py::make_tuple(l.source, l.trips, l.shown));
    py::dict busy;
    for (int e = 1; e < static_cast<int>(Engine::count); ++e)
      busy[py::str(std::string(kEngineNames[e]))] = line.busy_ns[e];
    return py::make_tuple(line.latency_ns, busy, events, loops);
  });
}
