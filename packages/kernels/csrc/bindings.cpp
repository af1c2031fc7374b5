// The Python module `_native`: the only file that knows Python. Tensors arrive as addresses, element types and lengths; native.py has
// checked them. The GIL is released while the core works.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "core/cpu.h"
#include "core/elementwise.h"
#include "core/file_queue.h"
#include "core/matmul.h"
#include "core/pool.h"
#include "core/quantize.h"
#include "core/shared_memory_endpoint.h"
#include "core/steps.h"

namespace py = pybind11;

namespace {

using drivetrain::Dtype;
using drivetrain::Operand;
using drivetrain::Operands;

Operand make_operand(std::vector<std::uintptr_t> addresses, const std::vector<int>& dtypes, std::size_t tensors) {
    if (addresses.size() != tensors || dtypes.size() != tensors) {
        throw py::value_error("addresses, element types and lengths must be parallel lists");
    }
    Operand operand{std::move(addresses), {}};
    operand.dtypes.reserve(tensors);
    for (const int dtype : dtypes) {
        if (dtype < 0 || dtype > 2) throw py::value_error("unknown element type " + std::to_string(dtype));
        operand.dtypes.push_back(static_cast<Dtype>(dtype));
    }
    return operand;
}

using Stream = std::pair<std::vector<std::uintptr_t>, std::vector<int>>;

Operands make_operands(std::vector<std::int64_t> counts, std::vector<Stream> streams, Stream copy) {
    Operands operands;
    const std::size_t tensors = counts.size();
    operands.counts = std::move(counts);
    for (Stream& stream : streams) operands.streams.push_back(make_operand(std::move(stream.first), stream.second, tensors));
    if (!copy.first.empty()) operands.copy = make_operand(std::move(copy.first), copy.second, tensors);
    return operands;
}

void require_streams(const Operands& operands, std::size_t least, std::size_t most) {
    const std::size_t found = operands.streams.size();
    if (found < least || found > most) throw py::value_error("wrong number of streams: " + std::to_string(found));
}

std::vector<std::string> usable_names() {
    std::vector<std::string> names;
    for (const drivetrain::KernelTable* table : drivetrain::usable_kernels()) names.emplace_back(table->name);
    return names;
}

using NoGil = py::call_guard<py::gil_scoped_release>;

void bind_operands(py::module_& module) {
    py::class_<Operands>(module, "Operands")
        .def(py::init(&make_operands), py::kw_only(), py::arg("counts"), py::arg("streams"), py::arg("copy"));
}

void bind_steps(py::module_& module) {
    using drivetrain::AdagradStep, drivetrain::AdamStep, drivetrain::LambStep, drivetrain::LionStep, drivetrain::SgdStep;
    py::class_<AdamStep>(module, "AdamStep")
        .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay, double correction1, double correction2,
                         bool decoupled, double factor) {
                 return AdamStep{lr, beta1, beta2, eps, weight_decay, correction1, correction2, decoupled, factor};
             }),
             py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
             py::arg("correction1"), py::arg("correction2"), py::arg("decoupled"), py::arg("factor"));
    py::class_<LionStep>(module, "LionStep")
        .def(py::init([](double lr, double beta1, double beta2, double weight_decay, double factor) {
                 return LionStep{lr, beta1, beta2, weight_decay, factor};
             }),
             py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("weight_decay"), py::arg("factor"));
    py::class_<LambStep>(module, "LambStep")
        .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay, double correction1, double correction2,
                         bool eps_inside_sqrt, double factor) {
                 return LambStep{lr, beta1, beta2, eps, weight_decay, correction1, correction2, eps_inside_sqrt, factor};
             }),
             py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"), py::arg("weight_decay"),
             py::arg("correction1"), py::arg("correction2"), py::arg("eps_inside_sqrt"), py::arg("factor"));
    py::class_<AdagradStep>(module, "AdagradStep")
        .def(py::init([](double lr, double eps, double weight_decay, double factor) {
                 return AdagradStep{lr, eps, weight_decay, factor};
             }),
             py::kw_only(), py::arg("lr"), py::arg("eps"), py::arg("weight_decay"), py::arg("factor"));
    py::class_<SgdStep>(module, "SgdStep")
        .def(py::init([](double lr, double momentum, double dampening, double weight_decay, bool nesterov, bool first, double factor) {
                 return SgdStep{lr, momentum, dampening, weight_decay, nesterov, first, factor};
             }),
             py::kw_only(), py::arg("lr"), py::arg("momentum"), py::arg("dampening"), py::arg("weight_decay"), py::arg("nesterov"),
             py::arg("first"), py::arg("factor"));
}

// Binds fn(step, operands, threads) under its name, with the number of streams that it takes.
template <typename Step>
void bind_step(py::module_& module, const char* name, void (*run)(const Step&, const Operands&, int), std::size_t least, std::size_t most) {
    module.def(
        name,
        [run, least, most](const Step& step, const Operands& operands, int threads) {
            require_streams(operands, least, most);
            const py::gil_scoped_release released;
            run(step, operands, threads);
        },
        py::arg("step"), py::arg("operands"), py::arg("threads"));
}

using drivetrain::DenseArray, drivetrain::QuantArray, drivetrain::Rounding, drivetrain::SignArray;

template <typename Pointer>
Pointer pointer(std::uintptr_t address) {
    return reinterpret_cast<Pointer>(address);
}

// The core relies on blocks that begin at whole groups, and so at whole bytes.
std::size_t checked_block_size(std::size_t block_size) {
    if (block_size == 0 || block_size % drivetrain::kGroup != 0) throw py::value_error("block size " + std::to_string(block_size));
    return block_size;
}

DenseArray dense(std::uintptr_t data, int dtype) {
    if (dtype < 0 || dtype > 2) throw py::value_error("unknown element type " + std::to_string(dtype));
    return {pointer<void*>(data), static_cast<Dtype>(dtype)};
}

void bind_arrays(py::module_& module) {
    py::class_<DenseArray>(module, "DenseArray")
        .def(py::init(&dense), py::kw_only(), py::arg("data"), py::arg("dtype"));
    py::class_<QuantArray>(module, "QuantArray")
        .def(py::init([](int format, std::size_t block_size, std::uintptr_t values, std::uintptr_t scales, std::uintptr_t zeros, bool symmetric) {
                 if (format < 0 || format > 4) throw py::value_error("unknown format " + std::to_string(format));
                 const drivetrain::QuantRule rule{static_cast<drivetrain::Format>(format), symmetric, checked_block_size(block_size)};
                 return QuantArray{rule, pointer<std::uint8_t*>(values), pointer<float*>(scales), pointer<float*>(zeros)};
             }),
             py::kw_only(), py::arg("format"), py::arg("block_size"), py::arg("values"), py::arg("scales"), py::arg("zeros"),
             py::arg("symmetric"));
    py::class_<Rounding>(module, "Rounding")
        .def(py::init([](bool stochastic, std::uint64_t seed, std::uint64_t first_block) { return Rounding{stochastic, seed, first_block}; }),
             py::kw_only(), py::arg("stochastic"), py::arg("seed"), py::arg("first_block"));
    py::class_<SignArray>(module, "SignArray")
        .def(py::init([](std::size_t block_size, bool root_mean_square, std::uintptr_t bits, std::uintptr_t scales) {
                 return SignArray{checked_block_size(block_size), root_mean_square, pointer<std::uint8_t*>(bits), pointer<float*>(scales)};
             }),
             py::kw_only(), py::arg("block_size"), py::arg("root_mean_square"), py::arg("bits"), py::arg("scales"));
}

void bind_quantization(py::module_& module) {
    bind_arrays(module);
    module.def("quantize", &drivetrain::quantize, py::arg("source"), py::arg("count"), py::arg("target"), py::arg("rounding"),
               py::arg("threads"), NoGil());
    module.def("dequantize_reduce", &drivetrain::dequantize_reduce, py::arg("sources"), py::arg("factor"), py::arg("count"),
               py::arg("target"), py::arg("threads"), NoGil());
    module.def("reduce_quantized", &drivetrain::reduce_quantized, py::arg("sources"), py::arg("factor"), py::arg("count"),
               py::arg("target"), py::arg("rounding"), py::arg("threads"), NoGil());
    module.def("pack_signs", &drivetrain::pack_signs, py::arg("source"), py::arg("count"), py::arg("target"), py::arg("threads"), NoGil());
    module.def("unpack_signs", &drivetrain::unpack_signs, py::arg("source"), py::arg("count"), py::arg("target"), py::arg("threads"), NoGil());
}

void bind_matmul(py::module_& module) {
    using drivetrain::QuantizedWeight;
    py::class_<QuantizedWeight>(module, "QuantizedWeight")
        .def(py::init([](const QuantArray& stored, std::size_t out, std::size_t in, bool panels) {
                 if (in % stored.rule.block_size != 0) throw py::value_error("blocks must not cross rows");
                 return QuantizedWeight{stored.rule, out, in, stored.values, stored.scales, stored.rule.symmetric ? nullptr : stored.zeros, panels};
             }),
             py::kw_only(), py::arg("stored"), py::arg("rows"), py::arg("columns"), py::arg("panels"));
    module.def("panel_rows", &drivetrain::panel_rows, py::arg("rows"));
    module.def(
        "prepare_weight",
        [](const QuantizedWeight& weight, const QuantArray& target, int threads) {
            if (weight.panels) throw py::value_error("a weight is prepared once");
            const py::gil_scoped_release released;
            drivetrain::prepare_weight(weight, target.values, target.scales, target.zeros, threads);
        },
        py::arg("weight"), py::arg("target"), py::arg("threads"));
    // Arrays as address and element type: this is called once per token and layer, and objects would cost as much as small products.
    module.def(
        "quantized_matmul",
        [](const QuantizedWeight& weight, std::uintptr_t x, int x_dtype, std::size_t tokens, std::uintptr_t bias, int bias_dtype, std::uintptr_t y,
           int y_dtype, bool int8_activations, int default_threads) {
            const int setting = drivetrain::Pool::setting(), threads = setting > 0 ? setting : default_threads;
            const auto activations = int8_activations ? drivetrain::Activations::int8 : drivetrain::Activations::native;
            const DenseArray from = dense(x, x_dtype), added = dense(bias, bias_dtype), to = dense(y, y_dtype);
            const py::gil_scoped_release released;
            drivetrain::quantized_matmul(from, tokens, weight, added, to, activations, threads);
        },
        py::arg("weight"), py::arg("x"), py::arg("x_dtype"), py::arg("tokens"), py::arg("bias"), py::arg("bias_dtype"), py::arg("y"),
        py::arg("y_dtype"), py::arg("int8_activations"), py::arg("default_threads"));
}

struct ReleaseQueue {
    void operator()(drivetrain::FileQueue* queue) const {
        const py::gil_scoped_release released;
        drivetrain::FileQueue::release(queue);
    }
};

// Null once closed.
struct OpenFile {
    std::unique_ptr<drivetrain::FileQueue, ReleaseQueue> queue;
    drivetrain::FileQueue& get() const {
        if (queue == nullptr) throw py::value_error("the file is closed");
        return *queue;
    }
};

std::unique_ptr<OpenFile> open_file(const std::string& path, int mode, std::size_t block_bytes, unsigned queue_depth, unsigned workers,
                                    bool direct, bool ring, const std::vector<std::pair<std::uintptr_t, std::size_t>>& memory) {
    if (mode < 0 || mode > 2) throw py::value_error("unknown mode " + std::to_string(mode));
    if (block_bytes == 0 || block_bytes % 4096 != 0 || queue_depth == 0) throw py::value_error("block size or queue depth");
    auto file = std::make_unique<OpenFile>();
    drivetrain::QueueOptions options{block_bytes, queue_depth, workers, direct, ring};
    for (const auto& [address, bytes] : memory) options.memory.push_back({pointer<char*>(address), bytes});
    int error = 0;
    {
        const py::gil_scoped_release released;
        try {
            file->queue.reset(new drivetrain::FileQueue(path, static_cast<drivetrain::OpenMode>(mode), options));
        } catch (const std::system_error& failure) {
            error = failure.code().value();
        }
    }
    if (error != 0) {
        errno = error;
        PyErr_SetFromErrnoWithFilename(PyExc_OSError, path.c_str());
        throw py::error_already_set();
    }
    return file;
}

void bind_files(py::module_& module) {
    using drivetrain::FileRequest;
    py::class_<FileRequest, std::shared_ptr<FileRequest>>(module, "FileRequest")
        .def("wait", &FileRequest::wait, NoGil())
        .def("done", &FileRequest::done)
        .def("failed_at", &FileRequest::failed_at);
    py::class_<OpenFile>(module, "OpenFile")
        .def(py::init(&open_file), py::kw_only(), py::arg("path"), py::arg("mode"), py::arg("block_bytes"), py::arg("queue_depth"),
             py::arg("workers"), py::arg("direct"), py::arg("ring"), py::arg("memory"))
        .def(
            "submit",
            [](const OpenFile& file, bool writes, std::uintptr_t data, std::size_t bytes, std::int64_t offset) {
                drivetrain::FileQueue& queue = file.get();
                const py::gil_scoped_release released;
                return queue.submit(writes, pointer<void*>(data), bytes, offset);
            },
            py::kw_only(), py::arg("writes"), py::arg("data"), py::arg("bytes"), py::arg("offset"))
        .def("sync",
             [](const OpenFile& file) {
                 drivetrain::FileQueue& queue = file.get();
                 const py::gil_scoped_release released;
                 return queue.sync();
             })
        .def("uses_ring", [](const OpenFile& file) { return file.get().uses_ring(); })
        .def("uses_direct", [](const OpenFile& file) { return file.get().uses_direct(); })
        .def("holds_memory", [](const OpenFile& file) { return file.get().holds_memory(); })
        .def("ring_refusal", [](const OpenFile& file) { return file.get().ring_refusal(); })
        .def("close", [](OpenFile& file) { file.queue.reset(); });
}

[[noreturn]] void raise_os_error(const std::system_error& failure) {
    const py::object error = py::reinterpret_borrow<py::object>(PyExc_OSError)(failure.code().value(), std::string(failure.what()));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());  // OSError makes itself one of its subclasses
    throw py::error_already_set();
}

struct ReleaseEndpoint {
    void operator()(drivetrain::SharedMemoryEndpoint* endpoint) const {
        const py::gil_scoped_release released;
        drivetrain::SharedMemoryEndpoint::release(endpoint);
    }
};

using Endpoint = std::unique_ptr<drivetrain::SharedMemoryEndpoint, ReleaseEndpoint>;
using EndpointAddress = std::tuple<std::int64_t, std::uint64_t, int, int, std::uint64_t>;

// Null once closed.
struct OpenEndpoint {
    Endpoint endpoint;
    drivetrain::SharedMemoryEndpoint& get() const {
        if (endpoint == nullptr) throw py::value_error("the group is closed");
        return *endpoint;
    }
    drivetrain::SharedMemoryEndpoint& started() const {
        if (!get().open()) throw py::value_error("the group was not started");
        return *endpoint;
    }
};

template <std::size_t kRoom>
void put_text(const std::string& text, char (&to)[kRoom]) {
    std::copy_n(text.data(), std::min(text.size(), kRoom - 1), to);
}

drivetrain::CallRequest make_request(int kind, std::uintptr_t input, std::uintptr_t output, std::uint64_t bytes, const std::string& label,
                                     const std::string& dtype, int type, int op, std::uint32_t root) {
    if (kind < 0 || kind > 4 || type < 0 || type >= drivetrain::kFoldTypes || op < 0 || op > 3) throw py::value_error("kind, type or op");
    drivetrain::CallRequest request{{}, pointer<const void*>(input), pointer<void*>(output)};
    request.header.bytes = bytes;
    put_text(label, request.header.label);
    put_text(dtype, request.header.dtype);
    request.header.kind = static_cast<drivetrain::CallKind>(kind);
    request.header.type = static_cast<std::uint8_t>(type);
    request.header.op = static_cast<std::uint8_t>(op);
    request.header.root = root;
    return request;
}

// Number, label, bytes and dtype of a call.
py::tuple describe(const drivetrain::CallHeader& header) {
    return py::make_tuple(header.sequence, std::string(header.label), header.bytes, std::string(header.dtype));
}

void bind_shared_memory(py::module_& module) {
    using drivetrain::SharedMemoryEndpoint, drivetrain::SharedMemoryWork;
    py::class_<SharedMemoryWork, std::shared_ptr<SharedMemoryWork>>(module, "SharedMemoryWork")
        .def("wait", &SharedMemoryWork::wait, py::arg("milliseconds"), NoGil())
        .def("outcome", [](SharedMemoryWork& work) {
            const drivetrain::Outcome outcome = work.outcome();
            return py::make_tuple(static_cast<int>(outcome.trouble), outcome.peer, describe(outcome.mine), describe(outcome.theirs));
        });
    py::class_<OpenEndpoint>(module, "SharedMemoryEndpoint")
        .def(py::init([](std::size_t slot_bytes, std::size_t slots) {
                 try {
                     return OpenEndpoint{Endpoint(new SharedMemoryEndpoint({slot_bytes, slots}))};
                 } catch (const std::system_error& failure) {
                     raise_os_error(failure);
                 }
             }),
             py::kw_only(), py::arg("slot_bytes"), py::arg("slots"))
        .def("address",
             [](const OpenEndpoint& open) {
                 const SharedMemoryEndpoint::Address address = open.get().address();
                 return EndpointAddress(address.process, address.started, address.ring_fd, address.bell_fd, address.key);
             })
        .def(
            "connect",
            [](const OpenEndpoint& open, int rank, const std::vector<EndpointAddress>& addresses) {
                std::vector<SharedMemoryEndpoint::Address> all;
                for (const auto& [process, started, ring_fd, bell_fd, key] : addresses) all.push_back({process, started, ring_fd, bell_fd, key});
                try {
                    open.get().connect(rank, all);
                } catch (const std::system_error& failure) {
                    raise_os_error(failure);
                }
            },
            py::arg("rank"), py::arg("addresses"))
        .def("start", [](const OpenEndpoint& open) { open.get().start(); })
        .def(
            "submit",
            [](const OpenEndpoint& open, int kind, std::uintptr_t input, std::uintptr_t output, std::uint64_t bytes, const std::string& label,
               const std::string& dtype, int type, int op, std::uint32_t root) {
                return open.started().submit(make_request(kind, input, output, bytes, label, dtype, type, op, root));
            },
            py::kw_only(), py::arg("kind"), py::arg("input"), py::arg("output"), py::arg("bytes"), py::arg("label"), py::arg("dtype"),
            py::arg("type"), py::arg("op"), py::arg("root"))
        .def("progress", [](const OpenEndpoint& open) { return open.started().progress(); })
        .def("expire", [](const OpenEndpoint& open, const std::shared_ptr<SharedMemoryWork>& work) { open.started().expire(work); },
             py::arg("work"))
        .def("close", [](OpenEndpoint& open) { open.endpoint.reset(); });
}

}  // namespace

PYBIND11_MODULE(_native, module) {
    module.doc() = "Native core of drivetrain.kernels; use it through drivetrain.kernels.";
    bind_operands(module);
    bind_steps(module);

    module.def("usable_instruction_sets", &usable_names);
    module.def("instruction_set", [] { return std::string(drivetrain::kernels().name); });
    module.def("choose_instruction_set", &drivetrain::choose_kernels, py::arg("name"));

    module.def("thread_setting", &drivetrain::Pool::setting);
    module.def("set_threads", &drivetrain::Pool::set, py::arg("threads"));

    bind_step(module, "adam_step", &drivetrain::adam_step, 4, 5);
    bind_step(module, "adam_rollback", &drivetrain::adam_rollback, 4, 4);
    bind_step(module, "lion_step", &drivetrain::lion_step, 3, 3);
    bind_step(module, "adagrad_step", &drivetrain::adagrad_step, 3, 3);
    bind_step(module, "sgd_step", &drivetrain::sgd_step, 2, 3);
    module.def(
        "lamb_moments",
        [](const drivetrain::LambStep& step, const Operands& operands, int threads) {
            require_streams(operands, 4, 4);
            const py::gil_scoped_release released;
            return drivetrain::lamb_moments(step, operands, threads);
        },
        py::arg("step"), py::arg("operands"), py::arg("threads"));
    module.def(
        "lamb_apply",
        [](const drivetrain::LambStep& step, const std::vector<double>& ratios, const Operands& operands, int threads) {
            require_streams(operands, 3, 3);
            if (ratios.size() != operands.counts.size()) throw py::value_error("one ratio per tensor is needed");
            const py::gil_scoped_release released;
            drivetrain::lamb_apply(step, ratios, operands, threads);
        },
        py::arg("step"), py::arg("ratios"), py::arg("operands"), py::arg("threads"));
    module.def("sum_of_squares", &drivetrain::sum_of_squares, py::arg("factor"), py::arg("operands"), py::arg("threads"), NoGil());
    module.def("unscale", &drivetrain::unscale, py::arg("factor"), py::arg("operands"), py::arg("threads"), NoGil());
    module.def(
        "cast",
        [](const Operands& operands, int threads) {
            require_streams(operands, 2, 2);
            const py::gil_scoped_release released;
            drivetrain::cast(operands.counts, operands.streams[0], operands.streams[1], threads);
        },
        py::arg("operands"), py::arg("threads"));
    bind_quantization(module);
    bind_matmul(module);
    bind_files(module);
    bind_shared_memory(module);
}
