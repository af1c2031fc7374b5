// Tests of the core without Python, made for the sanitizers: buffers are exactly as long as they must be, pools are made and destroyed, and
// several threads call at once. `python build_native.py --check thread` (or address, undefined, none) compiles and runs it.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <unistd.h>

#include "core/cpu.h"
#include "core/elementwise.h"
#include "core/file_queue.h"
#include "core/matmul.h"
#include "core/pool.h"
#include "core/quantize.h"
#include "core/steps.h"
#include "tests/require.h"

using namespace drivetrain;

namespace {

// An operand of its own heap blocks, one per tensor, of exactly the needed bytes.
class Buffers {
public:
    Buffers(const std::vector<std::int64_t>& counts, Dtype dtype, unsigned seed) {
        for (const std::int64_t count : counts) {
            const auto size = static_cast<std::size_t>(count);
            blocks_.push_back(std::make_unique<char[]>(size * size_of(dtype)));
            std::vector<float> values(size);
            for (float& value : values) {
                seed = seed * 1664525u + 1013904223u;
                value = static_cast<float>(seed >> 8) / 16777216.0f + 0.01f;
            }
            convert(kernels(), values.data(), Dtype::f32, blocks_.back().get(), dtype, size);
            operand.addresses.push_back(reinterpret_cast<std::uintptr_t>(blocks_.back().get()));
            operand.dtypes.push_back(dtype);
            bytes_.push_back(size * size_of(dtype));
        }
    }

    bool same(const Buffers& other) const {
        for (std::size_t k = 0; k < blocks_.size(); ++k) {
            if (std::memcmp(blocks_[k].get(), other.blocks_[k].get(), bytes_[k]) != 0) return false;
        }
        return true;
    }

    Operand operand;

private:
    std::vector<std::unique_ptr<char[]>> blocks_;
    std::vector<std::size_t> bytes_;
};

const std::vector<std::int64_t> kCounts{0, 1, 5, 15, 16, 17, 123, 1023, 1025, 4097, 70001};

// All steps over the same inputs with the tables in use; returns what they wrote.
std::vector<std::unique_ptr<Buffers>> run_steps(Dtype param, Dtype grad, Dtype state, int threads) {
    std::vector<std::unique_ptr<Buffers>> all;
    const Dtype dtypes[] = {param, grad, state, state, state};
    for (unsigned k = 0; k < 5; ++k) all.push_back(std::make_unique<Buffers>(kCounts, dtypes[k], k + 1));
    all.push_back(std::make_unique<Buffers>(kCounts, Dtype::bf16, 9));
    const auto pick = [&](std::initializer_list<int> streams) {
        Operands operands;
        operands.counts = kCounts;
        for (const int k : streams) operands.streams.push_back(all[static_cast<std::size_t>(k)]->operand);
        operands.copy = all[5]->operand;
        return operands;
    };
    const AdamStep adam{0.1, 0.9, 0.99, 1e-6, 0.1, 0.271, 0.0297, true, 0.5};
    AdamStep coupled = adam;
    coupled.decoupled = false;
    adam_step(adam, pick({0, 1, 2, 3}), threads);
    adam_step(coupled, pick({0, 1, 2, 3, 4}), threads);
    adam_rollback(adam, pick({0, 1, 2, 3}), threads);
    lion_step({0.1, 0.9, 0.99, 0.1, 0.5}, pick({0, 1, 2}), threads);
    adagrad_step({0.1, 1e-10, 0.1, 0.5}, pick({0, 1, 3}), threads);
    sgd_step({0.1, 0.9, 0.1, 0.1, false, false, 0.5}, pick({0, 1, 2}), threads);
    const LambStep lamb{0.1, 0.9, 0.99, 1e-6, 0.1, 0.271, 0.0297, false, 0.5};
    const std::vector<double> norms = lamb_moments(lamb, pick({0, 1, 2, 3}), threads);
    require(norms.size() == 2 * kCounts.size() && norms[0] == 0.0 && norms[2] > 0.0, "norms of LAMB");
    lamb_apply(lamb, std::vector<double>(kCounts.size(), 0.5), pick({0, 2, 3}), threads);
    require(unscale(0.5, pick({1}), threads) == sum_of_squares(1.0, pick({1}), threads) || grad != Dtype::f32, "sums");
    return all;
}

void test_steps_agree() {
    for (const Dtype param : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
        for (const Dtype state : {Dtype::f32, Dtype::bf16}) {
            choose_kernels("baseline");
            const auto expected = run_steps(param, param, state, 1);
            for (const KernelTable* table : usable_kernels()) {
                choose_kernels(table->name);
                for (const int threads : {1, 3}) {
                    const auto found = run_steps(param, param, state, threads);
                    for (std::size_t k = 0; k < found.size(); ++k) {
                        require(found[k]->same(*expected[k]), std::string("bits of ") + table->name + ", stream " + std::to_string(k));
                    }
                }
            }
        }
    }
}

void test_casts() {
    for (const KernelTable* table : usable_kernels()) {
        choose_kernels(table->name);
        for (const Dtype from : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
            for (const Dtype to : {Dtype::f32, Dtype::bf16, Dtype::f16}) {
                const Buffers source(kCounts, from, 1), target(kCounts, to, 2);
                cast(kCounts, source.operand, target.operand, 2);
            }
        }
    }
}

// Heap blocks of exactly the bytes that `count` elements take.
struct Codes {
    Codes(const QuantRule& rule, std::size_t count) {
        const std::size_t bits = rule.format == Format::int4 ? 4 : rule.format == Format::e3m2 ? 6 : 8;
        const std::size_t blocks = (count + rule.block_size - 1) / rule.block_size;
        bytes = (count * bits + 7) / 8;
        values = std::make_unique<std::uint8_t[]>(bytes);
        scales = std::make_unique<float[]>(blocks);
        zeros = std::make_unique<float[]>(blocks);
        array = {rule, values.get(), scales.get(), rule.symmetric ? nullptr : zeros.get()};
    }
    std::size_t bytes;
    std::unique_ptr<std::uint8_t[]> values;
    std::unique_ptr<float[]> scales, zeros;
    QuantArray array;
};

void test_quantization() {
    const QuantRule rules[] = {{Format::int8, true, 256}, {Format::int4, false, 16},   {Format::e4m3, true, 48},
                               {Format::e5m2, true, 32},  {Format::e3m2, true, 4112}, {Format::int8, false, 32768}};
    for (const QuantRule& rule : rules) {
        for (const std::int64_t size : kCounts) {
            const auto count = static_cast<std::size_t>(size);
            choose_kernels("baseline");
            const Buffers source({size}, Dtype::bf16, 3), wide({size}, Dtype::f32, 3);
            const DenseArray dense{reinterpret_cast<void*>(source.operand.addresses[0]), Dtype::bf16};
            const DenseArray target{reinterpret_cast<void*>(wide.operand.addresses[0]), Dtype::f32};
            const Codes expected(rule, count);
            const Rounding rounding{true, 7, 1};
            quantize(dense, count, expected.array, rounding, 1);
            for (const KernelTable* table : usable_kernels()) {
                choose_kernels(table->name);
                const Codes found(rule, count), again(rule, count);
                quantize(dense, count, found.array, rounding, 3);
                require(std::memcmp(found.values.get(), expected.values.get(), found.bytes) == 0, std::string("codes of ") + table->name);
                dequantize_reduce({found.array, expected.array}, 0.5f, count, target, 3);
                reduce_quantized({found.array, expected.array}, 0.5f, count, again.array, rounding, 3);
                const auto bits = std::make_unique<std::uint8_t[]>((count + 7) / 8);
                const auto scales = std::make_unique<float[]>((count + rule.block_size - 1) / rule.block_size);
                const SignArray signs{rule.block_size, true, bits.get(), scales.get()};
                pack_signs(dense, count, signs, 3);
                unpack_signs(signs, count, target, 3);
            }
        }
    }
}

// A weight in heap blocks of exactly its bytes, as it is and in panels.
struct Weight {
    Weight(const QuantRule& rule, std::size_t out, std::size_t in)
        : stored(rule, out * in), panels(rule, panel_rows(out) * in), source({static_cast<std::int64_t>(out * in)}, Dtype::f32, 5) {
        const DenseArray dense{reinterpret_cast<void*>(source.operand.addresses[0]), Dtype::f32};
        quantize(dense, out * in, stored.array, {false, 0, 0}, 1);
        raw = {rule, out, in, stored.array.values, stored.array.scales, stored.array.zeros, false};
        prepare_weight(raw, panels.values.get(), panels.scales.get(), panels.zeros.get(), 3);
        prepared = {rule, out, in, panels.array.values, panels.array.scales, panels.array.zeros, true};
    }
    Codes stored, panels;
    Buffers source;
    QuantizedWeight raw, prepared;
};

std::vector<float> product(const QuantizedWeight& weight, std::size_t tokens, Dtype dtype, Activations activations, int threads) {
    const Buffers x({static_cast<std::int64_t>(tokens * weight.in)}, dtype, 7), bias({static_cast<std::int64_t>(weight.out)}, Dtype::bf16, 8);
    std::vector<float> y(tokens * weight.out, -1.0f);
    quantized_matmul({reinterpret_cast<void*>(x.operand.addresses[0]), dtype}, tokens, weight,
                     {reinterpret_cast<void*>(bias.operand.addresses[0]), Dtype::bf16}, {y.data(), Dtype::f32}, activations, threads);
    return y;
}

// `exactly`, or within what sums of float32 may differ.
bool agree(const std::vector<float>& a, const std::vector<float>& b, bool exactly) {
    float most = 0.0f, apart = 0.0f;
    for (std::size_t i = 0; i < a.size(); ++i) {
        most = std::max(most, std::fabs(b[i]));
        apart = std::max(apart, std::fabs(a[i] - b[i]));
    }
    return exactly ? std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0 : apart <= 1e-5f * most;
}

void test_products() {
    const QuantRule rules[] = {{Format::int8, true, 64},   {Format::int8, false, 528}, {Format::int4, true, 16}, {Format::int4, false, 48},
                               {Format::e4m3, true, 32}, {Format::e5m2, true, 544},  {Format::e3m2, true, 80}};
    for (const QuantRule& rule : rules) {
        for (const std::size_t out : {std::size_t{1}, std::size_t{17}, std::size_t{85}}) {
            choose_kernels(usable_kernels().front()->name);
            const Weight weight(rule, out, 2 * rule.block_size);
            for (const std::size_t tokens : {std::size_t{1}, std::size_t{7}, std::size_t{131}}) {
                for (const Dtype dtype : {Dtype::f32, Dtype::bf16}) {
                    for (const Activations activations : {Activations::native, Activations::int8}) {
                        choose_kernels(usable_kernels().front()->name);
                        const std::vector<float> expected = product(weight.raw, tokens, dtype, activations, 1);
                        for (const KernelTable* table : usable_kernels()) {
                            choose_kernels(table->name);
                            const bool integers = rule.format == Format::int8 || rule.format == Format::int4;
                            const std::vector<float> found = product(weight.prepared, tokens, dtype, activations, 3);
                            const std::string what = std::string("products of ") + table->name;
                            require(agree(found, expected, activations == Activations::int8 && integers), what);
                            require(agree(product(weight.raw, tokens, dtype, activations, 2), found, true), what + " without panels");
                            if (dtype == Dtype::bf16 && std::string(table->name) == "amx") continue;  // its few tokens go another way
                            std::vector<float> first = product(weight.raw, 1, dtype, activations, 1);
                            require(std::memcmp(first.data(), found.data(), out * sizeof(float)) == 0, what + " of a token alone");
                        }
                    }
                }
            }
        }
    }
}

void test_pool() {
    for (int repeat = 0; repeat < 50; ++repeat) {
        Pool pool;
        for (const int threads : {1, 2, 4, 3}) {
            for (const std::size_t pieces : {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{100}}) {
                std::vector<int> visits(pieces, 0);  // plain ints: each piece belongs to one thread
                pool.run(pieces, threads, [&](std::size_t piece) { ++visits[piece]; });
                for (const int count : visits) require(count == 1, "every piece once");
            }
        }
    }
    Pool pool;
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 4; ++caller) {
        callers.emplace_back([&pool] {
            for (int repeat = 0; repeat < 200; ++repeat) {
                std::vector<int> visits(20, 0);
                pool.run(visits.size(), 3, [&](std::size_t piece) { ++visits[piece]; });
                for (const int count : visits) require(count == 1, "every piece once, from several callers");
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    // Loops that come while workers look out for them, just when they stop, and when they sleep.
    for (int repeat = 0; repeat < 300; ++repeat) {
        std::vector<int> visits(8, 0);
        pool.run(visits.size(), 4, [&](std::size_t piece) { ++visits[piece]; });
        for (const int count : visits) require(count == 1, "every piece once, after a rest");
        std::this_thread::sleep_for(std::chrono::microseconds(repeat % 150));
    }
}

// Cuts transfers short, interrupts them, refuses direct ones and fails from some offset on.
class FaultySystem : public SystemCalls {
public:
    bool forbids_rings = false, refuses_direct = false, zero_writes = false, refuses_memory = false;
    std::int64_t fails_from = INT64_MAX;
    int error = EIO;

    ssize_t read(int fd, void* to, std::size_t bytes, std::int64_t offset) override {
        const int fault = fault_at(fd, bytes, offset);
        return fault != 0 ? fault : SystemCalls::read(fd, to, shorter(bytes), offset);
    }
    ssize_t write(int fd, const void* from, std::size_t bytes, std::int64_t offset) override {
        if (zero_writes) return 0;
        const int fault = fault_at(fd, bytes, offset);
        return fault != 0 ? fault : SystemCalls::write(fd, from, shorter(bytes), offset);
    }
    int ring_setup(unsigned entries, RingParams* params) override {
        return forbids_rings ? -EPERM : SystemCalls::ring_setup(entries, params);
    }
    int ring_register_memory(int fd, const MemoryRange* ranges, unsigned count) override {
        return refuses_memory ? -ENOMEM : SystemCalls::ring_register_memory(fd, ranges, count);
    }
    std::int32_t ring_result(bool writes, std::size_t bytes, std::int32_t result) override {
        if (writes && zero_writes) return 0;
        if (calls_++ % 5 == 4) return -EINTR;
        if (fails_from != INT64_MAX) return -error;
        return result > 0 ? static_cast<std::int32_t>(shorter(static_cast<std::size_t>(result))) : (static_cast<void>(bytes), result);
    }

private:
    int fault_at(int fd, std::size_t bytes, std::int64_t offset) {
        if (calls_++ % 5 == 4) return -EINTR;
        if (refuses_direct && is_direct(fd)) return -EINVAL;
        return offset + static_cast<std::int64_t>(bytes) > fails_from ? -error : 0;
    }
    static bool is_direct(int fd) {
#if defined(O_DIRECT)
        return (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
#else
        return static_cast<void>(fd), false;
#endif
    }
    // Odd lengths now and then, aligned ones at other times.
    std::size_t shorter(std::size_t bytes) { return calls_ % 3 == 0 && bytes > 8192 ? 4096 : calls_ % 3 == 1 && bytes > 7 ? bytes - 7 : bytes; }

    std::atomic<unsigned> calls_{0};
};

std::string scratch_file() {
    char name[] = "file_queue_XXXXXX";  // in the working folder: a memory file system may refuse direct access
    const int fd = mkstemp(name);
    require(fd >= 0, "a scratch file");
    close(fd);
    return name;
}

void test_file_queue(bool ring, bool direct, unsigned workers, bool faulty) {
    const std::string path = scratch_file();
    FaultySystem faults;
    SystemCalls& calls = faulty ? faults : SystemCalls::real();
    std::vector<char> written(300001), back(written.size());
    for (std::size_t i = 0; i < written.size(); ++i) written[i] = static_cast<char>(i * 7 + i / 251);
    {
        FileQueue queue(path, OpenMode::create, {8192, 4, workers, direct, ring}, calls);
        std::vector<std::shared_ptr<FileRequest>> requests;
        // Pieces that begin and end anywhere, from memory that is aligned nowhere.
        std::size_t at = 0;
        for (const std::size_t bytes : {std::size_t{1}, std::size_t{4095}, std::size_t{4096}, std::size_t{70000}, std::size_t{0}}) {
            requests.push_back(queue.submit(true, written.data() + at, bytes, static_cast<std::int64_t>(at)));
            at += bytes;
        }
        requests.push_back(queue.submit(true, written.data() + at, written.size() - at, static_cast<std::int64_t>(at)));
        for (const auto& request : requests) require(request->wait() == 0 && request->done(), "a write");
        const int synced = queue.sync();
        require(synced == 0, "sync: error " + std::to_string(synced));
        require(queue.submit(false, back.data(), back.size(), 0)->wait() == 0, "a read");
        require(std::memcmp(back.data(), written.data(), back.size()) == 0, "what was written is read");
        const auto beyond = queue.submit(false, back.data(), 20000, 290001);
        require(beyond->wait() == FileRequest::kShortFile && beyond->failed_at() == 300001, "a short file");
        std::vector<std::thread> callers;
        for (std::size_t k = 0; k < 3; ++k) {
            callers.emplace_back([&, k] {
                for (std::size_t round = 0; round < 20; ++round) {
                    std::vector<char> part(5000);
                    const std::size_t from = 1000 * (k + round);
                    require(queue.submit(false, part.data(), part.size(), static_cast<std::int64_t>(from))->wait() == 0, "a caller's read");
                    require(std::memcmp(part.data(), written.data() + from, part.size()) == 0, "a caller's bytes");
                }
            });
        }
        for (std::thread& caller : callers) caller.join();
        queue.submit(false, back.data(), back.size(), 0);  // the destructor waits for it
    }
    std::remove(path.c_str());
}

struct Free {
    void operator()(char* memory) const { std::free(memory); }
};

// Transfers from and to memory that the ring holds, memory that begins or ends outside of it, and where holding is refused.
void test_held_memory(unsigned workers, bool refused) {
    const std::string path = scratch_file();
    FaultySystem faults;
    faults.refuses_memory = refused;
    const std::size_t bytes = 20 * 4096;
    const std::unique_ptr<char, Free> memory(static_cast<char*>(std::aligned_alloc(4096, 3 * bytes)));
    const std::vector<MemoryRange> held{{memory.get() + 2 * bytes, bytes}, {memory.get(), bytes}};
    for (std::size_t i = 0; i < 3 * bytes; ++i) memory.get()[i] = static_cast<char>(i * 7 + i / 251);
    const std::string expected(memory.get(), 3 * bytes);
    {
        FileQueue queue(path, OpenMode::create, {8192, 8, workers, true, true, held}, faults);
        require(queue.holds_memory() == (queue.uses_ring() && !refused), "what is held");
        require(queue.submit(true, memory.get(), 3 * bytes, 0)->wait() == 0, "a write across");
        std::memset(memory.get(), 0, 3 * bytes);
        // One after another, each while the one before is under way, so that the ring is woken for it.
        std::vector<std::shared_ptr<FileRequest>> requests;
        for (std::size_t at = 0; at < 3 * bytes; at += 4096) {
            requests.push_back(queue.submit(false, memory.get() + at, 4096, static_cast<std::int64_t>(at)));
        }
        for (const auto& request : requests) require(request->wait() == 0, "a read of a page");
        require(std::memcmp(memory.get(), expected.data(), 3 * bytes) == 0, "what is read into held memory");
        require(queue.submit(false, memory.get() + 123, bytes, 123)->wait() == 0, "a read that begins anywhere");
        require(std::memcmp(memory.get(), expected.data(), 3 * bytes) == 0, "what is read beyond held memory");
    }
    std::remove(path.c_str());
}

void test_file_errors(bool ring) {
    const std::string path = scratch_file();
    std::vector<char> data(100000);
    FaultySystem faults;
    faults.fails_from = ring ? 0 : 50000;
    faults.error = ENOSPC;
    {
        FileQueue queue(path, OpenMode::create, {8192, 4, 0, true, ring}, faults);
        const auto request = queue.submit(true, data.data(), data.size(), 0);
        require(request->wait() == ENOSPC, "a full disk");
        require(ring || request->failed_at() >= 40960, "the place of the failure");
    }
    faults.fails_from = INT64_MAX;
    faults.zero_writes = true;
    {
        FileQueue queue(path, OpenMode::update, {8192, 4, 2, false, ring}, faults);
        require(queue.submit(true, data.data(), data.size(), 0)->wait() == EIO, "a write that never moves");
    }
    faults.zero_writes = false;
    faults.refuses_direct = true;
    faults.forbids_rings = true;
    {
        FileQueue queue(path, OpenMode::create, {8192, 4, 2, true, true}, faults);
        require(!queue.uses_ring() && !queue.ring_refusal().empty(), "a forbidden ring");
        require(queue.submit(true, data.data(), 65536, 0)->wait() == 0, "refused direct writes");
    }
    std::remove(path.c_str());
    try {
        FileQueue queue("no/such/file", OpenMode::read, {8192, 4, 0, true, ring});
        require(false, "a missing file is refused");
    } catch (const std::system_error& error) {
        require(error.code().value() == ENOENT, "a missing file");
    }
}

void test_files() {
    for (const bool ring : {false, true}) {
        for (const bool direct : {false, true}) {
            for (const unsigned workers : {0u, 1u, 3u}) {
                for (const bool faulty : {false, true}) test_file_queue(ring, direct, workers, faulty);
            }
        }
        test_file_errors(ring);
    }
    for (const unsigned workers : {1u, 3u}) {
        for (const bool refused : {false, true}) test_held_memory(workers, refused);
    }
}

}  // namespace

int main() {
    test_pool();
    test_casts();
    test_steps_agree();
    test_quantization();
    test_products();
    test_files();
    std::puts("ok");
    return 0;
}
