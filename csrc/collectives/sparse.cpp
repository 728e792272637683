// Sums of sparse tensors: every rank gets the indices and values of all, and adds up what shares an index.
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sparse_coo_tensor.h>
#include <torch/library.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "process_group.h"
#include "runtime/device.h"
#include "work.h"

namespace neuron {

ProcessGroupNeuron::WorkPtr ProcessGroupNeuron::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "all_reduce takes one tensor per rank, but got ", tensors.size(), ".");
  TORCH_CHECK_VALUE(tensors[0].layout() == c10::kSparse, "all_reduce takes dense tensors and sparse COO tensors, not ",
                    tensors[0].layout(), ".");
  TORCH_CHECK_VALUE(opts.reduceOp.op_ == c10d::ReduceOp::SUM, "Sparse tensors can be summed only.");
  const at::Tensor mine = tensors[0].coalesce();
  c10d::AllgatherOptions gather;
  gather.timeout = opts.timeout;
  auto from_all = [&](const at::Tensor& part, const std::vector<int64_t>& counts, int dim) {
    std::vector<Tensors> parts(1);
    for (int64_t count : counts) {
      auto sizes = part.sizes().vec();
      sizes[dim] = count;
      parts[0].push_back(at::empty(sizes, part.options()));
    }
    Tensors own{part.contiguous()};
    allgather(parts, own, gather)->wait(kNoTimeout);
    return parts[0];
  };
  const at::Tensor count = at::empty({1}, at::kLong).fill_(mine._nnz());
  std::vector<int64_t> counts;
  for (const at::Tensor& t : from_all(count, std::vector<int64_t>(getSize(), 1), 0))
    counts.push_back(t.item<int64_t>());
  const at::Tensor indices = at::cat(from_all(mine._indices(), counts, 1), 1);
  const at::Tensor values = at::cat(from_all(mine._values(), counts, 0), 0);
  tensors[0].copy_(at::sparse_coo_tensor(indices, values, mine.sizes()).coalesce());
  return c10::make_intrusive<WorkDone>(getRank(), c10d::OpType::_ALLREDUCE_SPARSE, tensors);
}

namespace {
// PyTorch sends sparse tensors of other devices than CPU and CUDA nowhere.
std::tuple<std::vector<at::Tensor>, c10::intrusive_ptr<c10d::Work>> allreduce(
    at::TensorList list, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const c10::intrusive_ptr<c10d::ReduceOp>& op, const std::optional<at::Tensor>&, bool async, int64_t timeout) {
  auto tensors = list.vec();
  c10d::AllreduceOptions opts{*op, std::chrono::milliseconds(timeout)};
  opts.asyncOp = async;
  auto work = group->getBackend(kNeuron)->allreduce_sparse(tensors, opts);
  return {std::move(tensors), std::move(work)};
}
}  // namespace

TORCH_LIBRARY_IMPL(c10d, SparsePrivateUse1, m) { m.impl("allreduce_", allreduce); }

}  // namespace neuron
