// The thread that moves the bytes of all shared-memory groups of a process.
//
// Problem: communication should go on while the caller computes, and ranks often share cores with the computation of others.
// Idea: one thread for all groups, which does one message of each in turn and sleeps on its bell as soon as nothing can move.
// Invariants: a group is touched by no other thread between `add` and the end of `remove`; while nothing is under way it sleeps without
// waking; a forked child starts afresh on first use (its parent's groups are not its own).
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "shared_memory_group.h"
#include "shared_memory_segment.h"

namespace drivetrain {

class SharedMemoryThread {
public:
    SharedMemoryThread();  // throws std::system_error where there is no shared memory
    SharedMemoryThread(const SharedMemoryThread&) = delete;
    SharedMemoryThread& operator=(const SharedMemoryThread&) = delete;
    ~SharedMemoryThread();  // no group may be left

    // Of this process; never destroyed, so that it doesn't outlive what it uses at exit.
    static SharedMemoryThread& shared();

    static constexpr std::size_t kBellBytes = 4096;
    int bell_fd() const { return bell_segment_.fd(); }
    Doorbell& bell() const { return *reinterpret_cast<Doorbell*>(bell_segment_.data()); }

    void add(std::shared_ptr<SharedMemoryGroup> group);
    void remove(const std::shared_ptr<SharedMemoryGroup>& group);  // closes it; returns when nothing touches it any more

private:
    void serve();
    bool take_changes();

    Segment bell_segment_;
    std::vector<std::shared_ptr<SharedMemoryGroup>> groups_;  // of the thread

    std::mutex mutex_;  // guards what follows
    std::condition_variable removed_;
    std::vector<std::shared_ptr<SharedMemoryGroup>> added_, leaving_;
    bool stop_ = false;
    std::thread thread_;
};

}  // namespace drivetrain
