// A pool of threads for loops over independent pieces of work.
//
// Problem: steps and conversions run on all cores, several ranks share a machine, and training forks data loaders. Inference calls a loop every
// few microseconds, and waking a thread takes longer than such a loop.
// Idea: workers take piece after piece from one atomic counter; the caller works too, so that one thread means no hand-over at all. A worker
// whose last wait was short looks out for the next loop for a moment (kPatience), giving way to whoever wants its core; one whose wait was long,
// because loops are rare or cores are short, sleeps at once. Who sleeps is woken by a condition variable.
// Invariants: one loop runs at a time per pool, later callers wait their turn; a caller never waits for a worker that has not begun; a forked
// child gets a fresh pool on first use, since threads don't survive fork; the pool of the process is never destroyed, so that no thread outlives
// what it uses at exit.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace drivetrain {

class Pool {
public:
    Pool() = default;
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;
    ~Pool();

    // Calls work(piece) for every piece in [0, pieces), on up to `threads` threads of which the caller is one. Returns when all is done.
    // `work` must not throw. Calls from several threads take turns.
    void run(std::size_t pieces, int threads, const std::function<void(std::size_t)>& work);

    // The pool of this process.
    static Pool& shared();

    // The number of threads that the user asked for, 0 while none was: then callers follow torch. Survives fork.
    static int setting();
    static void set(int threads);

private:
    void serve(std::size_t worker);
    void drain();
    void grow(std::size_t workers);
    bool may_join(std::size_t worker, std::uint64_t seen) const;
    bool join(std::size_t worker, std::uint64_t* seen);
    void leave();

    std::mutex turn_;  // held by the caller whose loop runs
    std::vector<std::thread> workers_;

    // The number of the loop that runs or ran last, whether it is open to workers, and how many have joined and are not done: see pool.cpp.
    // What follows the gate is written by the caller while it is closed and no worker is in, and read by workers that are.
    alignas(64) std::atomic<std::uint64_t> gate_{0};
    std::atomic<std::size_t> wanted_{0};  // workers [0, wanted_) may join
    const std::function<void(std::size_t)>* work_ = nullptr;
    std::size_t pieces_ = 0;
    alignas(64) std::atomic<std::size_t> next_{0};

    std::mutex mutex_;  // of the condition variables
    std::condition_variable wake_, finished_;
    std::atomic<std::size_t> sleepers_{0};    // workers that wait, or are about to, for wake_
    std::atomic<bool> caller_sleeps_{false};  // likewise, for finished_
    std::atomic<bool> stop_{false};
};

}  // namespace drivetrain
