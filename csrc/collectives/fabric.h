// Messages between hosts through libfabric: provider `tcp` on any network, `efa` on AWS.
//
// The library is loaded at run time; where it is missing, ranks of one host still work. libfabric matches messages by
// tag; the tag is a keyed hash of the group's secret, the ranks and the user's tag, so nobody who cannot read the job's
// store can place a message, and messages of different groups never meet.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "link.h"

namespace neuron::collectives {

using Secret = std::array<uint8_t, 16>;

// SipHash-2-4, a keyed hash.
uint64_t keyed_hash(const Secret& secret, const void* data, size_t bytes);

// The process's endpoint.
class Fabric {
 public:
  static constexpr uint64_t kAnyPeer = ~uint64_t{0};  // to receive from
  // Opens libfabric. `interface_address`: the local address that traffic is confined to. Throws with what to install.
  static std::unique_ptr<Fabric> open(const std::string& interface_address);
  virtual ~Fabric() = default;

  virtual std::string address() const = 0;  // what peers need to reach this process
  virtual std::string provider() const = 0;
  virtual uint64_t connect(const std::string& address) = 0;
  // Takes completions; returns whether there were any.
  virtual bool poll() = 0;

  virtual Task<> send(uint64_t peer, uint64_t tag, const std::byte* data, size_t bytes, int rank) = 0;
  virtual Task<> receive(uint64_t peer, uint64_t tag, std::byte* data, size_t bytes, int rank) = 0;
  // Whether a message with this tag from the peer is there.
  virtual Task<bool> probe(uint64_t peer, uint64_t tag) = 0;
};

// The local address of the interface named by TORCH_NEURON_INTERFACE, or else of the one that reaches MASTER_ADDR.
std::string network_address();

// The messages of a group to ranks of other hosts.
class FabricLink {
 public:
  FabricLink(Fabric& fabric, const Secret& secret, int me, const std::map<int, std::string>& addresses);
  Task<> send(int to, uint64_t tag, const std::byte* data, size_t bytes);
  Task<> receive(int from, uint64_t tag, std::byte* data, size_t bytes);
  Task<bool> probe(int from, uint64_t tag);
  // Messages that do not say whose they are.
  Task<> send_from_anybody(int to, uint64_t tag, const std::byte* data, size_t bytes);
  Task<> receive_from_anybody(uint64_t tag, std::byte* data, size_t bytes);

 private:
  static constexpr int kAnybody = -1;
  uint64_t wire_tag(int from, int to, uint64_t tag) const;
  Fabric& fabric_;
  Secret secret_;
  int me_;
  std::map<int, uint64_t> peers_;
};

}  // namespace neuron::collectives
