// What processes of one host need to work together: memory that all of them map, a word to sleep on, and a way to see that one has ended.
//
// Problem: a named segment is left behind by a process that is killed, and containers often have 64 MB of /dev/shm.
// Idea: memory without a name (memfd; an unnamed file in /dev/shm where that is forbidden), which the others open through /proc while its
// maker keeps it open. It is gone when the last process that maps it has ended, however it ended.
// Invariants: all of it is reserved when it is made, so that no later touch can fail, and it can't be made shorter; a forked child has no
// part in it (it isn't mapped there).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace drivetrain {

// Throws std::system_error, whose text says what was tried.
class Segment {
public:
    static Segment create(std::size_t bytes);
    // That of another process, by the number of its descriptor there.
    static Segment open(std::int64_t process, int fd, std::size_t bytes);

    Segment(Segment&& other) noexcept;
    Segment& operator=(Segment&&) = delete;
    ~Segment();

    char* data() const { return data_; }
    int fd() const { return fd_; }
    void close_fd();  // no further process can open it

private:
    Segment(int fd, std::size_t bytes);

    int fd_;
    std::size_t bytes_;
    char* data_;
};

// A word that one thread sleeps on and that others, of this process or another, ring to wake it. Lies in a segment; zero at first.
struct Doorbell {
    alignas(64) std::atomic<std::uint32_t> rings;
    std::atomic<std::uint32_t> sleeping;

    void ring();
    // Sleeps until the count of rings differs from `seen`, for at most so many milliseconds. Returns false after that time.
    // What is to be waited for must be looked at between reading `rings` and this.
    bool sleep(std::uint32_t seen, int milliseconds);
};
static_assert(std::atomic<std::uint32_t>::is_always_lock_free && std::atomic<std::uint64_t>::is_always_lock_free);

// A process, told apart from a later one with the same number by when it started.
struct Process {
    std::int64_t id;
    std::uint64_t started;  // in clock ticks since boot; 0 where that can't be found out

    static Process current();
};

// Sees a process end, as a zombie too.
class ProcessWatch {
public:
    explicit ProcessWatch(const Process& process);
    ProcessWatch(const ProcessWatch&) = delete;
    ProcessWatch& operator=(const ProcessWatch&) = delete;
    ~ProcessWatch();

    bool alive() const;

private:
    Process process_;
    int fd_;  // -1 where the kernel has none
};

}  // namespace drivetrain
