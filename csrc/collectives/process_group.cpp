#include "process_group.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "aten/bridge.h"
#include "group.h"
#include "reduce.h"
#include "runtime/device.h"
#include "work.h"

namespace neuron {

using collectives::Call;
using collectives::DataType;
using collectives::Group;
using collectives::Kind;
using collectives::Piece;
using collectives::Reduction;
using collectives::Signature;

namespace {

std::function<void()>& interrupt_check() {
  static auto* check = new std::function<void()>;
  return *check;
}

std::atomic<uint32_t> g_groups{0};
constexpr auto kDrainTime = std::chrono::seconds(5);

std::optional<DataType> known_type(c10::ScalarType t) {
  switch (t) {
#define X(scalar, type)         \
  case c10::ScalarType::scalar: \
    return DataType::type;
    // clang-format off
    X(Byte, uint8) X(Char, int8) X(Bool, bool8) X(Short, int16) X(UInt16, uint16) X(Int, int32) X(UInt32, uint32)
    X(Long, int64) X(UInt64, uint64) X(Half, float16) X(BFloat16, bfloat16) X(Float, float32) X(Double, float64)
    X(ComplexFloat, complex64) X(ComplexDouble, complex128)
    // clang-format on
#undef X
                default : return std::nullopt;
  }
}

Reduction reduction_of(const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM:
    case c10d::ReduceOp::PREMUL_SUM:
      return Reduction::sum;
    case c10d::ReduceOp::AVG:
      return Reduction::avg;
    case c10d::ReduceOp::PRODUCT:
      return Reduction::product;
    case c10d::ReduceOp::MIN:
      return Reduction::min;
    case c10d::ReduceOp::MAX:
      return Reduction::max;
    case c10d::ReduceOp::BAND:
      return Reduction::band;
    case c10d::ReduceOp::BOR:
      return Reduction::bor;
    case c10d::ReduceOp::BXOR:
      return Reduction::bxor;
    default:
      TORCH_CHECK_VALUE(false, "This reduce operation is not known to the neuron backend.");
  }
}

// A tensor as CPU memory. Its stream may not have written it yet.
at::Tensor on_host(const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.defined() && t.layout() == c10::kStrided, "Collectives on neuron take dense tensors, but got ",
                    t.defined() ? t.toString() : "an undefined one",
                    ". Use .to_dense(), or reduce the values and indices of sparse tensors.");
  if (t.device().is_cpu()) return t;
  TORCH_CHECK_VALUE(is_neuron(t), "The neuron backend takes neuron and CPU tensors, but got one on ", t.device(), ".");
  return Bridge(t.device().index()).to_host(t);
}

Piece piece_of(const at::Tensor& t) { return {static_cast<std::byte*>(t.data_ptr()), t.nbytes()}; }

// Splits contiguous memory into equal pieces, or by rows.
std::vector<Piece> equal_pieces(const at::Tensor& t, int n) {
  std::vector<Piece> out;
  auto* data = static_cast<std::byte*>(t.data_ptr());
  const size_t bytes = t.nbytes() / n;
  for (int i = 0; i < n; i++) out.push_back({data + i * bytes, bytes});
  return out;
}

std::vector<Piece> row_pieces(const at::Tensor& t, const std::vector<int64_t>& rows, int n, const char* which) {
  TORCH_CHECK_VALUE(static_cast<int>(rows.size()) == n, "all_to_all: ", which, " has ", rows.size(), " entries for ", n,
                    " ranks.");
  TORCH_CHECK_VALUE(t.dim() > 0, "all_to_all: tensors need a dimension to split.");
  const size_t row_bytes = t.size(0) ? t.nbytes() / t.size(0) : 0;
  auto* data = static_cast<std::byte*>(t.data_ptr());
  std::vector<Piece> out;
  int64_t total = 0;
  for (int64_t r : rows) {
    TORCH_CHECK_VALUE(r >= 0, "all_to_all: ", which, " has a negative entry.");
    out.push_back({data + total * row_bytes, r * row_bytes});
    total += r;
  }
  TORCH_CHECK_VALUE(total == t.size(0), "all_to_all: ", which, " adds up to ", total, " rows, but the tensor has ",
                    t.size(0), ".");
  return out;
}

size_t biggest(const std::vector<Piece>& pieces) {
  size_t most = 0;
  for (auto& p : pieces) most = std::max(most, p.bytes);
  return most;
}

size_t total_bytes(const std::vector<Piece>& pieces) {
  size_t sum = 0;
  for (auto& p : pieces) sum += p.bytes;
  return sum;
}

void check_single(const std::vector<at::Tensor>& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, " takes one tensor per rank, but got ", tensors.size(), ".");
}

}  // namespace

// Tensors of an operation as calls over plain memory, and what has to stay alive and be copied for them.
class ProcessGroupNeuron::Plan {
 public:
  explicit Plan(int size) : size_(size), state_(std::make_shared<WorkState>()) {}

  // Contiguous memory of an input.
  at::Tensor input(const at::Tensor& t) {
    note(t);
    at::Tensor host = on_host(t);
    if (plain(host)) return host;
    settle(t);
    return host.resolve_conj().resolve_neg().contiguous();
  }
  // Contiguous memory whose content becomes that of `t`.
  at::Tensor output(const at::Tensor& t) {
    note(t);
    state_->outputs.push_back(t);
    at::Tensor host = on_host(t);
    if (plain(host)) return keep(host);
    at::Tensor temporary = keep(at::empty(host.sizes(), host.options()));
    state_->copies.emplace_back(host, temporary);
    return temporary;
  }
  // An input that becomes an output.
  at::Tensor in_place(const at::Tensor& t) {
    at::Tensor out = output(t);
    if (!state_->copies.empty() && state_->copies.back().second.is_same(out)) {
      settle(t);
      out.copy_(state_->copies.back().first);
    }
    return out;
  }
  // An input of a sum, multiplied if the operation says so.
  at::Tensor scaled(const at::Tensor& t, const c10d::ReduceOp& op) {
    at::Tensor in = input(t);
    return keep(op.op_ == c10d::ReduceOp::PREMUL_SUM ? multiply(in, op) : in);
  }
  at::Tensor multiply(const at::Tensor& t, const c10d::ReduceOp& op) {
    for (auto& device : state_->devices) current_queue(device.index()).drain();
    auto* factor = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
    TORCH_CHECK_VALUE(factor, "PREMUL_SUM needs a factor.");
    if (!factor->tensor_factor.defined()) return t.mul(factor->double_factor).to(t.scalar_type());
    return t.mul(on_host(factor->tensor_factor).item()).to(t.scalar_type());
  }
  at::Tensor keep(const at::Tensor& t) {
    state_->kept.push_back(t);
    return t;
  }

  void add(Kind kind, const at::Tensor& like, std::vector<Piece> in, std::vector<Piece> out, size_t most,
           size_t count_bytes, int root = -1, bool uneven = false) {
    Signature s = signature(kind, like);
    s.root = root;
    s.count = count_bytes / collectives::size_of(s.dtype);
    calls_.push_back({s, std::move(in), std::move(out), most, uneven});
  }
  void add_reduction(Kind kind, const at::Tensor& like, const c10d::ReduceOp& op, std::vector<Piece> in,
                     std::vector<Piece> out, size_t most, size_t count_bytes, int root = -1) {
    add(kind, like, std::move(in), std::move(out), most, count_bytes, root);
    Signature& s = calls_.back().signature;
    s.reduction = reduction_of(op);
    TORCH_CHECK_TYPE(collectives::reducible(s.dtype, s.reduction), "Reduce operation ",
                     collectives::name_of(s.reduction), " does not exist for tensors of type ", like.scalar_type(),
                     ".");
  }
  static Signature signature(Kind kind, const at::Tensor& like) {
    Signature s;
    s.kind = kind;
    s.dtype = known_type(like.scalar_type()).value_or(DataType::opaque);
    return s;
  }

  void reduce_all(const at::Tensor& t, const c10d::ReduceOp& op) {
    at::Tensor out = in_place(t), in = op.op_ == c10d::ReduceOp::PREMUL_SUM ? keep(multiply(out, op)) : out;
    add_reduction(Kind::all_reduce, t, op, {piece_of(in)}, {piece_of(out)}, 0, out.nbytes());
  }
  void gather_all(const at::Tensor& out, const at::Tensor& in) {
    TORCH_CHECK_TYPE(out.scalar_type() == in.scalar_type(), "all_gather: the output is ", out.scalar_type(),
                     ", the input ", in.scalar_type(), ".");
    TORCH_CHECK_VALUE(out.numel() == in.numel() * size_, "all_gather: the output has ", out.numel(), " elements; ",
                      size_, " ranks times ", in.numel(), " are needed.");
    at::Tensor from = keep(input(in)), to = output(out);
    add(Kind::all_gather, in, {piece_of(from)}, equal_pieces(to, size_), from.nbytes(), to.nbytes());
  }
  void gather_list(const Tensors& outs, const at::Tensor& in, int rank) {
    TORCH_CHECK_VALUE(static_cast<int>(outs.size()) == size_, "all_gather: ", outs.size(), " outputs for ", size_,
                      " ranks.");
    TORCH_CHECK_VALUE(outs[rank].numel() == in.numel(), "all_gather: output ", rank, " has ", outs[rank].numel(),
                      " elements, this rank's input ", in.numel(), ".");
    at::Tensor from = keep(input(in));
    std::vector<Piece> pieces;
    for (auto& o : outs) {
      TORCH_CHECK_TYPE(o.scalar_type() == in.scalar_type(), "all_gather: an output is ", o.scalar_type(),
                       ", the input ", in.scalar_type(), ".");
      pieces.push_back(piece_of(output(o)));
    }
    const size_t most = biggest(pieces), total = total_bytes(pieces);
    add(Kind::all_gather, in, {piece_of(from)}, std::move(pieces), most, total);
  }
  void scatter_sum(const at::Tensor& out, const at::Tensor& in, const c10d::ReduceOp& op) {
    TORCH_CHECK_TYPE(out.scalar_type() == in.scalar_type(), "reduce_scatter: the output is ", out.scalar_type(),
                     ", the input ", in.scalar_type(), ".");
    TORCH_CHECK_VALUE(in.numel() == out.numel() * size_, "reduce_scatter: the input has ", in.numel(), " elements; ",
                      size_, " ranks times ", out.numel(), " are needed.");
    at::Tensor from = scaled(in, op), to = output(out);
    add_reduction(Kind::reduce_scatter, in, op, equal_pieces(from, size_), {piece_of(to)}, to.nbytes(), from.nbytes());
  }

  // What the current streams still have to do for the tensors precedes the operation; null if there is nothing.
  // Starts the streams' work.
  std::shared_ptr<collectives::Start> start() const;
  std::vector<Call> take_calls() { return std::move(calls_); }
  const std::shared_ptr<WorkState>& state() const { return state_; }

 private:
  static bool plain(const at::Tensor& t) { return t.is_contiguous() && !t.is_conj() && !t.is_neg(); }
  // The host is about to read the tensor.
  static void settle(const at::Tensor& t) {
    if (is_neuron(t)) current_queue(t.device().index()).drain();
  }
  void note(const at::Tensor& t) {
    keep(t);
    auto& devices = state_->devices;
    if (is_neuron(t) && std::find(devices.begin(), devices.end(), t.device()) == devices.end())
      devices.push_back(t.device());
  }
  int size_;
  std::shared_ptr<WorkState> state_;
  std::vector<Call> calls_;
};

namespace {
// The point in the streams where an operation may start.
struct StartTask final : Task {
  explicit StartTask(std::shared_ptr<collectives::Start> s, std::shared_ptr<std::atomic<int>> l)
      : start(std::move(s)), left(std::move(l)) {}
  void run() override {
    if (left->fetch_sub(1) != 1) return;
    start->open.store(true, std::memory_order_release);
    collectives::Node::get().engine().kick();
  }
  std::shared_ptr<collectives::Start> start;
  std::shared_ptr<std::atomic<int>> left;  // streams that have not come so far
};
}  // namespace

std::shared_ptr<collectives::Start> ProcessGroupNeuron::Plan::start() const {
  std::vector<StreamQueue*> busy;
  for (auto& device : state_->devices) {
    auto& queue = current_queue(device.index());
    queue.settle();  // the window may hold operators that write the inputs
    if (!queue.idle()) busy.push_back(&queue);
  }
  if (busy.empty()) return nullptr;
  auto start = std::make_shared<collectives::Start>();
  auto left = std::make_shared<std::atomic<int>>(static_cast<int>(busy.size()));
  for (StreamQueue* queue : busy) queue->enqueue(std::make_unique<StartTask>(start, left), true);
  return start;
}

ProcessGroupNeuron::ProcessGroupNeuron(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                       std::chrono::milliseconds timeout, std::string name,
                                       std::vector<uint64_t> global_ranks)
    : Backend(rank, size),
      store_(std::move(store)),
      options_(c10::make_intrusive<NeuronOptions>(timeout)),
      number_(g_groups++) {
  options_->group_name = name;
  options_->global_ranks_in_group = global_ranks;
  collectives::GroupOptions options;
  options.name = std::move(name);
  options.rank = rank;
  options.size = size;
  options.global_ranks = std::move(global_ranks);
  // Groups that are made from one store (PyTorch splits a group once for each type of device) must not read each
  // other's keys: all ranks make them in one order.
  const int64_t made = store_->add("neuron/made/" + std::to_string(rank), 1);
  options.exchange = [&](const std::string& what, const std::string& mine) {
    auto key = [&](int r) { return "neuron/" + std::to_string(made) + "/" + what + "/" + std::to_string(r); };
    store_->set(key(rank), mine);
    std::vector<std::string> all;
    for (int r = 0; r < size; r++) {
      try {
        store_->wait({key(r)}, timeout);
      } catch (const std::exception& e) {
        throw collectives::CommunicationError(c10::str("neuron: the making of group '", options_->group_name,
                                                       "' on rank ", rank, " failed: rank ", r, " has not come within ",
                                                       timeout.count(), " ms: ", e.what()));
      }
      all.push_back(store_->get_to_str(key(r)));
    }
    return all;
  };
  TORCH_CHECK_WITH(DistBackendError, size >= 1, "A process group needs ranks.");
  try {
    group_ = std::make_shared<Group>(std::move(options));
  } catch (const collectives::CommunicationError& e) {
    TORCH_CHECK_WITH(DistBackendError, false, e.what());
  }
  static std::once_flag once;
  std::call_once(once, [&] {
    group_->node().engine().set_interrupt_check(interrupt_check());
    group_->node().engine().set_observer(StreamQueue::gate_opened);
  });
}

ProcessGroupNeuron::~ProcessGroupNeuron() { shutdown(); }

int64_t ProcessGroupNeuron::timeout_ns(std::chrono::milliseconds timeout) const {
  return std::chrono::nanoseconds(timeout.count() > 0 ? timeout : options_->timeout).count();
}

c10d::ErrorType ProcessGroupNeuron::getError() {
  return group_->failed() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
}

void ProcessGroupNeuron::abort() { group_->abort("abort() was called on rank " + std::to_string(getRank())); }

void ProcessGroupNeuron::shutdown() { group_->drain(std::chrono::nanoseconds(kDrainTime).count()); }

c10::intrusive_ptr<c10d::Backend> ProcessGroupNeuron::part(const c10::intrusive_ptr<c10d::Store>& store,
                                                           const std::vector<int>& ranks,
                                                           const c10::intrusive_ptr<Options>& options,
                                                           const char* suffix) {
  auto me = std::find(ranks.begin(), ranks.end(), getRank());
  if (me == ranks.end()) return nullptr;
  std::vector<uint64_t> global;
  for (int r : ranks)
    global.push_back(options_->global_ranks_in_group.empty() ? static_cast<uint64_t>(r)
                                                             : options_->global_ranks_in_group.at(r));
  return c10::make_intrusive<ProcessGroupNeuron>(
      store, static_cast<int>(me - ranks.begin()), static_cast<int>(ranks.size()),
      options ? options->timeout : options_->timeout,
      options && !options->group_name.empty() ? options->group_name : options_->group_name + suffix, std::move(global));
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNeuron::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                            const std::vector<int>& ranks,
                                                            const c10::intrusive_ptr<Options>& options) {
  splits_++;
  return part(store, ranks, options, ":split");
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNeuron::merge(const c10::intrusive_ptr<c10d::Store>& store,
                                                            const c10::intrusive_ptr<Options>& options, const int& rank,
                                                            const int& size) {
  return c10::make_intrusive<ProcessGroupNeuron>(
      store, rank, size, options ? options->timeout : options_->timeout,
      options && !options->group_name.empty() ? options->group_name : options_->group_name + ":merged",
      std::vector<uint64_t>{});
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupNeuron::shrink(const std::vector<int64_t>& excluded, int flags,
                                                             const c10::intrusive_ptr<Options>& options) {
  constexpr int kAbort = 1;
  if (flags & kAbort) abort();
  std::vector<int> left;
  std::string key = "neuron/shrink";
  for (int64_t r : excluded) key.append("/").append(std::to_string(r));
  for (int r = 0; r < getSize(); r++)
    if (std::find(excluded.begin(), excluded.end(), r) == excluded.end()) left.push_back(r);
  auto smaller = part(c10::make_intrusive<c10d::PrefixStore>(key, store_), left, options, ":shrunk");
  TORCH_CHECK_VALUE(smaller, "Rank ", getRank(), " cannot shrink a group to one without itself.");
  return smaller;
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::launch(Plan plan, c10d::OpType type, std::chrono::milliseconds timeout,
                                                       bool async) {
  auto state = plan.state();
  state->number = group_->collectives_started();
  state->group = number_;
  auto start = plan.start();
  auto op = group_->start(
      plan.take_calls(), timeout_ns(timeout), [state](std::exception_ptr e) { return state->finish(e); },
      std::move(start));
  WorkPtr work = c10::make_intrusive<WorkNeuron>(getRank(), type, std::move(op), std::move(state));
  if (coalescing_) coalesced_.push_back(work);
  if (async) group_->node().engine().kick();
  return work;
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  check_single(tensors, "broadcast");
  Plan plan(getSize());
  const int root = static_cast<int>(opts.rootRank);
  at::Tensor t = plan.in_place(tensors[0]);
  std::vector<Piece> in, out(getSize());
  if (root == getRank())
    in = {piece_of(t)};
  else
    out[root] = piece_of(t);
  plan.add(Kind::broadcast, t, std::move(in), std::move(out), t.nbytes(), t.nbytes(), root);
  return launch(std::move(plan), c10d::OpType::BROADCAST, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  check_single(tensors, "all_reduce");
  if (tensors[0].layout() != c10::kStrided) return allreduce_sparse(tensors, opts);
  Plan plan(getSize());
  plan.reduce_all(tensors[0], opts.reduceOp);
  return launch(std::move(plan), c10d::OpType::ALLREDUCE, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::allreduce_coalesced(Tensors& tensors,
                                                                    const c10d::AllreduceCoalescedOptions& opts) {
  TORCH_CHECK_VALUE(!tensors.empty(), "all_reduce_coalesced takes at least one tensor.");
  Plan plan(getSize());
  for (auto& t : tensors) plan.reduce_all(t, opts.reduceOp);
  return launch(std::move(plan), c10d::OpType::ALLREDUCE_COALESCED, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  check_single(tensors, "reduce");
  Plan plan(getSize());
  const int root = static_cast<int>(opts.rootRank);
  std::vector<Piece> out;
  at::Tensor in;
  if (root == getRank()) {
    at::Tensor t = plan.in_place(tensors[0]);
    in = opts.reduceOp.op_ == c10d::ReduceOp::PREMUL_SUM ? plan.keep(plan.multiply(t, opts.reduceOp)) : t;
    out = {piece_of(t)};
  } else {
    in = plan.scaled(tensors[0], opts.reduceOp);
  }
  plan.add_reduction(Kind::reduce, in, opts.reduceOp, {piece_of(in)}, std::move(out), 0, in.nbytes(), root);
  return launch(std::move(plan), c10d::OpType::REDUCE, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& opts) {
  check_single(inputs, "all_gather");
  TORCH_CHECK_VALUE(outputs.size() == 1, "all_gather takes one list of outputs.");
  Plan plan(getSize());
  plan.gather_list(outputs[0], inputs[0], getRank());
  return launch(std::move(plan), c10d::OpType::ALLGATHER, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::AllgatherOptions& opts) {
  Plan plan(getSize());
  plan.gather_all(output, input);
  return launch(std::move(plan), c10d::OpType::_ALLGATHER_BASE, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& opts) {
  // Lists by rank, each with one output per input.
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == getSize() && !inputs.empty(), "all_gather_coalesced takes ",
                    getSize(), " lists of outputs and at least one input.");
  Plan plan(getSize());
  for (size_t i = 0; i < inputs.size(); i++) {
    Tensors outs;
    for (auto& list : outputs) outs.push_back(list.at(i));
    plan.gather_list(outs, inputs[i], getRank());
  }
  return launch(std::move(plan), c10d::OpType::ALLGATHER_COALESCED, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                                const c10d::AllgatherOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size() && !inputs.empty(),
                    "all_gather_into_tensor_coalesced: ", outputs.size(), " outputs for ", inputs.size(), " inputs.");
  Plan plan(getSize());
  for (size_t i = 0; i < inputs.size(); i++) plan.gather_all(outputs[i], inputs[i]);
  return launch(std::move(plan), c10d::OpType::ALLGATHER_COALESCED, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                       const c10d::GatherOptions& opts) {
  check_single(inputs, "gather");
  Plan plan(getSize());
  const int root = static_cast<int>(opts.rootRank);
  at::Tensor in = plan.keep(plan.input(inputs[0]));
  std::vector<Piece> out(getSize());
  if (root == getRank()) {
    TORCH_CHECK_VALUE(outputs.size() == 1 && static_cast<int>(outputs[0].size()) == getSize(),
                      "gather: the root needs ", getSize(), " outputs.");
    for (int r = 0; r < getSize(); r++) {
      TORCH_CHECK_VALUE(outputs[0][r].numel() == in.numel() && outputs[0][r].scalar_type() == in.scalar_type(),
                        "gather: output ", r, " differs in size or type from the input.");
      out[r] = piece_of(plan.output(outputs[0][r]));
    }
  }
  plan.add(Kind::gather, in, {piece_of(in)}, std::move(out), in.nbytes(), in.nbytes(), root);
  return launch(std::move(plan), c10d::OpType::GATHER, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                        const c10d::ScatterOptions& opts) {
  check_single(outputs, "scatter");
  Plan plan(getSize());
  const int root = static_cast<int>(opts.rootRank);
  at::Tensor out = plan.output(outputs[0]);
  std::vector<Piece> in, to(getSize());
  to[root] = piece_of(out);
  if (root == getRank()) {
    TORCH_CHECK_VALUE(inputs.size() == 1 && static_cast<int>(inputs[0].size()) == getSize(), "scatter: the root needs ",
                      getSize(), " inputs.");
    for (auto& t : inputs[0]) {
      TORCH_CHECK_VALUE(t.numel() == out.numel() && t.scalar_type() == out.scalar_type(),
                        "scatter: an input differs in size or type from the output.");
      in.push_back(piece_of(plan.keep(plan.input(t))));
    }
  }
  plan.add(Kind::scatter, out, std::move(in), std::move(to), out.nbytes(), out.nbytes(), root);
  return launch(std::move(plan), c10d::OpType::SCATTER, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                               const c10d::ReduceScatterOptions& opts) {
  check_single(outputs, "reduce_scatter");
  TORCH_CHECK_VALUE(inputs.size() == 1 && static_cast<int>(inputs[0].size()) == getSize(), "reduce_scatter takes ",
                    getSize(), " inputs.");
  Plan plan(getSize());
  at::Tensor out = plan.output(outputs[0]);
  TORCH_CHECK_VALUE(inputs[0][getRank()].numel() == out.numel(), "reduce_scatter: input ", getRank(), " has ",
                    inputs[0][getRank()].numel(), " elements, the output ", out.numel(), ".");
  std::vector<Piece> in;
  for (auto& t : inputs[0]) {
    TORCH_CHECK_TYPE(t.scalar_type() == out.scalar_type(), "reduce_scatter: an input is ", t.scalar_type(),
                     ", the output ", out.scalar_type(), ".");
    in.push_back(piece_of(plan.scaled(t, opts.reduceOp)));
  }
  const size_t most = biggest(in), total = total_bytes(in);
  plan.add_reduction(Kind::reduce_scatter, out, opts.reduceOp, std::move(in), {piece_of(out)}, most, total);
  return launch(std::move(plan), c10d::OpType::REDUCE_SCATTER, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                     const c10d::ReduceScatterOptions& opts) {
  Plan plan(getSize());
  plan.scatter_sum(output, input, opts.reduceOp);
  return launch(std::move(plan), c10d::OpType::_REDUCE_SCATTER_BASE, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  TORCH_CHECK_VALUE(outputs.size() == inputs.size() && !inputs.empty(),
                    "reduce_scatter_tensor_coalesced: ", outputs.size(), " outputs for ", inputs.size(), " inputs.");
  Plan plan(getSize());
  for (size_t i = 0; i < inputs.size(); i++) plan.scatter_sum(outputs[i], inputs[i], opts.reduceOp);
  return launch(std::move(plan), c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                              std::vector<int64_t>& output_splits,
                                                              std::vector<int64_t>& input_splits,
                                                              const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_TYPE(output.scalar_type() == input.scalar_type(), "all_to_all: the output is ", output.scalar_type(),
                   ", the input ", input.scalar_type(), ".");
  Plan plan(getSize());
  at::Tensor in = plan.keep(plan.input(input)), out = plan.output(output);
  if (input_splits.empty() && output_splits.empty()) {
    TORCH_CHECK_VALUE(in.numel() == out.numel(), "all_to_all: input and output differ in size.");
    TORCH_CHECK_VALUE(in.dim() > 0 && in.size(0) % getSize() == 0,
                      "all_to_all: the first dimension does not divide by ", getSize(), " ranks; give split sizes.");
    plan.add(Kind::all_to_all, in, equal_pieces(in, getSize()), equal_pieces(out, getSize()), in.nbytes() / getSize(),
             in.nbytes());
  } else {
    auto rows = [&](const at::Tensor& t, const std::vector<int64_t>& splits, const char* which) {
      if (!splits.empty()) return row_pieces(t, splits, getSize(), which);
      TORCH_CHECK_VALUE(t.dim() > 0 && t.size(0) % getSize() == 0,
                        "all_to_all: the first dimension does not divide by ", getSize(), " ranks.");
      return equal_pieces(t, getSize());
    };
    auto from = rows(in, input_splits, "input_split_sizes"), to = rows(out, output_splits, "output_split_sizes");
    const size_t most = biggest(from);
    plan.add(Kind::all_to_all, in, std::move(from), std::move(to), most, 0, -1, true);
  }
  return launch(std::move(plan), c10d::OpType::ALLTOALL_BASE, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::alltoall(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllToAllOptions& opts) {
  TORCH_CHECK_VALUE(static_cast<int>(outputs.size()) == getSize() && static_cast<int>(inputs.size()) == getSize(),
                    "all_to_all takes ", getSize(), " inputs and outputs.");
  Plan plan(getSize());
  std::vector<Piece> in, out;
  for (auto& t : inputs) in.push_back(piece_of(plan.keep(plan.input(t))));
  for (auto& t : outputs) out.push_back(piece_of(plan.output(t)));
  const size_t most = biggest(in);
  plan.add(Kind::all_to_all, inputs[0], std::move(in), std::move(out), most, 0, -1, true);
  return launch(std::move(plan), c10d::OpType::ALLTOALL, opts.timeout, opts.asyncOp);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::message(Kind kind, Tensors& tensors, int peer, int tag,
                                                        c10d::OpType type) {
  check_single(tensors, collectives::name_of(kind));
  TORCH_CHECK_VALUE(peer < getSize() && peer >= collectives::kAnySource, "There is no rank ", peer,
                    " in this group of ", getSize(), ".");
  Plan plan(getSize());
  auto state = plan.state();
  const int64_t timeout = timeout_ns(c10d::kUnsetTimeout);
  auto done = [state](std::exception_ptr e) { return state->finish(e); };
  const DataType dtype = Plan::signature(kind, tensors[0]).dtype;
  std::shared_ptr<collectives::GroupOp> op;
  if (kind == Kind::send) {
    at::Tensor t = plan.keep(plan.input(tensors[0]));
    op = group_->send(peer, tag, dtype, piece_of(t), timeout, done, plan.start());
  } else {
    at::Tensor t = plan.output(tensors[0]);
    state->source = std::make_shared<int>(peer);
    op = group_->receive(peer, tag, dtype, piece_of(t), timeout, state->source, done, plan.start());
  }
  WorkPtr work = c10::make_intrusive<WorkNeuron>(getRank(), type, std::move(op), std::move(state));
  if (coalescing_)
    coalesced_.push_back(work);
  else
    group_->node().engine().kick();
  return work;
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::send(Tensors& tensors, int to, int tag) {
  return message(Kind::send, tensors, to, tag, c10d::OpType::SEND);
}
ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::recv(Tensors& tensors, int from, int tag) {
  return message(Kind::recv, tensors, from, tag, c10d::OpType::RECV);
}
ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::recvAnysource(Tensors& tensors, int tag) {
  return message(Kind::recv, tensors, collectives::kAnySource, tag, c10d::OpType::RECVANYSOURCE);
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::barrier(const c10d::BarrierOptions& opts) {
  // What this rank has queued is part of what the others wait for.
  if (initialized()) synchronize_device(current_device());
  Plan plan(getSize());
  plan.add(Kind::barrier, at::empty({0}, at::kByte), {}, {}, 0, 0);
  return launch(std::move(plan), c10d::OpType::BARRIER, opts.timeout, opts.asyncOp);
}

void ProcessGroupNeuron::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  if (initialized()) synchronize_device(current_device());
  constexpr int kTag = -2;                                 // users have none below 0
  constexpr int64_t kWhileRankZeroTells = 10'000'000'000;  // ns
  struct Token {
    std::byte byte{};
    std::exception_ptr error;
  };
  const int64_t limit = timeout_ns(opts.timeout), end = collectives::clock_ns() + limit;
  auto& engine = group_->node().engine();
  auto message = [&](Kind kind, int peer) {
    auto token = std::make_shared<Token>();
    auto done = [token](std::exception_ptr e) {
      token->error = e;
      return nullptr;
    };
    const Piece piece{&token->byte, 1};
    const int64_t patience = limit + kWhileRankZeroTells;
    auto op = kind == Kind::send
                  ? group_->send(peer, kTag, DataType::opaque, piece, patience, done)
                  : group_->receive(peer, kTag, DataType::opaque, piece, patience, std::make_shared<int>(peer), done);
    return std::pair(op, token);
  };
  auto finish = [&](const auto& sent) {
    engine.wait(*sent.first);
    if (sent.second->error) throw_as_torch_error(sent.second->error);
  };
  if (getRank() != 0) {
    finish(message(Kind::send, 0));
    finish(message(Kind::recv, 0));
    return;
  }
  std::string missing;
  std::vector<decltype(message(Kind::recv, 0))> arrivals;
  for (int r = 1; r < getSize(); r++) arrivals.push_back(message(Kind::recv, r));
  for (int r = 1; r < getSize(); r++) {
    auto& [op, token] = arrivals[r - 1];
    if (!engine.wait_for(*op, std::max<int64_t>(end - collectives::clock_ns(), 0))) {
      missing.append(missing.empty() ? "rank " : ", rank ").append(std::to_string(r));
      if (!wait_all_ranks) break;
    } else if (token->error) {
      throw_as_torch_error(token->error);
    }
  }
  if (!missing.empty()) {
    const std::string what =
        c10::str("monitored barrier: ", missing, " did not come within ", limit / 1'000'000, " ms.");
    const std::string report = group_->flight_report();
    group_->abort(what);
    TORCH_CHECK_WITH(DistBackendError, false, what, " What each rank was doing:", report);
  }
  for (int r = 1; r < getSize(); r++) finish(message(Kind::send, r));
}

void ProcessGroupNeuron::startCoalescing() {
  TORCH_CHECK(!coalescing_, "startCoalescing() was called twice.");
  coalescing_ = true;
}

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::endCoalescing() {
  TORCH_CHECK(coalescing_, "endCoalescing() was called without startCoalescing().");
  coalescing_ = false;
  group_->node().engine().kick();
  return c10::make_intrusive<WorkBatch>(getRank(), std::exchange(coalesced_, {}));
}

std::string ProcessGroupNeuron::flight_report() const { return group_->flight_report(); }

std::string ProcessGroupNeuron::algorithm(const std::string& operation, uint64_t bytes) const {
  for (int k = 0; k <= static_cast<int>(Kind::barrier); k++)
    if (operation == collectives::name_of(static_cast<Kind>(k)))
      return collectives::name_of(collectives::choose(static_cast<Kind>(k), bytes, group_->topology()));
  TORCH_CHECK_VALUE(false, "There is no collective named '", operation, "'.");
}

uint64_t ProcessGroupNeuron::getSequenceNumberForGroup() { return group_->collectives_started(); }

void set_collective_interrupt_check(std::function<void()> check) { interrupt_check() = std::move(check); }

void stop_collectives() { collectives::Node::stop(); }

}  // namespace neuron
