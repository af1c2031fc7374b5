// Folding, and collectives between threads that stand for ranks: their segments are the same memory, so that the thread sanitizer sees
// every access of every rank.

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>

#include "core/cpu.h"
#include "core/elementwise.h"
#include "core/fold.h"
#include "core/shared_memory_thread.h"
#include "tests/require.h"

using namespace drivetrain;

namespace {

// ----------------------------------------------------------------------------------------------------------------- folds

constexpr FoldOp kOps[] = {FoldOp::sum, FoldOp::mean, FoldOp::max, FoldOp::min};

float expected_fold(FoldOp op, const std::vector<float>& values) {
    float total = values[0];
    for (std::size_t k = 1; k < values.size(); ++k) {
        const float next = values[k];
        if (op == FoldOp::max || op == FoldOp::min) {
            const bool keeps = op == FoldOp::max ? total > next : total < next;
            total = keeps || std::isnan(total) ? total : next;
        } else {
            total = total + next;
        }
    }
    return op == FoldOp::mean ? total / static_cast<float>(values.size()) : total;
}

void test_float_folds(Dtype dtype, std::size_t parts, std::size_t count) {
    const float special[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -0.0f, 0.0f, 1e-40f};
    std::vector<std::vector<float>> values(parts, std::vector<float>(count));
    std::vector<std::unique_ptr<char[]>> blocks;
    std::vector<const void*> addresses;
    std::mt19937 random(7);
    for (std::vector<float>& one : values) {
        for (float& value : one) value = random() % 8 == 0 ? special[random() % 5] : std::ldexp(static_cast<float>(random() % 4001) - 2000.0f, -5);
        blocks.push_back(std::make_unique<char[]>(count * size_of(dtype)));
        convert(kernels(), one.data(), Dtype::f32, blocks.back().get(), dtype, count);
        convert(kernels(), blocks.back().get(), dtype, one.data(), Dtype::f32, count);  // as it arrives there
        addresses.push_back(blocks.back().get());
    }
    for (const FoldOp op : kOps) {
        std::vector<float> expected(count);
        for (std::size_t i = 0; i < count; ++i) {
            std::vector<float> column;
            for (const std::vector<float>& one : values) column.push_back(one[i]);
            expected[i] = expected_fold(op, column);
        }
        const auto rounded = std::make_unique<char[]>(count * size_of(dtype)), found = std::make_unique<char[]>(count * size_of(dtype));
        convert(kernels(), expected.data(), Dtype::f32, rounded.get(), dtype, count);
        fold(static_cast<FoldType>(dtype), op, addresses.data(), parts, count, found.get());
        std::vector<float> actual(count), wanted(count);
        convert(kernels(), found.get(), dtype, actual.data(), Dtype::f32, count);
        convert(kernels(), rounded.get(), dtype, wanted.data(), Dtype::f32, count);
        for (std::size_t i = 0; i < count; ++i) {
            const bool same = std::memcmp(&actual[i], &wanted[i], sizeof(float)) == 0 || (std::isnan(actual[i]) && std::isnan(wanted[i]));
            require(same, std::string("fold on ") + kernels().name + ", element " + std::to_string(i));
        }
    }
}

template <typename Type>
void test_integer_folds(FoldType type) {
    const std::vector<Type> first{std::numeric_limits<Type>::max(), 1, 2}, second{1, 5, 0};
    const void* parts[] = {first.data(), second.data()};
    std::vector<Type> out(3);
    fold(type, FoldOp::sum, parts, 2, 3, out.data());
    require(out == std::vector<Type>{std::numeric_limits<Type>::min(), 6, 2}, "sums of integers wrap around");
    fold(type, FoldOp::max, parts, 2, 3, out.data());
    require(out == std::vector<Type>{std::numeric_limits<Type>::max(), 5, 2}, "maximum of integers");
    fold(type, FoldOp::min, parts, 2, 3, out.data());
    require(out == std::vector<Type>{1, 1, 0}, "minimum of integers");
}

// ----------------------------------------------------------------------------------------------------------------- ranks

// The ranks of one group, each with a thread that moves its bytes.
class Ranks {
public:
    Ranks(int size, const RingShape& shape) : shape_(shape), living_(static_cast<std::size_t>(size)) {
        for (int rank = 0; rank < size; ++rank) {
            living_[static_cast<std::size_t>(rank)] = true;
            segments_.push_back(Segment::create(SharedMemoryGroup::segment_bytes(shape)));
            threads_.push_back(std::make_unique<SharedMemoryThread>());
        }
        for (int rank = 0; rank < size; ++rank) {
            groups.push_back(std::make_shared<SharedMemoryGroup>(rank, shape, links()));
            threads_[static_cast<std::size_t>(rank)]->add(groups.back());
        }
    }

    ~Ranks() {
        for (std::size_t rank = 0; rank < groups.size(); ++rank) leave(static_cast<int>(rank));
    }

    void leave(int rank) {
        const auto index = static_cast<std::size_t>(rank);
        if (groups[index] != nullptr) threads_[index]->remove(groups[index]);
        groups[index] = nullptr;
    }

    void die(int rank) { living_[static_cast<std::size_t>(rank)] = false; }

    std::shared_ptr<SharedMemoryWork> submit(int rank, const CallRequest& request) {
        const auto index = static_cast<std::size_t>(rank);
        const std::shared_ptr<SharedMemoryWork> work = groups[index]->submit(request);
        threads_[index]->bell().ring();
        return work;
    }

    void expire(int rank, const std::shared_ptr<SharedMemoryWork>& work) {
        const auto index = static_cast<std::size_t>(rank);
        groups[index]->expire(work);
        threads_[index]->bell().ring();
    }

    int size() const { return static_cast<int>(segments_.size()); }

    std::vector<std::shared_ptr<SharedMemoryGroup>> groups;

private:
    std::vector<PeerLink> links() {
        std::vector<PeerLink> made;
        for (std::size_t peer = 0; peer < segments_.size(); ++peer) {
            made.push_back({segments_[peer].data(), &threads_[peer]->bell(), [this, peer] { return living_[peer].load(); }});
        }
        return made;
    }

    RingShape shape_;
    std::vector<std::atomic<bool>> living_;
    std::vector<Segment> segments_;
    std::vector<std::unique_ptr<SharedMemoryThread>> threads_;
};

CallHeader header(CallKind kind, std::size_t bytes, const char* label, FoldOp op = FoldOp::sum, unsigned root = 0) {
    CallHeader made{};
    made.bytes = bytes;
    std::strncpy(made.label, label, sizeof made.label - 1);
    std::strncpy(made.dtype, "int32", sizeof made.dtype - 1);
    made.kind = kind;
    made.type = static_cast<std::uint8_t>(FoldType::i32);
    made.op = static_cast<std::uint8_t>(op);
    made.root = root;
    return made;
}

using Values = std::vector<std::int32_t>;

std::int32_t value_of(int rank, int call, std::size_t index) { return rank * 1000003 + call * 7919 + static_cast<std::int32_t>(index); }

Values values_of(int rank, int call, std::size_t count) {
    Values made(count);
    for (std::size_t i = 0; i < count; ++i) made[i] = value_of(rank, call, i);
    return made;
}

// One call of one rank: what it passes, and what must come of it.
struct Case {
    CallHeader head{};
    Values input, output, expected;
};

std::unique_ptr<Case> make_case(int rank, int size, int call, CallKind kind, std::size_t count) {
    auto made = std::make_unique<Case>();
    const auto ranks = static_cast<std::size_t>(size), mine = static_cast<std::size_t>(rank);
    const auto sum = [&](std::size_t index) {
        std::int32_t total = 0;
        for (int peer = 0; peer < size; ++peer) total += value_of(peer, call, index);
        return total;
    };
    const unsigned root = static_cast<unsigned>(call % size);
    made->head = header(kind, count * 4, "call", FoldOp::sum, kind == CallKind::broadcast ? root : 0);
    if (kind == CallKind::all_gather) {
        made->input = values_of(rank, call, count);
        made->output.resize(ranks * count);
        for (int peer = 0; peer < size; ++peer) {
            const Values theirs = values_of(peer, call, count);
            made->expected.insert(made->expected.end(), theirs.begin(), theirs.end());
        }
    } else if (kind == CallKind::broadcast) {
        made->output = values_of(rank, call, count);
        made->expected = values_of(static_cast<int>(root), call, count);
    } else if (kind == CallKind::all_reduce) {
        made->output = values_of(rank, call, count);
        for (std::size_t i = 0; i < count; ++i) made->expected.push_back(sum(i));
    } else {
        made->input = values_of(rank, call, ranks * count);
        if (kind == CallKind::reduce_scatter) {
            made->output.resize(count);
            for (std::size_t i = 0; i < count; ++i) made->expected.push_back(sum(mine * count + i));
        } else {
            made->output.resize(ranks * count);
            for (int peer = 0; peer < size; ++peer) {
                for (std::size_t i = 0; i < count; ++i) made->expected.push_back(value_of(peer, call, mine * count + i));
            }
        }
    }
    return made;
}

// Many calls of all kinds and sizes under way at once, waited for in an order of each rank's own.
void run_rank(Ranks& ranks, int rank) {
    std::mt19937 common(11), own(static_cast<unsigned>(rank));
    const std::size_t counts[] = {0, 1, 5, 31, 64, 123, 1000, 5003};
    for (int batch = 0; batch < 6; ++batch) {
        std::vector<std::unique_ptr<Case>> cases;
        std::vector<std::shared_ptr<SharedMemoryWork>> works;
        std::vector<std::size_t> order;
        for (int k = 0; k < 10; ++k) {
            const auto kind = static_cast<CallKind>(common() % 5);
            cases.push_back(make_case(rank, ranks.size(), batch * 10 + k, kind, counts[common() % 8]));
            Case& made = *cases.back();
            const void* input = kind == CallKind::broadcast || kind == CallKind::all_reduce ? made.output.data() : made.input.data();
            works.push_back(ranks.submit(rank, {made.head, input, made.output.data()}));
            order.push_back(static_cast<std::size_t>(k));
        }
        std::shuffle(order.begin(), order.end(), own);
        for (const std::size_t k : order) {
            require(works[k]->wait(60000), "a call ends");
            require(works[k]->outcome().trouble == Trouble::none, "a call ends well");
            require(cases[k]->output == cases[k]->expected, "the result of call " + std::to_string(batch * 10 + static_cast<int>(k)));
        }
    }
}

void on_all(Ranks& ranks, const std::function<void(int)>& work) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks.size(); ++rank) threads.emplace_back(work, rank);
    for (std::thread& thread : threads) thread.join();
}

Outcome ended(const std::shared_ptr<SharedMemoryWork>& work) {
    require(work->wait(60000), "a call that can't complete ends");
    return work->outcome();
}

void test_trouble() {
    const RingShape shape{1024, 4};
    const std::size_t bytes = 40000;
    std::vector<char> buffers[3];
    for (std::vector<char>& buffer : buffers) buffer.resize(3 * bytes);
    const auto request = [&](int rank, CallKind kind, std::size_t size, const char* label) {
        std::vector<char>& buffer = buffers[rank];
        return CallRequest{header(kind, size, label), buffer.data(), buffer.data()};
    };
    {
        Ranks ranks(2, shape);
        const auto a = ranks.submit(0, request(0, CallKind::all_reduce, bytes, "one")), b = ranks.submit(0, request(0, CallKind::all_reduce, 4, "next"));
        const auto c = ranks.submit(1, request(1, CallKind::all_reduce, 4, "other"));
        for (const auto& work : {a, b, c}) require(ended(work).trouble == Trouble::differs, "ranks that disagree");
        require(std::string(a->outcome().theirs.label) == "other" && a->outcome().peer == 1, "what the other issued");
        require(std::string(c->outcome().theirs.label) == "one" && c->outcome().theirs.bytes == bytes, "what the first issued");
        require(ended(ranks.submit(0, request(0, CallKind::all_reduce, 4, "later"))).trouble == Trouble::differs, "a broken group stays broken");
    }
    {
        Ranks ranks(3, shape);
        const auto works = {ranks.submit(0, request(0, CallKind::all_reduce, bytes, "x")), ranks.submit(2, request(2, CallKind::all_reduce, bytes, "x"))};
        ranks.die(1);
        for (const auto& work : works) require(ended(work).trouble == Trouble::ended && work->outcome().peer == 1, "a peer that ended is named");
    }
    {
        Ranks ranks(2, shape);
        const auto work = ranks.submit(0, request(0, CallKind::broadcast, 4, "x"));
        require(!work->wait(20), "a call waits for its peers");
        ranks.expire(0, work);
        require(ended(work).trouble == Trouble::late && work->outcome().peer == 1, "a peer that is late is named");
        require(ended(ranks.submit(1, request(1, CallKind::broadcast, 4, "x"))).trouble == Trouble::none, "what was published stays");
        require(ended(ranks.submit(1, request(1, CallKind::broadcast, 4, "x"))).trouble == Trouble::failed, "a peer that gave up is seen");
    }
    {
        Ranks ranks(2, shape);
        const auto first = ranks.submit(0, request(0, CallKind::all_gather, 100, "x")), second = ranks.submit(1, request(1, CallKind::all_gather, 100, "x"));
        require(ended(first).trouble == Trouble::none, "a complete call");
        ranks.leave(0);
        ranks.die(0);
        require(ended(second).trouble == Trouble::none, "a peer may leave after its part");
        require(ended(ranks.submit(1, request(1, CallKind::all_gather, 100, "x"))).peer == 0, "a peer that left is named");
        const auto waiting = ranks.submit(1, request(1, CallKind::all_gather, 100, "x"));
        ranks.leave(1);
        require(ended(waiting).trouble != Trouble::none, "closing ends what is under way");
    }
}

void test_segments() {
    Segment made = Segment::create(8192);
    const Segment seen = Segment::open(getpid(), made.fd(), 8192);
    made.data()[8191] = 7;
    require(seen.data() != made.data() && seen.data()[8191] == 7, "two mappings of one memory");
    try {
        Segment::open(getpid(), made.fd(), 4096);
        require(false, "another size is refused");
    } catch (const std::system_error& error) {
        require(std::string(error.what()).find("not what it announced") != std::string::npos, error.what());
    }
    require(ProcessWatch(Process::current()).alive(), "this process lives");
    require(!ProcessWatch({Process::current().id, 1}).alive(), "a process that started at another time is another one");
}

void test_folds() {
    for (const KernelTable* table : usable_kernels()) {
        choose_kernels(table->name);
        for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
            for (const std::size_t parts : {1u, 2u, 3u, 5u}) {
                for (const std::size_t count : {0u, 1u, 15u, 64u, 123u, 1025u}) test_float_folds(dtype, parts, count);
            }
        }
    }
    test_integer_folds<std::int8_t>(FoldType::i8);
    test_integer_folds<std::uint8_t>(FoldType::u8);
    test_integer_folds<std::int16_t>(FoldType::i16);
    test_integer_folds<std::int32_t>(FoldType::i32);
    test_integer_folds<std::int64_t>(FoldType::i64);
}

void test_shared_memory() {
    test_segments();
    for (const int size : {2, 3, 4}) {
        for (const RingShape& shape : {RingShape{256, 2}, RingShape{4096, 8}}) {
            Ranks ranks(size, shape);
            on_all(ranks, [&ranks](int rank) { run_rank(ranks, rank); });
        }
    }
    test_trouble();
}

}  // namespace

int main() {
    test_folds();
    test_shared_memory();
    std::puts("ok");
    return 0;
}
