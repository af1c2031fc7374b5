// One rank's end of a shared-memory group among processes: makes its memory, maps that of the others, and hands the group to the thread of
// the process.
//
// The ranks tell each other their addresses by whatever means they have, connect, tell each other that they did, and start.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "shared_memory_group.h"
#include "shared_memory_segment.h"

namespace drivetrain {

class SharedMemoryEndpoint {
public:
    struct Address {
        std::int64_t process;
        std::uint64_t started;
        int ring_fd, bell_fd;
        std::uint64_t key;  // random, written in the memory too: it is told apart from that of a process on another machine
    };

    explicit SharedMemoryEndpoint(const RingShape& shape);  // throws std::system_error
    SharedMemoryEndpoint(const SharedMemoryEndpoint&) = delete;
    SharedMemoryEndpoint& operator=(const SharedMemoryEndpoint&) = delete;
    ~SharedMemoryEndpoint();

    // Deletes it; in a forked child leaves it as it is: the memory isn't mapped there.
    static void release(SharedMemoryEndpoint* endpoint);

    Address address() const;
    void connect(int rank, const std::vector<Address>& all);  // throws std::system_error
    void start();

    std::shared_ptr<SharedMemoryWork> submit(const CallRequest& request);
    std::uint64_t progress() const { return group_->progress(); }
    void expire(const std::shared_ptr<SharedMemoryWork>& work);
    void close();  // ends the calls under way; idempotent
    bool open() const { return started_; }

private:
    RingShape shape_;
    Process process_;
    std::uint64_t key_;
    Segment own_;
    std::vector<Segment> segments_;  // of the others, and their bells
    std::vector<std::unique_ptr<ProcessWatch>> watches_;
    std::shared_ptr<SharedMemoryGroup> group_;
    bool started_ = false;
};

}  // namespace drivetrain
