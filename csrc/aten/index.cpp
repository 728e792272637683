// Indices that choose rows, columns, planes: `x[rows]`, `x[:, :, rows[:, None], columns]`, and upsampling to the
// nearest neighbour, which is the latter. PyTorch's CPU kernels look up every element by itself; here whatever lies
// together is copied together. Everything else, and the error of an index that is not there, is the library's.
#include <ATen/Parallel.h>
#include <ATen/native/UpSample.h>

#include <algorithm>
#include <cstring>

#include "direct.h"
#include "factories.h"

namespace neuron {

namespace {

using at::Tensor;
using Indices = c10::List<std::optional<Tensor>>;

constexpr int64_t kLongCopy = 64;      // bytes from which a copy is a call
constexpr int64_t kLeastRuns = 16;     // of short copies, that they are worth it
constexpr int64_t kGrain = 1ll << 15;  // bytes that are worth a thread

// Positions in dims [dim, dim + positions.size()) of a tensor, each dim by itself.
struct Choice {
  int64_t dim = 0;
  std::vector<std::vector<int64_t>> positions;
  std::vector<int64_t> sizes;  // of the result in their place
};

bool dense(const Tensor& t) {
  return is_neuron(t) && t.is_contiguous() && t.numel() > 0 && !t.is_conj() && !t.is_neg();
}

// Which tensors index neighbouring dims one by one, and where they start: one of any shape, or several, each of whose
// elements lie along a dim of their own. Empty if they do anything else.
std::vector<Tensor> separable(const Indices& indices, int64_t& dim) {
  std::vector<Tensor> found;
  for (size_t i = 0; i < indices.size(); i++) {
    const std::optional<Tensor> index = indices[i];
    if (!index || !index->defined()) continue;
    if (found.empty()) dim = static_cast<int64_t>(i);
    if (dim + static_cast<int64_t>(found.size()) != static_cast<int64_t>(i) || !dense(*index) ||
        index->scalar_type() != at::kLong)
      return {};
    found.push_back(*index);
  }
  if (found.size() < 2) return found;
  for (size_t i = 0; i < found.size(); i++)
    if (found[i].dim() != static_cast<int64_t>(found.size() - i) || found[i].numel() != found[i].size(0)) return {};
  return found;
}

// False if an index is not there.
bool read(const Tensor& self, const std::vector<Tensor>& indices, Choice& choice) {
  for (size_t i = 0; i < indices.size(); i++) {
    const int64_t n = self.size(choice.dim + static_cast<int64_t>(i));
    const auto* at = indices[i].const_data_ptr<int64_t>();
    auto& positions = choice.positions.emplace_back(at, at + indices[i].numel());
    for (int64_t& p : positions) {
      if (p < -n || p >= n) return false;
      if (p < 0) p += n;
    }
  }
  return true;
}

// Copies `count` elements of T from offsets in bytes.
template <class T>
void gather(char* to, const char* from, const int64_t* offsets, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    std::memcpy(to + i * static_cast<int64_t>(sizeof(T)), from + offsets[i], sizeof(T));
}
using Gather = void (*)(char*, const char*, const int64_t*, int64_t);
Gather gather_of(int64_t bytes) {
  switch (bytes) {
    case 1:
      return gather<uint8_t>;
    case 2:
      return gather<uint16_t>;
    case 4:
      return gather<uint32_t>;
    case 8:
      return gather<uint64_t>;
    default:
      return nullptr;
  }
}

// Elements of a dense tensor from one position in a dim to the next.
int64_t inner(const Tensor& t, int64_t dim) {
  return c10::multiply_integers(t.sizes().begin() + dim + 1, t.sizes().end());
}

// How a dense tensor is copied: `runs` of `count` elements of `bytes` each.
struct Plan {
  int64_t outer = 1, bytes = 0, count = 1;
  bool together = false;  // an element is long: a run is one
  explicit Plan(const Tensor& self, int64_t dim, size_t dims, int64_t last)
      : bytes(inner(self, dim + static_cast<int64_t>(dims) - 1) * static_cast<int64_t>(self.itemsize())),
        together(bytes >= kLongCopy) {
    for (int64_t d = 0; d < dim; d++) outer *= self.size(d);
    if (!together) count = last;
  }
};

bool worth_it(const Tensor& self, int64_t dim, const std::vector<int64_t>& lengths) {
  const Plan plan(self, dim, lengths.size(), lengths.back());
  if (plan.together) return true;
  int64_t runs = plan.outer;
  for (size_t i = 0; i + 1 < lengths.size(); i++) runs *= lengths[i];
  return gather_of(plan.bytes) && runs >= kLeastRuns;
}

Tensor choose(const Tensor& self, const Choice& choice) {
  const auto& positions = choice.positions;
  const auto item = static_cast<int64_t>(self.itemsize());
  const Plan plan(self, choice.dim, positions.size(), static_cast<int64_t>(positions.back().size()));
  // Offsets of the elements of a run, and of the runs.
  std::vector<int64_t> elements{0}, starts{0};
  for (size_t i = 0; i < positions.size(); i++) {
    const int64_t stride = inner(self, choice.dim + static_cast<int64_t>(i)) * item;
    auto& offsets = plan.together || i + 1 < positions.size() ? starts : elements;
    std::vector<int64_t> finer;
    for (int64_t offset : offsets)
      for (int64_t p : positions[i]) finer.push_back(offset + p * stride);
    offsets.swap(finer);
  }
  const auto after = static_cast<size_t>(choice.dim) + positions.size();
  c10::SmallVector<int64_t, 6> sizes(self.sizes().begin(), self.sizes().begin() + choice.dim);
  sizes.append(choice.sizes.begin(), choice.sizes.end());
  sizes.append(self.sizes().begin() + after, self.sizes().end());
  const int64_t run = plan.count * plan.bytes, runs = static_cast<int64_t>(starts.size());
  const int64_t plane = self.numel() / plan.outer * item;
  Tensor out = uninitialised(static_cast<size_t>(plan.outer * runs * run), self.dtype(), self.device().index());
  out.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  const auto* from = static_cast<const char*>(self.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  const Gather copy = gather_of(plan.bytes);
  at::parallel_for(0, plan.outer * runs, std::max<int64_t>(1, kGrain / run), [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++) {
      const int64_t s = r % runs;
      char* target = to + r * run;
      const char* source = from + r / runs * plane + starts[static_cast<size_t>(s)];
      if (plan.together)
        std::memcpy(target, source, static_cast<size_t>(run));
      else if (r > first && s > 0 && starts[static_cast<size_t>(s)] == starts[static_cast<size_t>(s - 1)])
        std::memcpy(target, target - run, static_cast<size_t>(run));
      else
        copy(target, source, elements.data(), plan.count);
    }
  });
  return out;
}

// Whether a call of an operator may take this path, by its tensors.
bool ordinary(const OpCounter& count, const direct::Survey& survey) {
  return survey.ordinary && !survey.use.unsupported && !current_capture() && !(settings().strict && !count.row);
}

// Counts a call, waits for what it reads, and runs it. `choice_of()` may find that the library must have it: none.
template <class F>
std::optional<Tensor> run(OpCounter& count, const direct::Survey& survey, const Tensor& self, F choice_of) {
  begin_library_call(survey.index);
  const std::optional<Choice> choice = choice_of();
  if (!choice) return {};
  account(count, survey.use);
  fusion::count(fusion::g_stats.library_calls);
  DeviceActivity activity(count.name, survey.index);
  return choose(self, *choice);
}

template <class Op>
Tensor index(const Tensor& self, const Indices& indices) {
  static OpCounter& count = counter(direct::Direct<Op>::name());
  int64_t dim = 0;
  direct::Survey survey;
  survey.tensor(self, false);
  const std::vector<Tensor> chosen = separable(indices, dim);
  std::vector<int64_t> lengths;
  for (const Tensor& t : chosen) {
    survey.tensor(t, false);
    lengths.push_back(t.numel());
  }
  if (!chosen.empty() && dense(self) && ordinary(count, survey) && worth_it(self, dim, lengths)) {
    auto choice_of = [&]() -> std::optional<Choice> {
      Choice choice{dim, {}, {}};
      if (!read(self, chosen, choice)) return {};
      choice.sizes = chosen.size() == 1 ? chosen[0].sizes().vec() : lengths;
      return choice;
    };
    if (auto out = run(count, survey, self, choice_of)) return *out;
  }
  return direct::Direct<Op>::boxed(self, indices);
}

Tensor upsample_nearest2d(const Tensor& self, c10::SymIntArrayRef output_size, std::optional<double> scale_h,
                          std::optional<double> scale_w) {
  using Op = at::_ops::upsample_nearest2d;
  static OpCounter& count = counter(direct::Direct<Op>::name());
  direct::Survey survey;
  survey.tensor(self, false);
  const auto sizes = c10::asIntArrayRefSlowOpt(output_size);
  if (sizes && sizes->size() == 2 && self.dim() == 4 && dense(self) && (*sizes)[0] > 0 && (*sizes)[1] > 0 &&
      c10::isFloatingType(self.scalar_type()) && ordinary(count, survey) && worth_it(self, 2, sizes->vec())) {
    auto choice_of = [&]() -> std::optional<Choice> {
      Choice choice{2, {}, sizes->vec()};
      for (int d : {0, 1}) {
        auto& positions = choice.positions.emplace_back();
        const int64_t from = self.size(d + 2), to = (*sizes)[static_cast<size_t>(d)];
        for (int64_t i = 0; i < to; i++)
          positions.push_back(at::native::nearest_idx(i, from, to, d ? scale_w : scale_h));
      }
      return choice;
    };
    return *run(count, survey, self, choice_of);
  }
  return direct::Direct<Op>::boxed(self, output_size, scale_h, scale_w);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("index.Tensor", index<at::_ops::index_Tensor>);
  m.impl("_unsafe_index.Tensor", index<at::_ops::_unsafe_index_Tensor>);
  m.impl("upsample_nearest2d", upsample_nearest2d);
}

}  // namespace neuron
