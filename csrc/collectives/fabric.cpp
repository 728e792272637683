#include "fabric.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace neuron::collectives {

namespace {

uint64_t rotate(uint64_t x, int by) { return x << by | x >> (64 - by); }

void sip_round(uint64_t v[4]) {
  v[0] += v[1], v[1] = rotate(v[1], 13) ^ v[0], v[0] = rotate(v[0], 32);
  v[2] += v[3], v[3] = rotate(v[3], 16) ^ v[2];
  v[0] += v[3], v[3] = rotate(v[3], 21) ^ v[0];
  v[2] += v[1], v[1] = rotate(v[1], 17) ^ v[2], v[2] = rotate(v[2], 32);
}

std::string text_of(const sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address->sa_family == AF_INET)
    inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(address)->sin_addr, text, sizeof text);
  else if (address->sa_family == AF_INET6)
    inet_ntop(AF_INET6, &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr, text, sizeof text);
  return text;
}

std::string address_of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw std::runtime_error("Cannot list the network interfaces");
  std::string found, known;
  for (ifaddrs* i = list; i; i = i->ifa_next) {
    if (!i->ifa_addr || !(i->ifa_flags & IFF_UP)) continue;
    const std::string text = text_of(i->ifa_addr);
    if (text.empty()) continue;
    if (name == i->ifa_name && found.empty()) found = text;
    if (known.find(i->ifa_name) == std::string::npos) known += (known.empty() ? "" : ", ") + std::string(i->ifa_name);
  }
  freeifaddrs(list);
  if (found.empty())
    throw std::runtime_error("TORCH_NEURON_INTERFACE=" + name + " has no address or is down; this host has " + known);
  return found;
}

// The address that packets to `host` leave from.
std::string address_towards(const std::string& host) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (getaddrinfo(host.c_str(), "9", &hints, &list) != 0) return {};
  std::string found;
  for (addrinfo* a = list; a && found.empty(); a = a->ai_next) {
    const int fd = socket(a->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) continue;
    sockaddr_storage local{};
    socklen_t size = sizeof local;
    if (connect(fd, a->ai_addr, a->ai_addrlen) == 0 && getsockname(fd, reinterpret_cast<sockaddr*>(&local), &size) == 0)
      found = text_of(reinterpret_cast<sockaddr*>(&local));
    close(fd);
  }
  freeaddrinfo(list);
  return found;
}

}  // namespace

uint64_t keyed_hash(const Secret& secret, const void* data, size_t bytes) {
  uint64_t key[2];
  std::memcpy(key, secret.data(), sizeof key);
  uint64_t v[4] = {key[0] ^ 0x736f6d6570736575, key[1] ^ 0x646f72616e646f6d, key[0] ^ 0x6c7967656e657261,
                   key[1] ^ 0x7465646279746573};
  const auto* at = static_cast<const uint8_t*>(data);
  uint64_t last = static_cast<uint64_t>(bytes) << 56;
  for (size_t i = 0; i < bytes / 8; i++, at += 8) {
    uint64_t word;
    std::memcpy(&word, at, 8);
    v[3] ^= word;
    sip_round(v), sip_round(v);
    v[0] ^= word;
  }
  for (size_t i = 0; i < bytes % 8; i++) last |= static_cast<uint64_t>(at[i]) << (8 * i);
  v[3] ^= last;
  sip_round(v), sip_round(v);
  v[0] ^= last;
  v[2] ^= 0xff;
  for (int i = 0; i < 4; i++) sip_round(v);
  return v[0] ^ v[1] ^ v[2] ^ v[3];
}

std::string network_address() {
  if (const char* name = std::getenv("TORCH_NEURON_INTERFACE"); name && *name) return address_of_interface(name);
  if (const char* master = std::getenv("MASTER_ADDR"); master && *master) return address_towards(master);
  return {};
}

FabricLink::FabricLink(Fabric& fabric, const Secret& secret, int me, const std::map<int, std::string>& addresses)
    : fabric_(fabric), secret_(secret), me_(me) {
  for (auto& [rank, address] : addresses) peers_[rank] = fabric_.connect(address);
}

uint64_t FabricLink::wire_tag(int from, int to, uint64_t tag) const {
  const uint64_t parts[] = {static_cast<uint64_t>(from) << 32 | static_cast<uint32_t>(to), tag};
  return keyed_hash(secret_, parts, sizeof parts);
}

Task<> FabricLink::send(int to, uint64_t tag, const std::byte* data, size_t bytes) {
  return fabric_.send(peers_.at(to), wire_tag(me_, to, tag), data, bytes, to);
}

Task<> FabricLink::receive(int from, uint64_t tag, std::byte* data, size_t bytes) {
  return fabric_.receive(peers_.at(from), wire_tag(from, me_, tag), data, bytes, from);
}

Task<> FabricLink::send_from_anybody(int to, uint64_t tag, const std::byte* data, size_t bytes) {
  return fabric_.send(peers_.at(to), wire_tag(kAnybody, to, tag), data, bytes, to);
}

Task<> FabricLink::receive_from_anybody(uint64_t tag, std::byte* data, size_t bytes) {
  return fabric_.receive(Fabric::kAnyPeer, wire_tag(kAnybody, me_, tag), data, bytes, kAnybody);
}

Task<bool> FabricLink::probe(int from, uint64_t tag) {
  return fabric_.probe(peers_.at(from), wire_tag(from, me_, tag));
}

}  // namespace neuron::collectives
