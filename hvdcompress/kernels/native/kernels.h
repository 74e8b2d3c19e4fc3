// What one instruction set offers: the same functions, compiled once for each of them, on raw pointers.
// hvdcompress/kernels/numpy.py is the definition of each; the bytes are the same.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hvdcompress {

constexpr std::size_t kRun = 16;         // blocks that share one base octave when scales are bytes
constexpr std::uint32_t kExponent = 0x7f800000u;
constexpr std::uint32_t kMagnitude = 0x7fffffffu;
constexpr std::uint32_t kTiny = 0x00800000u;  // the smallest normal float32

struct Kernels {
    const char* name;
    bool (*all_finite)(const float* x, std::size_t n);
    double (*sum_of_squares)(const float* x, std::size_t n);
    // out[i] = flush(flush(factor * flush(x[i])) + out[i]); the first term is stored, not added.
    void (*add_term)(float* out, const float* x, float factor, bool first, std::size_t n);
    void (*divide)(float* out, const float* x, float divisor, std::size_t n);
    // Scales and mask of n elements, whole runs of blocks but for the last; the signs go to `signs`, the expected squared error
    // to `noise`. Returns the number of signs. If there is `minus` it is taken off x, by way of `difference`, which has a run's size.
    std::size_t (*ternary_encode)(const float* x, const float* minus, float* difference, std::size_t n, std::size_t block, std::uint64_t key, std::uint64_t first,
                                  bool byte_scales, bool l2, std::uint8_t* heads, std::uint8_t* scales, std::uint8_t* mask,
                                  std::uint8_t* signs, double* noise);
    // out = base, which may be out itself, plus n decoded elements; the first is the start of a run, its sign is bit `sign` of
    // `signs`. If the base's elements are all alike it has 64 of them.
    void (*ternary_decode_add)(float* out, const float* base, bool alike, std::size_t n, std::size_t block, float factor,
                               bool byte_scales, const std::uint8_t* heads, const std::uint8_t* scales, const std::uint8_t* mask,
                               const std::uint8_t* signs, std::size_t signs_bytes, std::size_t sign);
    // Adds x, which lies at `start` in the whole vector, to rows of a sketch, of `slots` times `tile` cells each.
    void (*sketch_accumulate)(const float* x, std::size_t n, std::size_t start, float* table, std::size_t rows, std::size_t slots,
                              std::size_t tile, const std::uint64_t* keys);
    // The medians over rows of elements start ... start + n. `buffer` has rows * tile floats.
    void (*sketch_estimate)(float* out, std::size_t n, std::size_t start, const float* table, std::size_t rows, std::size_t slots,
                            std::size_t tile, const std::uint64_t* keys, float* buffer);
    // Places and magnitudes of the elements of at least `least` (as an integer), at most `room` of them; returns how many there are.
    std::size_t (*at_least)(const float* x, std::size_t n, std::uint32_t least, std::uint32_t* magnitudes, std::int64_t* places,
                            std::size_t room);
    // Norms and codes of whole blocks but for the last; the first code begins with a byte. Returns the expected squared error.
    double (*levels_encode)(const float* x, std::size_t n, std::size_t block, unsigned levels, std::uint64_t key, std::uint64_t first,
                          bool l2, std::uint8_t* norms, std::uint8_t* codes);
    // The largest of n codes, which begin with a byte.
    std::uint32_t (*largest_code)(const std::uint8_t* codes, std::size_t bytes, std::size_t n, unsigned width);
    // Adds n decoded elements to out; returns how many are not zero. The codes are known to be in range.
    std::size_t (*levels_decode_add)(float* out, std::size_t n, std::size_t block, unsigned levels, float factor,
                                     const std::uint8_t* norms, const std::uint8_t* codes, std::size_t codes_bytes);
    // chosen[i]: whether atom i of `level` is drawn. The first is element `place` of the two blocks of draws.
    void (*draw_atoms)(std::uint8_t* chosen, const float* magnitudes, std::size_t n, double level, std::uint64_t key, std::size_t place);
    // One row of a product: out[j] = sum over i of a[i] b[i][j], in order; b is flushed.
    void (*product_row)(float* out, const float* a, const float* b, std::size_t inner, std::size_t n);
    // out[i] = flush(flush(out[i]) + flush(factor * flush(x[i])))
    void (*add_scaled)(float* out, const float* x, float factor, std::size_t n);
};

extern const Kernels baseline, avx2, avx512;

}  // namespace hvdcompress
