// A pool of threads for loops over independent pieces of work.
//
// Problem: steps and conversions run on all cores, several ranks share a machine, and training forks data loaders.
// Idea: workers sleep on a condition variable between calls (never spinning: other ranks want the cores) and take piece after
// piece from one atomic counter; the caller works too, so that one thread means no hand-over at all.
// Invariants: one loop runs at a time per pool, later callers wait their turn; a forked child gets a fresh pool on first use, since threads
// don't survive fork; the pool of the process is never destroyed, so that no thread outlives what it uses at exit.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
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

    std::mutex turn_;  // held by the caller whose loop runs

    std::mutex mutex_;  // guards what follows
    std::condition_variable wake_, finished_;
    std::vector<std::thread> workers_;
    std::size_t generation_ = 0;  // number of the loop that runs or ran last
    std::size_t wanted_ = 0;      // workers [0, wanted_) may join it
    std::size_t active_ = 0;      // how many have joined and are not done
    bool stop_ = false;

    const std::function<void(std::size_t)>* work_ = nullptr;
    std::size_t pieces_ = 0;
    std::atomic<std::size_t> next_{0};
};

}  // namespace drivetrain
