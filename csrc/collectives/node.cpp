#include "node.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <stdexcept>

namespace neuron::collectives {

namespace {

constexpr size_t kSegmentBytes = 32 << 20;

// TORCH_NEURON_HOST, or else kernel boot, process namespace (who can open our memory) and network namespace (who has
// our address).
std::string host_identity() {
  if (const char* name = std::getenv("TORCH_NEURON_HOST"); name && *name) return name;
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  for (const char* name : {"/proc/self/ns/pid", "/proc/self/ns/net"}) {
    struct stat st{};
    if (stat(name, &st) == 0) id.append("/").append(std::to_string(st.st_ino));
  }
  return id;
}

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Node::Node()
    : host_(host_identity()), segment_(std::make_shared<Segment>(kSegmentBytes)), engine_(segment_->doorbell()) {}

std::atomic<Node*> Node::made_{nullptr};

void Node::stop() {
  if (Node* node = made_.load()) node->engine_.stop();
}

Node& Node::get() {
  static Node* node = made_ = new Node;  // never destroyed: groups may outlive static destructors
  if (node->segment_->address().pid != getpid())
    throw std::runtime_error(
        "torch.distributed on neuron was used before this process was forked; start ranks with the spawn method");
  return *node;
}

std::shared_ptr<Segment> Node::peer(const SegmentAddress& address) {
  if (address.token == segment_->address().token) return segment_;
  std::lock_guard lock(mutex_);
  auto& slot = peers_[address.token];
  auto segment = slot.lock();
  if (!segment) slot = segment = std::make_shared<Segment>(address);
  return segment;
}

Fabric& Node::fabric() {
  std::lock_guard lock(mutex_);
  if (!fabric_) {
    fabric_ = Fabric::open(network_address());
    engine_.set_poller([fabric = fabric_.get()] { return fabric->poll(); });
  }
  return *fabric_;
}

void Node::retire(std::unique_ptr<Board> board, uint64_t block) {
  board->leave();
  {
    std::lock_guard lock(mutex_);
    retired_.emplace_back(std::move(board), block);
  }
  release_retired();
}

void Node::release_retired() {
  std::lock_guard lock(mutex_);
  std::erase_if(retired_, [&](auto& entry) {
    auto& [board, block] = entry;
    if (!board->forgotten()) return false;
    board.reset();
    segment_->release(block);
    return true;
  });
}

void Node::keep(std::shared_ptr<void> memory) {
  std::lock_guard lock(kept_mutex_);
  kept_.push_back(std::move(memory));
}

void Node::note_local_ranks(int ranks) {
  std::lock_guard lock(mutex_);
  local_ranks_ = std::max(local_ranks_, ranks);
  engine_.set_crowded(local_ranks_ > usable_cores());
}

}  // namespace neuron::collectives
