#include "shared_memory_endpoint.h"

#include <random>
#include <system_error>

#include <unistd.h>

#include "shared_memory_thread.h"

namespace drivetrain {

SharedMemoryEndpoint::SharedMemoryEndpoint(const RingShape& shape)
    : shape_(shape), process_(Process::current()), own_(Segment::create(SharedMemoryGroup::segment_bytes(shape))) {
    std::random_device random;
    key_ = static_cast<std::uint64_t>(random()) << 32 | random();
    SharedMemoryGroup::key(own_.data()) = key_;
    SharedMemoryThread::shared();
}

SharedMemoryEndpoint::~SharedMemoryEndpoint() { close(); }

void SharedMemoryEndpoint::release(SharedMemoryEndpoint* endpoint) {
    if (endpoint != nullptr && endpoint->process_.id == getpid()) delete endpoint;
}

SharedMemoryEndpoint::Address SharedMemoryEndpoint::address() const {
    return {process_.id, process_.started, own_.fd(), SharedMemoryThread::shared().bell_fd(), key_};
}

void SharedMemoryEndpoint::connect(int rank, const std::vector<Address>& all) {
    std::vector<PeerLink> links;
    for (std::size_t peer = 0; peer < all.size(); ++peer) {
        const Address& address = all[peer];
        if (static_cast<int>(peer) == rank) {
            links.push_back({own_.data(), &SharedMemoryThread::shared().bell(), [] { return true; }});
            continue;
        }
        Segment ring = Segment::open(address.process, address.ring_fd, SharedMemoryGroup::segment_bytes(shape_));
        Segment bell = Segment::open(address.process, address.bell_fd, SharedMemoryThread::kBellBytes);
        if (SharedMemoryGroup::key(ring.data()) != address.key) {
            throw std::system_error(EINVAL, std::generic_category(), "process " + std::to_string(address.process) + " here is another one");
        }
        watches_.push_back(std::make_unique<ProcessWatch>(Process{address.process, address.started}));
        const ProcessWatch* watch = watches_.back().get();
        links.push_back({ring.data(), reinterpret_cast<Doorbell*>(bell.data()), [watch] { return watch->alive(); }});
        segments_.push_back(std::move(ring));
        segments_.push_back(std::move(bell));
    }
    group_ = std::make_shared<SharedMemoryGroup>(rank, shape_, std::move(links));
}

void SharedMemoryEndpoint::start() {
    own_.close_fd();
    SharedMemoryThread::shared().add(group_);
    started_ = true;
}

std::shared_ptr<SharedMemoryWork> SharedMemoryEndpoint::submit(const CallRequest& request) {
    std::shared_ptr<SharedMemoryWork> work = group_->submit(request);
    SharedMemoryThread::shared().bell().ring();
    return work;
}

void SharedMemoryEndpoint::expire(const std::shared_ptr<SharedMemoryWork>& work) {
    group_->expire(work);
    SharedMemoryThread::shared().bell().ring();
}

void SharedMemoryEndpoint::close() {
    if (started_) SharedMemoryThread::shared().remove(group_);
    started_ = false;
}

}  // namespace drivetrain
