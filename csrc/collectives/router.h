// Messages to any rank of a group: through shared memory on this host, through libfabric to others.
#pragma once

#include <map>
#include <memory>
#include <set>
#include <vector>

#include "fabric.h"
#include "lanes.h"

namespace neuron::collectives {

class Router final : public Link {
 public:
  // `remote` may be null; `remote_ranks` are reached through it.
  Router(std::unique_ptr<Lanes> local, FabricLink* remote, std::set<int> remote_ranks)
      : local_(std::move(local)), remote_(remote), remote_ranks_(std::move(remote_ranks)) {}

  Task<> send(int to, uint64_t tag, const std::byte* data, size_t bytes) override;
  Task<int> receive(int from, uint64_t tag, std::byte* data, size_t bytes) override;

  bool drained() { return local_->drained(); }
  // Ranks that a message is under way to or from.
  std::vector<int> busy() const;

 private:
  Task<int> find_sender(uint64_t tag);
  std::unique_ptr<Lanes> local_;
  FabricLink* remote_;
  std::set<int> remote_ranks_;
  std::map<int, int> busy_;
};

}  // namespace neuron::collectives
