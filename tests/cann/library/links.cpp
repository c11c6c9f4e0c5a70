// See links.h.
#include "links.h"

#include "device.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>

namespace fake {

namespace {

constexpr int TICK_MS = 5;

bool wait_for(int socket, short events, double limit_s) {
  while (now_s() < limit_s) {
    pollfd wanted{socket, events, 0};
    if (poll(&wanted, 1, 50) > 0) return true;
  }
  return false;
}

bool send_all(int socket, const void *data, size_t bytes, double limit_s) {
  auto *at = static_cast<const char *>(data);
  while (bytes > 0) {
    if (!wait_for(socket, POLLOUT, limit_s)) return false;
    ssize_t sent = send(socket, at, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    at += sent;
    bytes -= sent;
  }
  return true;
}

bool receive_all(int socket, void *data, size_t bytes, double limit_s) {
  auto *at = static_cast<char *>(data);
  while (bytes > 0) {
    if (!wait_for(socket, POLLIN, limit_s)) return false;
    ssize_t received = recv(socket, at, bytes, 0);
    if (received <= 0) return false;
    at += received;
    bytes -= received;
  }
  return true;
}

int connect_to(int port, double limit_s) {
  while (now_s() < limit_s) {
    int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<uint16_t>(port));
    if (connect(made, reinterpret_cast<sockaddr *>(&address), sizeof address) == 0) return made;
    close(made);
    usleep(20000);
  }
  return -1;
}

int accept_from(int listener, double limit_s) {
  return wait_for(listener, POLLIN, limit_s) ? accept4(listener, nullptr, nullptr, SOCK_CLOEXEC) : -1;
}

void prepare(int socket) {
  int on = 1;
  setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
}

// Receive some of what comes; -1: nothing now, 0: the peer is gone.
ssize_t take(Link &link, char *data, uint64_t bytes) {
  ssize_t received = recv(link.socket, data, bytes, 0);
  if (received == 0 || (received < 0 && errno != EAGAIN && errno != EINTR)) link.gone = true;
  return link.gone ? 0 : received;
}

// Read heads and drop what is not wanted. True: the next bytes are those of a wanted message, whose head is there.
bool find_wanted(Link &link, uint64_t resumes, bool want_none) {
  std::array<char, 65536> waste;
  while (!link.gone) {
    if (link.to_drop > 0) {
      ssize_t dropped = take(link, waste.data(), std::min<uint64_t>(link.to_drop, waste.size()));
      if (dropped <= 0) return false;
      link.to_drop -= dropped;
      continue;
    }
    if (link.head_bytes < sizeof(Head)) {
      auto *head = reinterpret_cast<char *>(&link.head);
      ssize_t received = take(link, head + link.head_bytes, sizeof(Head) - link.head_bytes);
      if (received <= 0) return false;
      link.head_bytes += received;
      continue;
    }
    if (!want_none && link.head.resumes == resumes) return true;
    link.to_drop = link.head.bytes;
    link.head_bytes = 0;
  }
  return false;
}

// A message on its way.
struct Passing {
  Message message;
  Head head{};
  uint64_t head_sent = 0, done = 0;
  bool begun = false, over = false;
};

void go_on_sending(Link &link, Passing &passing) {
  static const std::array<char, 65536> filling{};
  while (!link.gone) {
    const char *from;
    uint64_t bytes;
    if (link.to_fill > 0 && !passing.begun) {
      from = filling.data();
      bytes = std::min<uint64_t>(link.to_fill, filling.size());
    } else if (passing.head_sent < sizeof(Head)) {
      passing.begun = true;
      from = reinterpret_cast<const char *>(&passing.head) + passing.head_sent;
      bytes = sizeof(Head) - passing.head_sent;
    } else {
      from = passing.message.data + passing.done;
      bytes = passing.message.bytes - passing.done;
    }
    if (bytes == 0) {
      passing.over = true;
      return;
    }
    ssize_t sent = send(link.socket, from, bytes, MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (sent <= 0) {
      link.gone = true;
    } else if (!passing.begun) {
      link.to_fill -= sent;
    } else if (passing.head_sent < sizeof(Head)) {
      passing.head_sent += sent;
    } else {
      passing.done += sent;
    }
  }
}

void go_on_receiving(Link &link, Passing &passing, uint64_t resumes) {
  while (!link.gone) {
    if (!passing.begun) {
      if (!find_wanted(link, resumes, false)) return;
      passing.begun = link.receiving = true;
    }
    if (passing.done == passing.message.bytes) {
      link.head_bytes = 0;
      link.receiving = false;
      passing.over = true;
      return;
    }
    ssize_t received = take(link, passing.message.data + passing.done, passing.message.bytes - passing.done);
    if (received <= 0) return;
    passing.done += received;
  }
}

// Remember what of a message that is broken off is still to be dropped or filled up.
void break_off(Link &link, const Passing &passing) {
  if (passing.over || !passing.begun) return;
  if (passing.message.sending) {
    link.to_fill = sizeof(Head) - passing.head_sent + passing.message.bytes - passing.done;
  } else {
    link.to_drop = passing.message.bytes - passing.done;
    link.head_bytes = 0;
    link.receiving = false;
  }
}

}  // namespace

int listen_anywhere(int *port) {
  int made = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  bind(made, reinterpret_cast<sockaddr *>(&address), sizeof address);
  listen(made, 256);
  socklen_t length = sizeof address;
  getsockname(made, reinterpret_cast<sockaddr *>(&address), &length);
  *port = ntohs(address.sin_port);
  return made;
}

Links::~Links() {
  for (Link &link : links_)
    if (link.socket >= 0) close(link.socket);
}

bool Links::meet(uint32_t rank, int root_listener, int root_port, double limit_s) {
  uint32_t size = static_cast<uint32_t>(links_.size());
  int port;
  int listener = listen_anywhere(&port);
  std::vector<int32_t> ports(size);
  std::vector<int> at_root;
  bool well = true;
  if (rank == 0) {
    ports[0] = port;
    for (uint32_t others = 1; well && others < size; others++) {
      int peer = accept_from(root_listener, limit_s);
      int32_t said[2];
      well = peer >= 0 && receive_all(peer, said, sizeof said, limit_s);
      if (peer >= 0) at_root.push_back(peer);
      if (well) ports[static_cast<uint32_t>(said[0])] = said[1];
    }
    for (int peer : at_root) well = well && send_all(peer, ports.data(), size * sizeof(int32_t), limit_s);
  } else {
    int root = connect_to(root_port, limit_s);
    int32_t said[2] = {static_cast<int32_t>(rank), port};
    well = root >= 0 && send_all(root, said, sizeof said, limit_s) &&
           receive_all(root, ports.data(), size * sizeof(int32_t), limit_s);
    if (root >= 0) at_root.push_back(root);
  }
  for (uint32_t peer = 0; well && peer < rank; peer++) {
    links_[peer].socket = connect_to(ports[peer], limit_s);
    well = links_[peer].socket >= 0 && send_all(links_[peer].socket, &rank, sizeof rank, limit_s);
  }
  for (uint32_t others = rank + 1; well && others < size; others++) {
    int made = accept_from(listener, limit_s);
    uint32_t peer = 0;
    well = made >= 0 && receive_all(made, &peer, sizeof peer, limit_s);
    if (well) links_[peer].socket = made;
  }
  for (int socket : at_root) close(socket);
  close(listener);
  for (Link &link : links_)
    if (link.socket >= 0) prepare(link.socket);
  return well;
}

Ended Links::exchange(std::vector<Message> messages, uint64_t aborts, double limit_s) {
  std::unique_lock<std::mutex> held(lock_);
  std::vector<Passing> all;
  for (Message &message : messages) all.push_back({message, {resumes_, message.bytes}});
  Ended ended = Ended::DONE;
  while (true) {
    std::vector<pollfd> waiting;
    std::vector<bool> busy(2 * links_.size());  // in order between two ranks
    bool over = true;
    for (Passing &passing : all) {
      if (passing.over) continue;
      uint32_t peer = passing.message.peer;
      bool sending = passing.message.sending;
      if (busy[2 * peer + sending]) continue;
      Link &link = links_[peer];
      sending ? go_on_sending(link, passing) : go_on_receiving(link, passing, resumes_);
      if (passing.over) continue;
      over = false;
      busy[2 * peer + sending] = true;
      if (!link.gone) waiting.push_back({link.socket, static_cast<short>(sending ? POLLOUT : POLLIN), 0});
    }
    if (over && std::all_of(all.begin(), all.end(), [](auto &each) { return each.over; })) break;
    if (interrupted(aborts)) ended = Ended::INTERRUPTED;
    if (now_s() > limit_s) ended = Ended::TIMED_OUT;
    if (ended != Ended::DONE) break;
    held.unlock();
    poll(waiting.data(), waiting.size(), TICK_MS);
    held.lock();
  }
  for (const Passing &passing : all) break_off(links_[passing.message.peer], passing);
  return ended;
}

void Links::clear() {
  std::lock_guard<std::mutex> held(lock_);
  clear_held();
}

void Links::resume() {
  std::lock_guard<std::mutex> held(lock_);
  resumes_++;
  clear_held();
}

void Links::clear_held() {
  for (Link &link : links_)
    if (link.socket >= 0 && !link.receiving) find_wanted(link, resumes_, true);
}

}  // namespace fake
