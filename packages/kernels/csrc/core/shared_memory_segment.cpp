#include "shared_memory_segment.h"

#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#endif

namespace drivetrain {
namespace {

[[noreturn]] void fail(int error, const std::string& what) { throw std::system_error(error, std::generic_category(), what); }

#if defined(__linux__)

// Written out, because the headers of the old systems that wheels are built on don't have them.
constexpr unsigned kCloseOnExec = 1, kAllowSealing = 2;
constexpr int kAddSeals = 1033, kSealSeal = 1, kSealShrink = 2, kSealGrow = 4;
constexpr long kPidfdOpen = 434;  // the same number on every architecture
#if defined(SYS_memfd_create)
constexpr long kMemfdCreate = SYS_memfd_create;
#elif defined(__x86_64__)
constexpr long kMemfdCreate = 319;
#else
constexpr long kMemfdCreate = 279;  // of the table that younger architectures share
#endif

int make_file(std::size_t bytes) {
    auto fd = static_cast<int>(syscall(kMemfdCreate, "drivetrain", kCloseOnExec | kAllowSealing));
    const bool sealable = fd >= 0;
    if (fd < 0) fd = ::open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) fail(errno, "making shared memory");
    const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
    if (error != 0) {
        ::close(fd);
        fail(error, "reserving " + std::to_string(bytes) + " bytes of shared memory");
    }
    // Without seals a process that cuts the file would take the others with it; where there are none, nothing cuts it either.
    if (sealable) fcntl(fd, kAddSeals, kSealSeal | kSealShrink | kSealGrow);
    return fd;
}

long futex(std::atomic<std::uint32_t>& word, int operation, std::uint32_t value, const timespec* timeout) {
    return syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t seen, int milliseconds) {
    const timespec timeout{milliseconds / 1000, static_cast<long>(milliseconds % 1000) * 1000000};
    futex(word, FUTEX_WAIT, seen, &timeout);
}

void wake(std::atomic<std::uint32_t>& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

// Fields 3 (state) and 22 (start) of /proc/<id>/stat. The name before them may hold anything, so it is skipped by its last bracket.
bool read_stat(std::int64_t id, char* state, std::uint64_t* started) {
    const int fd = ::open(("/proc/" + std::to_string(id) + "/stat").c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    char text[1024];
    const ssize_t length = ::read(fd, text, sizeof text - 1);
    ::close(fd);
    if (length <= 0) return false;
    text[length] = 0;
    const char* field = std::strrchr(text, ')');
    if (field == nullptr || field[1] == 0) return false;
    *state = field[2];
    for (int k = 0; k < 20 && field != nullptr; ++k) field = std::strchr(field + 1, ' ');
    if (field == nullptr) return false;
    *started = std::strtoull(field, nullptr, 10);
    return true;
}

#else

int make_file(std::size_t) { fail(ENOSYS, "making shared memory, which needs Linux"); }

void sleep_on(std::atomic<std::uint32_t>&, std::uint32_t, int) { usleep(1000); }

void wake(std::atomic<std::uint32_t>&) {}

bool read_stat(std::int64_t, char*, std::uint64_t*) { return false; }

#endif

}  // namespace

Segment::Segment(int fd, std::size_t bytes) : fd_(fd), bytes_(bytes), data_(nullptr) {
    void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (data == MAP_FAILED) {
        const int error = errno;
        ::close(fd);
        fail(error, "mapping shared memory");
    }
#if defined(__linux__)
    madvise(data, bytes, MADV_DONTFORK);
#endif
    data_ = static_cast<char*>(data);
}

Segment Segment::create(std::size_t bytes) { return Segment(make_file(bytes), bytes); }

Segment Segment::open(std::int64_t process, int fd, std::size_t bytes) {
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(fd);
    const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (opened < 0) fail(errno, "opening the shared memory of process " + std::to_string(process));
    struct stat found;
    if (fstat(opened, &found) != 0 || static_cast<std::size_t>(found.st_size) != bytes) {
        ::close(opened);
        fail(EINVAL, "the shared memory of process " + std::to_string(process) + " is not what it announced");
    }
    Segment segment(opened, bytes);
    segment.close_fd();
    return segment;
}

Segment::Segment(Segment&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), bytes_(other.bytes_), data_(std::exchange(other.data_, nullptr)) {}

Segment::~Segment() {
    if (data_ != nullptr) munmap(data_, bytes_);
    close_fd();
}

void Segment::close_fd() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

// The ringer counts, then looks for a sleeper; the sleeper says so, then lets the kernel compare the count. Whichever order these take,
// either the ringer sees the sleeper or the kernel sees the ring.
void Doorbell::ring() {
    rings.fetch_add(1);
    if (sleeping.load() != 0) wake(rings);
}

bool Doorbell::sleep(std::uint32_t seen, int milliseconds) {
    sleeping.store(1);
    if (rings.load() == seen) sleep_on(rings, seen, milliseconds);
    sleeping.store(0);
    return rings.load() != seen;
}

Process Process::current() {
    Process process{getpid(), 0};
    char state;
    read_stat(process.id, &state, &process.started);
    return process;
}

ProcessWatch::ProcessWatch(const Process& process) : process_(process), fd_(-1) {
#if defined(__linux__)
    fd_ = static_cast<int>(syscall(kPidfdOpen, process.id, 0));
    char state;
    std::uint64_t started;
    if (fd_ >= 0 && process.started != 0 && (!read_stat(process.id, &state, &started) || started != process.started)) {
        ::close(fd_);  // its number belongs to another process by now
        fd_ = -1;
    }
#endif
}

ProcessWatch::~ProcessWatch() {
    if (fd_ >= 0) ::close(fd_);
}

bool ProcessWatch::alive() const {
    if (fd_ >= 0) {
        pollfd watched{fd_, POLLIN, 0};
        return poll(&watched, 1, 0) <= 0;
    }
    char state = 0;
    std::uint64_t started = 0;
    if (!read_stat(process_.id, &state, &started)) return false;
    return state != 'Z' && state != 'X' && (process_.started == 0 || started == process_.started);
}

}  // namespace drivetrain
