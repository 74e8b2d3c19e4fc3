// hvdcompress.kernels._native: the kernels as Python functions on NumPy arrays, with the signatures of kernels/numpy.py and bits.py.
//
// Arrays are checked here, and everything that comes from a peer is checked here or in kernels.h before it is used.
// The GIL is released while a kernel runs.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "kernels.h"

namespace py = pybind11;
using hvdcompress::Kernels;
using hvdcompress::kRun;

namespace {

constexpr std::size_t kLeastWork = 1 << 16;  // elements that are worth a thread
constexpr std::size_t kPiece = 1 << 12;      // elements that stay in the cache between the terms of a sum

const Kernels* kernels = nullptr;
std::size_t threads = 1;

std::vector<const Kernels*> available() {
    std::vector<const Kernels*> found{&hvdcompress::baseline};
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) found.push_back(&hvdcompress::avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("bmi2"))
        found.push_back(&hvdcompress::avx512);
#endif
    return found;
}

// Runs work(part, begin, end) over [0, n), cut at multiples of `grain`, on as many threads as are worth it.
void in_parallel(std::size_t n, std::size_t grain, std::size_t elements_each,
                 const std::function<void(std::size_t, std::size_t, std::size_t)>& work) {
    const std::size_t grains = (n + grain - 1) / grain;
    const std::size_t parts = std::max<std::size_t>(1, std::min({threads, grains, n * elements_each / kLeastWork}));
    auto part = [&](std::size_t i) { work(i, std::min(n, grains * i / parts * grain), std::min(n, grains * (i + 1) / parts * grain)); };
    std::vector<std::thread> others;
    for (std::size_t i = 1; i < parts; ++i) others.emplace_back(part, i);
    part(0);
    for (auto& other : others) other.join();
}

template <typename T>
struct Vector {
    T* data;
    std::size_t size;
};

[[noreturn]] void wrong(const char* name, const char* what) {
    throw py::type_error(std::string(name) + " must be a contiguous " + what + " array");
}

Vector<const float> floats(const py::array& array, const char* name) {
    if (!py::isinstance<py::array_t<float>>(array) || !(array.flags() & py::array::c_style)) wrong(name, "float32");
    return {static_cast<const float*>(array.data()), static_cast<std::size_t>(array.size())};
}

Vector<float> mutable_floats(py::array& array, const char* name) {
    const auto checked = floats(array, name);
    return {static_cast<float*>(array.mutable_data()), checked.size};  // raises if it is read-only
}

Vector<const std::uint8_t> bytes(const py::array& array, const char* name) {
    if (!py::isinstance<py::array_t<std::uint8_t>>(array) || !(array.flags() & py::array::c_style)) wrong(name, "uint8");
    return {static_cast<const std::uint8_t*>(array.data()), static_cast<std::size_t>(array.size())};
}

Vector<const std::int64_t> integers(const py::array& array, const char* name) {
    if (!py::isinstance<py::array_t<std::int64_t>>(array) || !(array.flags() & py::array::c_style)) wrong(name, "int64");
    return {static_cast<const std::int64_t*>(array.data()), static_cast<std::size_t>(array.size())};
}

// float32[n] of memory that is used again, see pool.py.
py::array_t<float> vector_of(std::size_t n) {
    return py::array_t<float>(py::module_::import("hvdcompress.kernels.pool").attr("empty")(n));
}

[[noreturn]] void payload_error(const std::string& message) {
    const py::object error = py::module_::import("hvdcompress.errors").attr("PayloadError");
    PyErr_SetString(error.ptr(), message.c_str());
    throw py::error_already_set();
}

std::size_t scale_bytes(std::size_t blocks, bool byte_scales) {
    return byte_scales ? blocks + (blocks + kRun - 1) / kRun : 4 * blocks;
}

void check_block(std::size_t block) {
    if (block < 1 || block > (std::size_t{1} << 31)) throw py::value_error("block must be from 1 to 2^31 elements");
}

bool all_finite(const py::array& x) {
    const auto in = floats(x, "x");
    py::gil_scoped_release release;
    return kernels->all_finite(in.data, in.size);
}

double sum_of_squares(const py::array& x) {
    const auto in = floats(x, "x");
    py::gil_scoped_release release;
    return kernels->sum_of_squares(in.data, in.size);
}

py::array_t<float> weighted_sum(const py::args& terms) {
    std::vector<Vector<const float>> vectors;
    std::vector<float> factors;
    for (const auto& term : terms) {
        const auto pair = py::cast<py::tuple>(term);
        factors.push_back(static_cast<float>(py::cast<double>(pair[0])));
        vectors.push_back(floats(py::cast<py::array>(pair[1]), "a term"));
        if (vectors.back().size != vectors.front().size) throw py::value_error("the terms of a sum differ in size");
    }
    if (vectors.empty()) throw py::value_error("a sum needs a term");
    const std::size_t n = vectors.front().size;
    py::array_t<float> sum = vector_of(n);
    float* out = sum.mutable_data();
    py::gil_scoped_release release;
    in_parallel(n, kPiece, vectors.size(), [&](std::size_t, std::size_t begin, std::size_t end) {
        for (std::size_t at = begin; at < end; at += kPiece) {
            const std::size_t size = std::min(kPiece, end - at);
            for (std::size_t i = 0; i < vectors.size(); ++i) kernels->add_term(out + at, vectors[i].data + at, factors[i], i == 0, size);
        }
    });
    return sum;
}

py::array_t<float> divide(const py::array& x, long long divisor) {
    const auto in = floats(x, "x");
    py::array_t<float> quotient = vector_of(in.size);
    float* out = quotient.mutable_data();
    py::gil_scoped_release release;
    in_parallel(in.size, kPiece, 1, [&](std::size_t, std::size_t begin, std::size_t end) {
        kernels->divide(out + begin, in.data + begin, static_cast<float>(divisor), end - begin);
    });
    return quotient;
}

// Appends n bits of `from` to `to` at bit `at`; `to` is zero from there on.
void append_bits(std::uint8_t* to, std::size_t at, const std::uint8_t* from, std::size_t n) {
    const std::size_t source = (n + 7) / 8;
    const unsigned shift = at % 8;
    std::uint8_t* out = to + at / 8;
    if (!shift) {
        std::memcpy(out, from, source);
        return;
    }
    for (std::size_t i = 0; i < source; ++i) {
        out[i] = static_cast<std::uint8_t>(out[i] | from[i] << shift);
        if ((at % 8) + n > 8 * (i + 1)) out[i + 1] = static_cast<std::uint8_t>(from[i] >> (8 - shift));
    }
}

py::tuple ternary_encode(const py::array& x, std::size_t block, std::uint64_t key, std::uint64_t first, bool byte_scales, bool l2,
                         const std::optional<py::array>& minus) {
    const auto in = floats(x, "x");
    const auto off = minus ? floats(*minus, "minus") : Vector<const float>{nullptr, in.size};
    if (off.size != in.size) throw py::value_error("x and minus differ in size");
    check_block(block);
    const std::size_t blocks = (in.size + block - 1) / block, runs = (blocks + kRun - 1) / kRun;
    const std::size_t head = scale_bytes(blocks, byte_scales), mask_bytes = (in.size + 7) / 8;
    py::array_t<std::uint8_t> payload(static_cast<py::ssize_t>(head + 2 * mask_bytes));
    std::uint8_t* out = payload.mutable_data();
    std::uint8_t* signs = out + head + mask_bytes;
    std::size_t nonzeros = 0;
    double noise = 0;
    {
        py::gil_scoped_release release;
        struct Part {
            std::vector<std::uint8_t> signs;  // of all threads but the first, which writes in place
            std::size_t nonzeros = 0;
            double noise = 0;
        };
        std::vector<Part> parts(threads);
        in_parallel(runs, 1, kRun * block, [&](std::size_t i, std::size_t begin, std::size_t end) {
            const std::size_t at = begin * kRun * block, size = std::min(in.size, end * kRun * block) - at;
            if (i) parts[i].signs.resize((size + 7) / 8);
            std::uint8_t* scales = byte_scales ? out + runs + begin * kRun : out + 4 * begin * kRun;
            std::vector<float> difference(off.data ? std::min(kRun * block, size) : 0);
            parts[i].nonzeros = kernels->ternary_encode(in.data + at, off.data ? off.data + at : nullptr, difference.data(), size, block, key, first + begin * kRun, byte_scales, l2, out + begin,
                                                        scales, out + head + at / 8, i ? parts[i].signs.data() : signs,
                                                        &parts[i].noise);
        });
        for (std::size_t i = 0; i < parts.size(); ++i) {
            if (i && parts[i].nonzeros) append_bits(signs, nonzeros, parts[i].signs.data(), parts[i].nonzeros);
            nonzeros += parts[i].nonzeros;
            noise += parts[i].noise;
        }
    }
    const auto size = static_cast<py::ssize_t>(head + mask_bytes + (nonzeros + 7) / 8);
    return py::make_tuple(payload[py::slice(0, size, 1)], noise < 0 ? 0 : noise);
}

std::size_t count_bits(const std::uint8_t* data, std::size_t size) {
    std::size_t count = 0;
    for (std::size_t i = 0; i < size;) {
        std::uint64_t word = 0;
        const std::size_t step = std::min<std::size_t>(8, size - i);
        std::memcpy(&word, data + i, step);
        count += static_cast<std::size_t>(__builtin_popcountll(word));
        i += step;
    }
    return count;
}

std::size_t ternary_decode_add(const py::array& payload, py::array out, std::size_t block, double factor, bool byte_scales,
                               const std::optional<py::array>& base) {
    const auto in = bytes(payload, "payload");
    const auto target = mutable_floats(out, "out");
    const auto added_to = base ? floats(*base, "base") : Vector<const float>{target.data, target.size};
    const bool alike = base && added_to.size == 1;
    if (added_to.size != target.size && !alike) throw py::value_error("base and out differ in size");
    check_block(block);
    const std::size_t n = target.size, blocks = (n + block - 1) / block, runs = (blocks + kRun - 1) / kRun;
    const std::size_t head = scale_bytes(blocks, byte_scales), mask_bytes = (n + 7) / 8;
    if (in.size < head + mask_bytes)
        payload_error("a ternary payload of " + std::to_string(n) + " elements has at least " + std::to_string(head + mask_bytes) +
                      " bytes, not " + std::to_string(in.size));
    const std::uint8_t* mask = in.data + head;
    if (n % 8 && mask[mask_bytes - 1] >> (n % 8))
        payload_error("a ternary payload marks elements after its " + std::to_string(n) + "th");
    const std::size_t nonzeros = count_bits(mask, mask_bytes), signs_bytes = (nonzeros + 7) / 8;
    if (in.size != head + mask_bytes + signs_bytes)
        payload_error("a ternary payload of " + std::to_string(n) + " elements, " + std::to_string(nonzeros) + " of them not zero, has " +
                      std::to_string(head + mask_bytes + signs_bytes) + " bytes, not " + std::to_string(in.size));
    std::array<float, 64> one;
    if (alike) one.fill(added_to.data[0]);
    py::gil_scoped_release release;
    in_parallel(runs, 1, kRun * block, [&](std::size_t i, std::size_t begin, std::size_t end) {
        const std::size_t at = begin * kRun * block, size = std::min(n, end * kRun * block) - at;
        const std::uint8_t* scales = byte_scales ? in.data + runs + begin * kRun : in.data + 4 * begin * kRun;
        kernels->ternary_decode_add(target.data + at, alike ? one.data() : added_to.data + at, alike, size, block, static_cast<float>(factor),
                                    byte_scales, in.data + begin, scales, mask + at / 8, mask + mask_bytes, signs_bytes, i ? count_bits(mask, at / 8) : 0);
    });
    return nonzeros;
}

void check_levels(unsigned levels) {
    if (levels < 1 || levels >= 1u << 15) throw py::value_error("levels must be from 1 to 2^15 - 1");
}

unsigned level_bits(unsigned levels) { return 32u - static_cast<unsigned>(__builtin_clz(2 * levels)); }

constexpr std::size_t kByteBlocks = 8;  // so many blocks' codes end with a byte, whatever their width

py::tuple levels_encode(const py::array& x, std::size_t block, unsigned levels, std::uint64_t key, std::uint64_t first, bool l2) {
    const auto in = floats(x, "x");
    check_block(block);
    check_levels(levels);
    const std::size_t blocks = (in.size + block - 1) / block, width = level_bits(levels);
    py::array_t<std::uint8_t> payload(static_cast<py::ssize_t>(4 * blocks + (in.size * width + 7) / 8));
    std::uint8_t* out = payload.mutable_data();
    std::vector<double> noises(threads);
    {
        py::gil_scoped_release release;
        in_parallel(blocks, kByteBlocks, block, [&](std::size_t i, std::size_t begin, std::size_t end) {
            const std::size_t at = begin * block, size = std::min(in.size, end * block) - at;
            noises[i] = kernels->levels_encode(in.data + at, size, block, levels, key, first + begin, l2, out + 4 * begin,
                                               out + 4 * blocks + at * width / 8);
        });
    }
    double noise = 0;
    for (const double part : noises) noise += part;
    return py::make_tuple(payload, noise);
}

std::size_t levels_decode_add(const py::array& payload, py::array out, std::size_t block, unsigned levels, double factor) {
    const auto in = bytes(payload, "payload");
    const auto target = mutable_floats(out, "out");
    check_block(block);
    check_levels(levels);
    const std::size_t n = target.size, blocks = (n + block - 1) / block, width = level_bits(levels);
    const std::size_t wanted = 4 * blocks + (n * width + 7) / 8;
    if (in.size != wanted)
        payload_error("a payload of " + std::to_string(n) + " elements in " + std::to_string(2 * levels + 1) + " levels has " +
                      std::to_string(wanted) + " bytes, not " + std::to_string(in.size));
    const std::uint8_t* codes = in.data + 4 * blocks;
    const std::size_t codes_bytes = in.size - 4 * blocks;
    const std::uint32_t top = kernels->largest_code(codes, codes_bytes, n, static_cast<unsigned>(width));
    if (top > 2 * levels)
        payload_error("a payload of " + std::to_string(2 * levels + 1) + " levels has a code of " + std::to_string(top));
    std::vector<std::size_t> nonzeros(threads);
    py::gil_scoped_release release;
    in_parallel(blocks, kByteBlocks, block, [&](std::size_t i, std::size_t begin, std::size_t end) {
        const std::size_t at = begin * block, size = std::min(n, end * block) - at, from = at * width / 8;
        nonzeros[i] = kernels->levels_decode_add(target.data + at, size, block, levels, static_cast<float>(factor), in.data + 4 * begin,
                                                 codes + from, codes_bytes - from);
    });
    std::size_t total = 0;
    for (const std::size_t count : nonzeros) total += count;
    return total;
}

py::array_t<bool> draw_atoms(const py::array& magnitudes, double level, std::uint64_t key) {
    static_assert(sizeof(bool) == 1, "NumPy's bool is a byte");
    const auto in = floats(magnitudes, "magnitudes");
    py::array_t<bool> chosen(static_cast<py::ssize_t>(in.size));
    auto* out = reinterpret_cast<std::uint8_t*>(chosen.mutable_data());
    py::gil_scoped_release release;
    in_parallel(in.size, kPiece, 4, [&](std::size_t, std::size_t begin, std::size_t end) {
        kernels->draw_atoms(out + begin, in.data + begin, end - begin, level, key, begin);
    });
    return chosen;
}

struct Matrix {
    std::size_t rows, columns;
};

Matrix matrix_of(const py::array& array, const char* name) {
    if (array.ndim() != 2) throw py::value_error(std::string(name) + " must have two dimensions");
    return {static_cast<std::size_t>(array.shape(0)), static_cast<std::size_t>(array.shape(1))};
}

py::array_t<float> product(const py::array& a, const py::array& b) {
    const auto left = floats(a, "a"), right = floats(b, "b");
    const Matrix rows = matrix_of(a, "a"), columns = matrix_of(b, "b");
    if (rows.columns != columns.rows) throw py::value_error("the columns of a are not as many as the rows of b");
    py::array_t<float> out({rows.rows, columns.columns});
    float* total = out.mutable_data();
    py::gil_scoped_release release;
    std::vector<float> flushed(right.size);
    kernels->add_term(flushed.data(), right.data, 1.0f, true, right.size);
    in_parallel(rows.rows, 1, rows.columns * columns.columns, [&](std::size_t, std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i)
            kernels->product_row(total + i * columns.columns, left.data + i * rows.columns, flushed.data(), rows.columns, columns.columns);
    });
    return out;
}

void add_outer(py::array out, const py::array& u, const py::array& v) {
    const auto target = mutable_floats(out, "out");
    const auto left = floats(u, "u"), right = floats(v, "v");
    const Matrix matrix = matrix_of(out, "out");
    if (matrix.rows != left.size || matrix.columns != right.size) throw py::value_error("u and v are not of out's rows and columns");
    py::gil_scoped_release release;
    in_parallel(matrix.rows, 1, matrix.columns, [&](std::size_t, std::size_t begin, std::size_t end) {
        for (std::size_t i = begin; i < end; ++i) {
            float factor;
            kernels->add_term(&factor, left.data + i, 1.0f, true, 1);
            kernels->add_scaled(target.data + i * matrix.columns, right.data, factor, matrix.columns);
        }
    });
}

struct Sketch {
    std::size_t rows, columns, slots;
    std::vector<std::uint64_t> keys;
};

Sketch sketch_of(const py::array& table, std::size_t tile, const std::vector<std::uint64_t>& keys) {
    if (table.ndim() != 2) throw py::value_error("a sketch's table has two dimensions");
    Sketch sketch{static_cast<std::size_t>(table.shape(0)), static_cast<std::size_t>(table.shape(1)), 0, keys};
    if (!tile || tile & (tile - 1)) throw py::value_error("tile must be a power of two");
    if (!sketch.columns || sketch.columns % tile) throw py::value_error("columns must be a multiple of tile");
    if (keys.size() != sketch.rows || sketch.rows % 2 == 0) throw py::value_error("a sketch has an odd number of rows, and a key for each");
    sketch.slots = sketch.columns / tile;
    if (sketch.slots >> 32) throw py::value_error("a sketch has fewer than 2^32 slots");
    return sketch;
}

void sketch_accumulate(const py::array& x, std::size_t start, py::array table, std::size_t tile, const std::vector<std::uint64_t>& keys) {
    const auto in = floats(x, "x");
    const auto cells = mutable_floats(table, "table");
    const Sketch sketch = sketch_of(table, tile, keys);
    py::gil_scoped_release release;
    in_parallel(sketch.rows, 1, in.size, [&](std::size_t, std::size_t begin, std::size_t end) {
        kernels->sketch_accumulate(in.data, in.size, start, cells.data + begin * sketch.columns, end - begin, sketch.slots, tile,
                                   sketch.keys.data() + begin);
    });
}

py::array_t<float> sketch_estimate(std::size_t n, std::size_t start, const py::array& table, std::size_t tile,
                                   const std::vector<std::uint64_t>& keys) {
    const auto cells = floats(table, "table");
    const Sketch sketch = sketch_of(table, tile, keys);
    py::array_t<float> estimates = vector_of(n);
    float* out = estimates.mutable_data();
    py::gil_scoped_release release;
    in_parallel(n, kPiece, sketch.rows, [&](std::size_t, std::size_t begin, std::size_t end) {
        std::vector<float> buffer(sketch.rows * tile);
        kernels->sketch_estimate(out + begin, end - begin, start + begin, cells.data, sketch.rows, sketch.slots, tile, sketch.keys.data(),
                                 buffer.data());
    });
    return estimates;
}

constexpr unsigned kWidest = 56;  // bits of a packed integer: with those of a byte that is not full they fit into a word

void check_width(unsigned width) {
    if (width > kWidest) throw py::value_error("integers of more than 56 bits are not packed");
}

py::array_t<std::uint8_t> pack(const py::array& values, unsigned width) {
    const auto in = integers(values, "values");
    check_width(width);
    py::array_t<std::uint8_t> packed(static_cast<py::ssize_t>((in.size * width + 7) / 8));
    std::uint8_t* out = packed.mutable_data();
    py::gil_scoped_release release;
    const std::uint64_t low = (std::uint64_t{1} << width) - 1;
    std::uint64_t word = 0;
    unsigned filled = 0;
    for (std::size_t i = 0; i < in.size; ++i) {
        word |= (static_cast<std::uint64_t>(in.data[i]) & low) << filled;
        for (filled += width; filled >= 8; filled -= 8, word >>= 8) *out++ = static_cast<std::uint8_t>(word);
    }
    if (filled) *out = static_cast<std::uint8_t>(word);
    return packed;
}

py::array_t<std::int64_t> unpack(const py::array& payload, std::size_t count, unsigned width) {
    const auto in = bytes(payload, "payload");
    check_width(width);
    if (in.size < (count * width + 7) / 8) throw py::value_error("so many integers are not in a payload of " + std::to_string(in.size) + " bytes");
    py::array_t<std::int64_t> values(static_cast<py::ssize_t>(count));
    std::int64_t* out = values.mutable_data();
    py::gil_scoped_release release;
    const std::uint64_t low = (std::uint64_t{1} << width) - 1;
    const std::uint8_t* next = in.data;
    std::uint64_t word = 0;
    unsigned held = 0;
    for (std::size_t i = 0; i < count; ++i) {
        for (; held < width; held += 8) word |= static_cast<std::uint64_t>(*next++) << held;
        out[i] = static_cast<std::int64_t>(word & low);
        word >>= width;
        held -= width;
    }
    return values;
}

py::array_t<std::uint8_t> mark(const py::array& places, std::size_t n) {
    const auto in = integers(places, "places");
    for (std::size_t i = 0; i < in.size; ++i)
        if (in.data[i] < 0 || static_cast<std::size_t>(in.data[i]) >= n) throw py::index_error("a place is not among " + std::to_string(n));
    py::array_t<std::uint8_t> mask(static_cast<py::ssize_t>((n + 7) / 8));
    std::uint8_t* out = mask.mutable_data();
    py::gil_scoped_release release;
    std::memset(out, 0, (n + 7) / 8);
    for (std::size_t i = 0; i < in.size; ++i) out[in.data[i] / 8] |= static_cast<std::uint8_t>(1u << in.data[i] % 8);
    return mask;
}

py::array_t<std::int64_t> marked(const py::array& mask) {
    const auto in = bytes(mask, "mask");
    py::array_t<std::int64_t> places(static_cast<py::ssize_t>(count_bits(in.data, in.size)));
    std::int64_t* out = places.mutable_data();
    py::gil_scoped_release release;
    for (std::size_t i = 0; i < in.size; i += 8) {
        std::uint64_t word = 0;
        std::memcpy(&word, in.data + i, std::min<std::size_t>(8, in.size - i));
        for (; word; word &= word - 1) *out++ = static_cast<std::int64_t>(8 * i) + __builtin_ctzll(word);
    }
    return places;
}

// |x| as an integer, subnormal numbers being zero.
std::uint32_t magnitude_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits &= hvdcompress::kMagnitude;
    return bits < hvdcompress::kTiny ? 0 : bits;
}

// The k largest magnitudes: a sample says where they begin, one pass collects what is there, and those are put in order.
py::array_t<std::int64_t> top_k(const py::array& x, std::size_t k) {
    const auto in = floats(x, "x");
    k = std::min(k, in.size);
    // Not initialised: most of the room is never touched.
    std::unique_ptr<std::int64_t[]> places;
    {
        py::gil_scoped_release release;
        std::vector<std::uint32_t> sample;
        const std::size_t stride = std::max<std::size_t>(1, in.size >> 15);
        for (std::size_t i = 0; i < in.size; i += stride) sample.push_back(magnitude_of(in.data[i]));
        std::size_t rank = k / stride + k / stride / 8 + 32;  // in the sample, of a magnitude that more than k elements have
        const std::size_t room = std::min(in.size, 2 * k + (in.size >> 8) + 1024);
        std::unique_ptr<std::uint32_t[]> magnitudes(new std::uint32_t[room]);
        places.reset(new std::int64_t[std::max<std::size_t>(room, 1)]);
        std::size_t found = 0;
        for (; k; rank *= 4) {
            std::uint32_t least = 0;
            if (rank < sample.size()) {
                std::nth_element(sample.begin(), sample.begin() + static_cast<std::ptrdiff_t>(rank), sample.end(), std::greater<>());
                least = sample[rank];
            }
            found = kernels->at_least(in.data, in.size, least, magnitudes.get(), places.get(), room);
            if (found > room) {  // very many equal ones, of which the first are taken: no room is made for all of them
                found = kernels->at_least(in.data, in.size, least + 1, magnitudes.get(), places.get(), room);
                if (found > room) {
                    magnitudes.reset(new std::uint32_t[found]);
                    places.reset(new std::int64_t[found]);
                    kernels->at_least(in.data, in.size, least + 1, magnitudes.get(), places.get(), found);
                }
                if (found < k) {
                    std::size_t filled = found;
                    for (std::size_t i = 0; filled < k; ++i)
                        if (magnitude_of(in.data[i]) == least) places[filled++] = static_cast<std::int64_t>(i);
                    std::inplace_merge(places.get(), places.get() + found, places.get() + k);
                    found = k;
                }
            }
            if (found >= k) break;
        }
        if (k && found > k) {
            std::vector<std::uint32_t> ordered(magnitudes.get(), magnitudes.get() + found);
            std::nth_element(ordered.begin(), ordered.begin() + static_cast<std::ptrdiff_t>(k - 1), ordered.end(), std::greater<>());
            const std::uint32_t threshold = ordered[k - 1];
            std::size_t above = 0, kept = 0;
            for (std::size_t i = 0; i < found; ++i) above += magnitudes[i] > threshold;
            std::size_t equal = k - above;
            for (std::size_t i = 0; i < found; ++i) {  // without a branch, which none could foretell
                const bool is_equal = (magnitudes[i] == threshold) & (equal > 0);
                equal -= is_equal;
                places[kept] = places[i];
                kept += (magnitudes[i] > threshold) | is_equal;
            }
        }
    }
    return py::array_t<std::int64_t>(static_cast<py::ssize_t>(k), places.get());
}

void choose(const std::string& name) {
    for (const Kernels* found : available())
        if (name == found->name) {
            kernels = found;
            return;
        }
    throw py::value_error("this machine has no instruction set " + name);
}

}  // namespace

PYBIND11_MODULE(_native, m) {
    kernels = available().back();
    m.def("all_finite", &all_finite);
    m.def("sum_of_squares", &sum_of_squares);
    m.def("weighted_sum", &weighted_sum);
    m.def("divide", &divide);
    using py::operator""_a;
    m.def("ternary_encode", &ternary_encode, "x"_a, "block"_a, "key"_a, "first"_a, "byte_scales"_a, "l2"_a = false,
          "minus"_a = py::none());
    m.def("ternary_decode_add", &ternary_decode_add, "payload"_a, "out"_a, "block"_a, "factor"_a, "byte_scales"_a, "base"_a = py::none());
    m.def("levels_encode", &levels_encode);
    m.def("levels_decode_add", &levels_decode_add);
    m.def("draw_atoms", &draw_atoms);
    m.def("product", &product);
    m.def("add_outer", &add_outer);
    m.def("sketch_accumulate", &sketch_accumulate);
    m.def("sketch_estimate", &sketch_estimate);
    m.def("top_k", &top_k);
    m.def("pack", &pack);
    m.def("unpack", &unpack);
    m.def("mark", &mark);
    m.def("marked", &marked);
    m.def("instruction_sets", [] {
        py::list names;
        for (const Kernels* found : available()) names.append(found->name);
        return names;
    });
    m.def("instruction_set", [] { return kernels->name; });
    m.def("choose", &choose);
    m.def("set_threads", [](std::size_t n) { threads = std::max<std::size_t>(1, n); });
}
