// The links of a communicator: a socket for each pair of its ranks.
//
// What is sent has a head that says how often the communicator had been resumed. So what was on its way when a device was
// stopped is dropped where it arrives, and a message of which only a part was sent is filled up by the next one.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace fake {

struct Head {
  uint64_t resumes, bytes;
};

struct Link {
  int socket = -1;
  Head head{};               // that is being received
  uint64_t head_bytes = 0;   // of it, so far
  uint64_t to_drop = 0;      // bytes of a message that nobody wants
  uint64_t to_fill = 0;      // bytes that are still owed to a message that was broken off
  bool receiving = false;    // a message that was announced before, and is being taken
  bool gone = false;         // the peer has closed it: on the device nothing is ever heard of it
};

struct Message {
  uint32_t peer;
  bool sending;
  char *data;
  uint64_t bytes;
};

enum class Ended { DONE, INTERRUPTED, TIMED_OUT };

class Links {
 public:
  explicit Links(uint32_t size) : links_(size) {}
  ~Links();

  // Meet the others at the root's address, and connect to each. False: not before `limit_s`. No abort ends it.
  bool meet(uint32_t rank, int root_listener, int root_port, double limit_s);
  // Send and receive all of it, in order between two ranks. A peer that is gone is waited for.
  Ended exchange(std::vector<Message> messages, uint64_t aborts, double limit_s);
  // Forget what peers have announced by now. Any thread, also beside an exchange.
  void clear();
  // The same, and count from now on as resumed once more.
  void resume();

 private:
  void clear_held();

  std::mutex lock_;  // held for one round of an exchange, and never while it waits
  std::vector<Link> links_;
  uint64_t resumes_ = 0;
};

int listen_anywhere(int *port);

}  // namespace fake
