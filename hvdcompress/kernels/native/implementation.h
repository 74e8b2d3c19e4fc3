// The kernels, once for each instruction set: the file that includes this one has set the target and `HVDCOMPRESS_ISA`.
// Nothing from the standard library's templates is used here, so no code for one instruction set can end up in another.
// Compiled without contraction: float arithmetic rounds after each operation, as NumPy's does.

namespace hvdcompress {
namespace {

inline std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of(std::uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

inline float flush(float x) {  // subnormal numbers and -0 are +0
    const std::uint32_t bits = bits_of(x);
    return float_of(bits & kExponent ? bits : 0u);
}

inline std::size_t smaller(std::size_t a, std::size_t b) { return a < b ? a : b; }

// Bits, least significant first

struct BitWriter {
    std::uint8_t* out;
    std::uint64_t pending = 0;
    unsigned count = 0;

    void put(std::uint64_t bits, unsigned n) {  // n <= 64, the bits above are zero
        pending |= bits << count;
        if (count + n >= 64) {
            __builtin_memcpy(out, &pending, 8);
            out += 8;
            pending = count ? bits >> (64 - count) : 0;
            count = count + n - 64;
            if (!count) pending = 0;
        } else {
            count += n;
        }
    }
    void flush() {
        for (; count; pending >>= 8, count = count > 8 ? count - 8 : 0) *out++ = static_cast<std::uint8_t>(pending);
    }
};

// n <= 64 bits from bit `at` on; none beyond `bytes` bytes is read.
inline std::uint64_t get_bits(const std::uint8_t* in, std::size_t bytes, std::size_t at, unsigned n) {
    if (!n) return 0;
    const std::size_t byte = at / 8, left = bytes - byte;
    const unsigned shift = at % 8;
    std::uint64_t low = 0, high = 0;
    if (left >= 9) {
        __builtin_memcpy(&low, in + byte, 8);
        high = in[byte + 8];
    } else {
        for (std::size_t i = 0; i < left && i < 8; ++i) low |= std::uint64_t{in[byte + i]} << (8 * i);
    }
    std::uint64_t bits = low >> shift;
    if (shift) bits |= high << (64 - shift);
    return n == 64 ? bits : bits & ((std::uint64_t{1} << n) - 1);
}

// The bits of `bits` where `mask` is set, moved together; and back.
inline std::uint64_t extract(std::uint64_t bits, std::uint64_t mask) {
#ifdef __BMI2__
    return _pext_u64(bits, mask);
#else
    std::uint64_t out = 0;
    for (unsigned k = 0; mask; mask &= mask - 1, ++k) out |= ((bits >> __builtin_ctzll(mask)) & 1u) << k;
    return out;
#endif
}

inline std::uint64_t deposit(std::uint64_t bits, std::uint64_t mask) {
#ifdef __BMI2__
    return _pdep_u64(bits, mask);
#else
    std::uint64_t out = 0;
    for (; mask; mask &= mask - 1, bits >>= 1) out |= (bits & 1u) ? mask & -mask : 0;
    return out;
#endif
}

// Scales

constexpr std::uint32_t kEighths[8] = {0x3f0b95c2, 0x3f1837f0, 0x3f25fed7, 0x3f3504f3,
                                       0x3f45672a, 0x3f5744fd, 0x3f6ac0c7, 0x3f800000};  // 2^(-7/8) ... 2^0

// The least e with maximum <= 2^(e/8), for a normal maximum.
inline int eighths_of(float maximum) {
    const std::uint32_t bits = bits_of(maximum);
    const int octave = static_cast<int>(bits >> 23) - 126;
    const std::uint32_t mantissa = (bits & 0x007fffffu) | (126u << 23);  // of [1/2, 1)
    if (mantissa == 0x3f000000u) return 8 * octave - 8;
    int step = 0;
    while (kEighths[step] < mantissa) ++step;
    return 8 * octave + step - 7;
}

inline float byte_scale(std::uint8_t head, std::uint8_t code) {
    if (!code) return 0.0f;
    if (!head) return float_of(0x7fc00000u);
    const int e = (static_cast<int>(head) - 127) * 8 + code - 255 - 1;
    const int octave = (e >= 0 ? e / 8 : -((7 - e) / 8)), step = e - 8 * octave;
    // kEighths[step] * 2^(octave + 1); from 2^-126 to the largest float
    const std::uint32_t bits = kEighths[step];
    const int exponent = static_cast<int>(bits >> 23) + octave + 1;
    if (exponent < 1) return float_of(kTiny);
    if (exponent > 254) return float_of(0x7f7fffffu);
    return float_of((bits & 0x007fffffu) | static_cast<std::uint32_t>(exponent) << 23);
}

// The scales of one run, from its blocks' maxima: what is written, and what a decoder will read, in place.
inline void encode_scales(float* maxima, std::size_t blocks, bool byte_scales, std::uint8_t* head, std::uint8_t* scales) {
    if (!byte_scales) {
        for (std::size_t b = 0; b < blocks; ++b) {
            std::uint32_t bits = bits_of(maxima[b]);
            __builtin_memcpy(scales + 4 * b, &bits, 4);
        }
        return;
    }
    int top = 0, eighths[kRun];
    bool any = false, broken = false;
    for (std::size_t b = 0; b < blocks; ++b) {
        broken |= maxima[b] != maxima[b];
        if (!(maxima[b] > 0)) continue;
        eighths[b] = eighths_of(maxima[b]);
        top = !any || eighths[b] > top ? eighths[b] : top;
        any = true;
    }
    const int base = top >= 0 ? (top + 7) / 8 : -(-top / 8);
    *head = !any || broken ? 0 : static_cast<std::uint8_t>(base + 127);
    for (std::size_t b = 0; b < blocks; ++b) {
        if (broken) {
            scales[b] = 255;
        } else if (maxima[b] > 0) {
            const int code = eighths[b] - 8 * base + 255;
            scales[b] = static_cast<std::uint8_t>(code < 1 ? 1 : code);
        } else {
            scales[b] = 0;
        }
        maxima[b] = byte_scale(*head, scales[b]);
    }
}

inline float read_scale(const std::uint8_t* heads, const std::uint8_t* scales, std::size_t b, bool byte_scales) {
    if (byte_scales) return byte_scale(heads[b / kRun], scales[b]);
    std::uint32_t bits;
    __builtin_memcpy(&bits, scales + 4 * b, 4);
    return flush(float_of(bits));
}

// max|x| as an integer; magnitudes are in the same order, NaN above infinity above all others.
inline std::uint32_t largest(const float* x, std::size_t n) {
    std::uint32_t top = 0;
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t bits = bits_of(x[i]) & kMagnitude;
        top = bits > top ? bits : top;
    }
    return top;
}

// max|x|, zero where it is subnormal, NaN where an element is not finite.
inline float maximum(const float* x, std::size_t n) {
    const std::uint32_t top = largest(x, n);
    return top >= kExponent ? float_of(0x7fc00000u) : top < kTiny ? 0.0f : float_of(top);
}

constexpr std::size_t kLanes = 16;  // sums in so many parts, so that they vectorise

// ||x||, zero where it is subnormal, NaN where it or an element is not finite.
inline float euclidean(const float* x, std::size_t n) {
    double lanes[kLanes] = {}, total = 0;
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (std::size_t k = 0; k < kLanes; ++k) {
            const double value = flush(x[i + k]);
            lanes[k] += value * value;
        }
    for (std::size_t k = 0; i + k < n; ++k) {
        const double value = flush(x[i + k]);
        lanes[k] += value * value;
    }
    for (std::size_t k = 0; k < kLanes; ++k) total += lanes[k];
    const std::uint32_t bits = bits_of(static_cast<float>(__builtin_sqrt(total)));
    return bits >= kExponent ? float_of(0x7fc00000u) : bits < kTiny ? 0.0f : float_of(bits);
}

inline void block_norms(float* norms, const float* x, std::size_t n, std::size_t block, std::size_t blocks, bool l2) {
    for (std::size_t b = 0; b < blocks; ++b) {
        const std::size_t size = smaller(block, n - b * block);
        norms[b] = l2 ? euclidean(x + b * block, size) : maximum(x + b * block, size);
    }
}

// Draws

constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15ull;

inline std::uint64_t block_key(std::uint64_t key, std::uint64_t number) {
    std::uint64_t z = key + (number + 1) * kGolden;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

// The draw of an element at `place` of a block; `choose` has it again in vectors.
inline float uniform(std::uint64_t key, std::uint32_t place) {
    std::uint32_t h = (place * 0x9E3779B1u) ^ static_cast<std::uint32_t>(key);
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= static_cast<std::uint32_t>(key >> 32);
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    h ^= h >> 16;
    return static_cast<float>(static_cast<std::int32_t>(h >> 9)) * 0x1p-23f + 0x1p-24f;
}

struct Chosen {
    std::uint64_t mask, negative;  // bit i: element i is not zero; it is negative
};

#if defined(__AVX512F__)
// `uniform` of 16 elements, the first of them at `place`.
inline __m512 uniforms(std::uint64_t key, std::uint32_t place) {
    const __m512i lanes = _mm512_mullo_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(static_cast<int>(0x9E3779B1u)));
    __m512i h = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(place * 0x9E3779B1u)));
    h = _mm512_xor_si512(h, _mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(key))));
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 16));
    h = _mm512_mullo_epi32(h, _mm512_set1_epi32(static_cast<int>(0x85EBCA6Bu)));
    h = _mm512_xor_si512(h, _mm512_set1_epi32(static_cast<int>(static_cast<std::uint32_t>(key >> 32))));
    h = _mm512_xor_si512(h, _mm512_srli_epi32(h, 13));
    h = _mm512_mullo_epi32(h, _mm512_set1_epi32(static_cast<int>(0xC2B2AE35u)));
    h = _mm512_srli_epi32(_mm512_xor_si512(h, _mm512_srli_epi32(h, 16)), 9);
    return _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(h), _mm512_set1_ps(0x1p-23f)), _mm512_set1_ps(0x1p-24f));
}

// Magnitudes of 16 elements, subnormal numbers being zero.
inline __m512i magnitudes_of(__m512i bits) {
    const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(kMagnitude));
    return _mm512_maskz_mov_epi32(_mm512_cmpge_epu32_mask(size, _mm512_set1_epi32(kTiny)), size);
}

inline __mmask16 first_lanes(std::size_t n) { return n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1); }
#endif

// Up to 64 elements of a block with scale `scale`, the first of them the block's element `place`.
inline Chosen choose(const float* x, unsigned n, float scale, std::uint64_t key, std::uint32_t place) {
    [[maybe_unused]] const std::uint32_t low = static_cast<std::uint32_t>(key), high = static_cast<std::uint32_t>(key >> 32);
    std::uint64_t mask = 0, negative = 0;
#if defined(__AVX512F__)
    for (unsigned i = 0; i < n; i += 16) {
        const __mmask16 live = first_lanes(n - i);
        const __m512i bits = _mm512_maskz_loadu_epi32(live, x + i), size = magnitudes_of(bits);
        const __m512 u = uniforms(key, place + i);
        const __mmask16 not_chosen = _mm512_cmp_ps_mask(_mm512_mul_ps(u, _mm512_set1_ps(scale)), _mm512_castsi512_ps(size), _CMP_GE_OQ);
        const __mmask16 below = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_setzero_ps(), _CMP_LT_OQ);
        mask |= std::uint64_t{static_cast<std::uint16_t>(~not_chosen & live)} << i;
        negative |= std::uint64_t{below} << i;
    }
#elif defined(__AVX2__)
    const __m256i lanes =
        _mm256_mullo_epi32(_mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0), _mm256_set1_epi32(static_cast<int>(0x9E3779B1u)));
    alignas(32) float padded[8];
    for (unsigned i = 0; i < n; i += 8) {
        const float* from = x + i;
        unsigned live = 0xff;
        if (n - i < 8) {
            for (unsigned k = 0; k < 8; ++k) padded[k] = k < n - i ? x[i + k] : 0.0f;
            from = padded;
            live = (1u << (n - i)) - 1;
        }
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        __m256i h = _mm256_add_epi32(lanes, _mm256_set1_epi32(static_cast<int>((place + i) * 0x9E3779B1u)));
        h = _mm256_xor_si256(h, _mm256_set1_epi32(static_cast<int>(low)));
        h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 16));
        h = _mm256_mullo_epi32(h, _mm256_set1_epi32(static_cast<int>(0x85EBCA6Bu)));
        h = _mm256_xor_si256(h, _mm256_set1_epi32(static_cast<int>(high)));
        h = _mm256_xor_si256(h, _mm256_srli_epi32(h, 13));
        h = _mm256_mullo_epi32(h, _mm256_set1_epi32(static_cast<int>(0xC2B2AE35u)));
        h = _mm256_srli_epi32(_mm256_xor_si256(h, _mm256_srli_epi32(h, 16)), 9);
        const __m256 u = _mm256_add_ps(_mm256_mul_ps(_mm256_cvtepi32_ps(h), _mm256_set1_ps(0x1p-23f)), _mm256_set1_ps(0x1p-24f));
        __m256i size = _mm256_and_si256(bits, _mm256_set1_epi32(kMagnitude));
        size = _mm256_and_si256(size, _mm256_cmpgt_epi32(size, _mm256_set1_epi32(kTiny - 1)));
        const __m256 not_chosen = _mm256_cmp_ps(_mm256_mul_ps(u, _mm256_set1_ps(scale)), _mm256_castsi256_ps(size), _CMP_GE_OQ);
        const __m256 below = _mm256_cmp_ps(_mm256_castsi256_ps(bits), _mm256_setzero_ps(), _CMP_LT_OQ);
        mask |= std::uint64_t{~static_cast<unsigned>(_mm256_movemask_ps(not_chosen)) & live} << i;
        negative |= std::uint64_t{static_cast<unsigned>(_mm256_movemask_ps(below))} << i;
    }
#else
    for (unsigned i = 0; i < n; ++i) {
        const float u = uniform(key, place + i);
        const float size = flush(float_of(bits_of(x[i]) & kMagnitude));
        mask |= std::uint64_t{!(u * scale >= size)} << i;
        negative |= std::uint64_t{x[i] < 0.0f} << i;
    }
#endif
    return {mask, negative & mask};
}

double sum_of_squares(const float* x, std::size_t n) {
    double parts[kLanes] = {}, total = 0;
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (std::size_t k = 0; k < kLanes; ++k) parts[k] += static_cast<double>(x[i + k]) * x[i + k];
    for (; i < n; ++i) total += static_cast<double>(x[i]) * x[i];
    for (std::size_t k = 0; k < kLanes; ++k) total += parts[k];
    return total;
}

// The sum of |x| (scale - |x|): the variance of what is drawn for a block with that scale.
inline double variance(const float* x, std::size_t n, float scale) {
    if (scale == 0.0f) return 0;
    const float unit = 1.0f / scale;
    auto of = [&](float y) {
        const float size = float_of(bits_of(y) & kMagnitude);
        return size * unit * ((scale - size) * unit);  // not p (1 - p): near the scale 1 - p has few digits left
    };
    float parts[kLanes] = {}, total = 0;
    std::size_t i = 0;
    for (; i + kLanes <= n; i += kLanes)
        for (std::size_t k = 0; k < kLanes; ++k) parts[k] += of(x[i + k]);
    for (; i < n; ++i) total += of(x[i]);
    for (std::size_t k = 0; k < kLanes; ++k) total += parts[k];
    return static_cast<double>(total) * scale * scale;
}

// What weighted_sum makes of x and -y.
inline void subtract(float* __restrict out, const float* __restrict x, const float* __restrict y, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) out[i] = flush(flush(x[i]) - flush(y[i]));
}

std::size_t ternary_encode(const float* x, const float* minus, float* difference, std::size_t n, std::size_t block, std::uint64_t key, std::uint64_t first,
                           bool byte_scales, bool l2, std::uint8_t* heads, std::uint8_t* scales, std::uint8_t* mask,
                           std::uint8_t* signs, double* noise) {
    *noise = 0;
    BitWriter masks{mask}, negatives{signs};
    std::size_t nonzeros = 0;
    float run[kRun];
    const std::size_t blocks = (n + block - 1) / block;
    for (std::size_t start = 0; start < blocks; start += kRun) {
        const std::size_t in_run = smaller(kRun, blocks - start), left = n - start * block;
        const float* from = x + start * block;
        if (minus) {
            const std::size_t size = smaller(in_run * block, left);
            subtract(difference, from, minus + start * block, size);
            from = difference;
        }
        block_norms(run, from, left, block, in_run, l2);
        encode_scales(run, in_run, byte_scales, heads + start / kRun, scales + start * (byte_scales ? 1 : 4));
        for (std::size_t b = 0; b < in_run; ++b) {
            const std::size_t at = b * block, size = smaller(block, left - at);
            *noise += variance(from + at, size, run[b]);
            const std::uint64_t draws = block_key(key, first + start + b);
            for (std::size_t place = 0; place < size; place += 64) {
                const unsigned count = static_cast<unsigned>(smaller(64, size - place));
                Chosen chosen{0, 0};
                if (run[b] != 0.0f) chosen = choose(from + at + place, count, run[b], draws, static_cast<std::uint32_t>(place));
                const unsigned taken = static_cast<unsigned>(__builtin_popcountll(chosen.mask));
                masks.put(chosen.mask, count);
                negatives.put(extract(chosen.negative, chosen.mask), taken);
                nonzeros += taken;
            }
        }
    }
    masks.flush();
    negatives.flush();
    return nonzeros;
}

[[maybe_unused]] inline void add_one_by_one(float* out, float step, std::uint64_t mask, std::uint64_t negative) {
    for (; mask; mask &= mask - 1) {
        const unsigned i = static_cast<unsigned>(__builtin_ctzll(mask));
        out[i] = flush(flush(out[i]) + ((negative >> i) & 1u ? -step : step));
    }
}

constexpr std::size_t kPastCache = 1 << 16;  // elements of a vector that is written past the cache, not to be read into it first

// base, n <= 64 elements, with +-step added to those of `mask`; base may be out itself.
inline void add_steps(float* out, const float* base, unsigned n, float step, std::uint64_t mask, std::uint64_t negative,
                      [[maybe_unused]] bool past_cache) {
    const bool in_place = base == out;
#if defined(__AVX512F__)
    const __m512 plus = _mm512_set1_ps(step), minus = _mm512_set1_ps(-step);
    const __m512i exponent = _mm512_set1_epi32(kExponent);
    for (unsigned i = 0; i < n; i += 16) {
        const __mmask16 live = static_cast<__mmask16>(mask >> i);
        if (!live && in_place) continue;
        const __mmask16 there = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
        const __m512i before = _mm512_maskz_loadu_epi32(in_place ? live : there, base + i);
        __m512i y = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(before, exponent), before);
        const __m512 steps = _mm512_mask_mov_ps(plus, static_cast<__mmask16>(negative >> i), minus);
        y = _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(y), steps));
        y = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(y, exponent), y);
        y = _mm512_mask_mov_epi32(before, live, y);
        if (past_cache && there == 0xffff && reinterpret_cast<std::uintptr_t>(out + i) % 64 == 0)
            _mm512_stream_si512(reinterpret_cast<__m512i*>(out + i), y);
        else
            _mm512_mask_storeu_epi32(out + i, in_place ? live : there, y);
    }
#elif defined(__AVX2__)
    const __m256i bit = _mm256_set_epi32(128, 64, 32, 16, 8, 4, 2, 1), exponent = _mm256_set1_epi32(kExponent);
    const __m256i sign = _mm256_set1_epi32(static_cast<int>(0x80000000u));
    auto lanes = [&](std::uint64_t bits) {
        return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits & 0xff)), bit), bit);
    };
    auto flushed = [&](__m256i y) {
        return _mm256_andnot_si256(_mm256_cmpeq_epi32(_mm256_and_si256(y, exponent), _mm256_setzero_si256()), y);
    };
    // Whole vectors are loaded, blended and stored: masked stores are slow on some processors.
    unsigned i = 0;
    for (; i + 8 <= n; i += 8) {
        if (!((mask >> i) & 0xff) && in_place) continue;
        const __m256i before = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(base + i));
        const __m256 steps = _mm256_xor_ps(_mm256_set1_ps(step), _mm256_castsi256_ps(_mm256_and_si256(lanes(negative >> i), sign)));
        const __m256i sum = flushed(_mm256_castps_si256(_mm256_add_ps(_mm256_castsi256_ps(flushed(before)), steps)));
        const __m256i y = _mm256_blendv_epi8(before, sum, lanes(mask >> i));
        if (past_cache && reinterpret_cast<std::uintptr_t>(out + i) % 32 == 0)
            _mm256_stream_si256(reinterpret_cast<__m256i*>(out + i), y);
        else
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), y);
    }
    mask = i < 64 ? mask >> i << i : 0;
    if (!in_place) __builtin_memcpy(out + i, base + i, (n - i) * sizeof(float));
    add_one_by_one(out, step, mask, negative);
#else
    if (!in_place) __builtin_memcpy(out, base, n * sizeof(float));
    add_one_by_one(out, step, mask, negative);
#endif
}

void ternary_decode_add(float* out, const float* base, bool alike, std::size_t n, std::size_t block, float factor, bool byte_scales,
                        const std::uint8_t* heads, const std::uint8_t* scales, const std::uint8_t* mask, const std::uint8_t* signs,
                        std::size_t signs_bytes, std::size_t sign) {
    const std::size_t mask_bytes = (n + 7) / 8;
    const bool past_cache = base != out && n >= kPastCache;
    for (std::size_t b = 0, at = 0; at < n; ++b, at += block) {
        const std::size_t size = smaller(block, n - at);
        const float step = flush(factor * read_scale(heads, scales, b, byte_scales));
        for (std::size_t place = 0; place < size; place += 64) {
            const unsigned count = static_cast<unsigned>(smaller(64, size - place));
            const std::uint64_t chosen = get_bits(mask, mask_bytes, at + place, count);
            if (!chosen && base == out) continue;
            const unsigned taken = static_cast<unsigned>(__builtin_popcountll(chosen));
            add_steps(out + at + place, alike ? base : base + at + place, count, step, chosen, deposit(get_bits(signs, signs_bytes, sign, taken), chosen), past_cache);
            sign += taken;
        }
    }
#if defined(__AVX2__)
    if (past_cache) _mm_sfence();
#endif
}

// Levels

inline unsigned width_of(unsigned levels) { return 32u - static_cast<unsigned>(__builtin_clz(2 * levels)); }

inline float read_norm(const std::uint8_t* norms, std::size_t b) { return read_scale(nullptr, norms, b, false); }

struct Place {  // of an element among the levels
    int whole;
    float fraction;
};

inline Place place_of(float magnitude, float norm, float levels) {
    const float at = flush(magnitude) / norm * levels;
    const int whole = static_cast<int>(at);
    return {whole, at - static_cast<float>(whole)};
}

// Codes of n <= 64 elements of a block with a norm that is a positive number, the first of them the block's element `place`.
// Returns the sum of f (1 - f) over their fractions f.
inline double round_to_levels(std::int32_t* codes, const float* x, unsigned n, float norm, float levels, std::uint64_t key,
                              std::uint32_t place) {
#if defined(__AVX512F__)
    __m512 variances = _mm512_setzero_ps();
    for (unsigned i = 0; i < n; i += 16) {
        const __mmask16 live = first_lanes(n - i);
        const __m512i bits = _mm512_maskz_loadu_epi32(live, x + i);
        const __m512 at = _mm512_mul_ps(_mm512_div_ps(_mm512_castsi512_ps(magnitudes_of(bits)), _mm512_set1_ps(norm)), _mm512_set1_ps(levels));
        const __m512i whole = _mm512_cvttps_epi32(at);
        const __m512 fraction = _mm512_sub_ps(at, _mm512_cvtepi32_ps(whole));
        variances = _mm512_add_ps(variances, _mm512_mul_ps(fraction, _mm512_sub_ps(_mm512_set1_ps(1.0f), fraction)));
        const __mmask16 up = _mm512_cmp_ps_mask(uniforms(key, place + i), fraction, _CMP_LT_OQ);
        const __m512i code = _mm512_mask_add_epi32(whole, up, whole, _mm512_set1_epi32(1));
        const __mmask16 below = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_setzero_ps(), _CMP_LT_OQ);
        _mm512_mask_storeu_epi32(codes + i, live, _mm512_mask_sub_epi32(code, below, _mm512_setzero_si512(), code));
    }
    return _mm512_reduce_add_ps(variances);
#else
    float variances[kLanes] = {}, total = 0;
    for (unsigned i = 0; i < n; ++i) {
        const float u = uniform(key, place + i);
        const Place at = place_of(float_of(bits_of(x[i]) & kMagnitude), norm, levels);
        const std::int32_t code = at.whole + (u < at.fraction ? 1 : 0);
        codes[i] = x[i] < 0.0f ? -code : code;
        variances[i % kLanes] += at.fraction * (1.0f - at.fraction);
    }
    for (std::size_t k = 0; k < kLanes; ++k) total += variances[k];
    return total;
#endif
}

// In each byte, or in each pair of bytes, the low bits that a code has.
inline std::uint64_t low_bits(unsigned width) {
    return width <= 8 ? 0x0101010101010101ull * ((1u << width) - 1) : 0x0001000100010001ull * ((1u << width) - 1);
}

// Writes n <= 64 codes, which are not negative, of `width` <= 16 bits.
inline void put_codes(BitWriter& out, const std::int32_t* codes, unsigned n, unsigned width) {
    unsigned i = 0;
#if defined(__AVX512F__)
    const std::uint64_t low = low_bits(width);
    std::uint64_t words[4];
    for (; i + 16 <= n; i += 16) {
        const __m512i sixteen = _mm512_loadu_si512(codes + i);
        if (width <= 8) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(words), _mm512_cvtepi32_epi8(sixteen));
            for (unsigned k = 0; k < 2; ++k) out.put(_pext_u64(words[k], low), 8 * width);
        } else {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(words), _mm512_cvtepi32_epi16(sixteen));
            for (unsigned k = 0; k < 4; ++k) out.put(_pext_u64(words[k], low), 4 * width);
        }
    }
#endif
    for (; i < n; ++i) out.put(static_cast<std::uint32_t>(codes[i]), width);
}

double levels_encode(const float* x, std::size_t n, std::size_t block, unsigned levels, std::uint64_t key, std::uint64_t first,
                     bool l2, std::uint8_t* norms, std::uint8_t* codes) {
    BitWriter out{codes};
    std::int32_t drawn[64];
    const unsigned width = width_of(levels);
    double noise = 0;
    for (std::size_t b = 0, at = 0; at < n; ++b, at += block) {
        const std::size_t size = smaller(block, n - at);
        float norm;
        block_norms(&norm, x + at, size, block, 1, l2);
        const std::uint32_t bits = bits_of(norm);
        __builtin_memcpy(norms + 4 * b, &bits, 4);
        const std::uint64_t draws = block_key(key, first + b);
        double variances = 0;
        for (std::size_t place = 0; place < size; place += 64) {
            const unsigned count = static_cast<unsigned>(smaller(64, size - place));
            const float* part = x + at + place;
            if (norm > 0) {
                variances += round_to_levels(drawn, part, count, norm, static_cast<float>(levels), draws, static_cast<std::uint32_t>(place));
            } else {
                const std::int32_t all = norm == 0.0f ? 0 : static_cast<std::int32_t>(levels);
                for (unsigned i = 0; i < count; ++i) drawn[i] = part[i] < 0.0f ? -all : all;
            }
            for (unsigned i = 0; i < count; ++i) drawn[i] += static_cast<std::int32_t>(levels);
            put_codes(out, drawn, count, width);
        }
        const double unit = static_cast<double>(norm) / levels;
        if (norm > 0) noise += unit * unit * variances;
    }
    out.flush();
    return noise;
}

// n <= 64 codes of `width` <= 16 bits, from the code `at` on: as many at a time as 64 bits hold.
inline void unpack_codes(std::int32_t* out, const std::uint8_t* codes, std::size_t bytes, std::size_t at, unsigned n, unsigned width) {
    unsigned i = 0;
#if defined(__AVX2__)
    const std::uint64_t low = low_bits(width);
    if (width <= 8) {
        for (; i + 8 <= n; i += 8) {
            const std::uint64_t eight = _pdep_u64(get_bits(codes, bytes, (at + i) * width, 8 * width), low);
            const __m256i wide = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(eight)));
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), wide);
        }
    }
#endif
    const unsigned each = 64 / width;
    const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
    for (; i < n; i += each) {
        const unsigned count = static_cast<unsigned>(smaller(each, n - i));
        std::uint64_t bits = get_bits(codes, bytes, (at + i) * width, count * width);
        for (unsigned k = 0; k < count; ++k) out[i + k] = static_cast<std::int32_t>(bits >> (k * width) & mask);
    }
}

std::uint32_t largest_code(const std::uint8_t* codes, std::size_t bytes, std::size_t n, unsigned width) {
    std::int32_t unpacked[64], top = 0;
    for (std::size_t at = 0; at < n; at += 64) {
        const unsigned count = static_cast<unsigned>(smaller(64, n - at));
        unpack_codes(unpacked, codes, bytes, at, count, width);
        for (unsigned i = 0; i < count; ++i) top = unpacked[i] > top ? unpacked[i] : top;
    }
    return static_cast<std::uint32_t>(top);
}

std::size_t levels_decode_add(float* out, std::size_t n, std::size_t block, unsigned levels, float factor,
                              const std::uint8_t* norms, const std::uint8_t* codes, std::size_t codes_bytes) {
    const unsigned width = width_of(levels);
    std::int32_t drawn[64];
    std::size_t nonzeros = 0;
    for (std::size_t b = 0, at = 0; at < n; ++b, at += block) {
        const std::size_t size = smaller(block, n - at);
        const float unit = flush(flush(factor * read_norm(norms, b)) / static_cast<float>(levels));
        for (std::size_t place = 0; place < size; place += 64) {
            const unsigned count = static_cast<unsigned>(smaller(64, size - place));
            float* part = out + at + place;
            unpack_codes(drawn, codes, codes_bytes, at + place, count, width);
            for (unsigned i = 0; i < count; ++i) {
                drawn[i] -= static_cast<std::int32_t>(levels);
                const float sum = flush(flush(part[i]) + flush(unit * static_cast<float>(drawn[i])));
                part[i] = drawn[i] ? sum : part[i];
                nonzeros += drawn[i] != 0;
            }
        }
    }
    return nonzeros;
}

// Sketches

struct Cells {  // where a tile goes in a row: from `slot` on, rotated
    std::size_t slot, rotation;
    bool negative;
};

inline Cells cells_of(std::uint64_t key, std::size_t tile_number, std::size_t slots, std::size_t tile) {
    const std::uint64_t draw = block_key(key, tile_number);
    return {((draw & 0xffffffffu) * slots >> 32) * tile, static_cast<std::size_t>(draw >> 32) & (tile - 1), draw >> 63 != 0};
}

// A tile's cells are far from those of the last one: they are fetched while that is worked on.
inline void fetch(const float* cells, std::size_t tile) {
    for (std::size_t i = 0; i < tile; i += 16) __builtin_prefetch(cells + i);
}

inline void add_signed(float* __restrict out, const float* __restrict x, bool negative, std::size_t n) {
    std::size_t i = 0;
#if defined(__AVX512F__)
    // Runs of any length, thousands a millisecond: the last vector is masked and not done one by one.
    const __m512i sign = _mm512_set1_epi32(negative ? static_cast<int>(0x80000000u) : 0);
    for (; i < n; i += 16) {
        const __mmask16 live = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
        const __m512i signed_x = _mm512_xor_si512(_mm512_maskz_loadu_epi32(live, x + i), sign);
        const __m512 sum = _mm512_add_ps(_mm512_maskz_loadu_ps(live, out + i), _mm512_castsi512_ps(signed_x));
        _mm512_mask_storeu_ps(out + i, live, sum);
    }
#endif
    if (negative) {
        for (; i < n; ++i) out[i] -= x[i];
    } else {
        for (; i < n; ++i) out[i] += x[i];
    }
}

void sketch_accumulate(const float* x, std::size_t n, std::size_t start, float* table, std::size_t rows, std::size_t slots,
                       std::size_t tile, const std::uint64_t* keys) {
    constexpr std::size_t kPart = 256;
    alignas(64) float part[kPart];  // of x, flushed once for all rows
    for (std::size_t at = 0; at < n;) {
        const std::size_t place = (start + at) & (tile - 1), number = (start + at) / tile;
        const std::size_t size = smaller(smaller(tile - place, n - at), kPart);
        for (std::size_t i = 0; i < size; ++i) part[i] = flush(x[at + i]);
        for (std::size_t r = 0; r < rows; ++r) {
            float* row = table + r * slots * tile;
            const Cells cells = cells_of(keys[r], number, slots, tile);
            fetch(row + cells_of(keys[r], number + 1, slots, tile).slot, smaller(tile, kPart));
            const std::size_t from = (place + cells.rotation) & (tile - 1), before_end = smaller(size, tile - from);
            add_signed(row + cells.slot + from, part, cells.negative, before_end);
            add_signed(row + cells.slot, part + before_end, cells.negative, size - before_end);
        }
        at += size;
    }
}

inline void copy_signed(float* __restrict out, const float* __restrict x, bool negative, std::size_t n) {
    const std::uint32_t sign = negative ? 0x80000000u : 0u;
    std::size_t i = 0;
#if defined(__AVX512F__)
    const __m512i exponent = _mm512_set1_epi32(kExponent), signs = _mm512_set1_epi32(static_cast<int>(sign));
    for (; i < n; i += 16) {
        const __mmask16 live = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
        const __m512i bits = _mm512_maskz_loadu_epi32(live, x + i);
        const __m512i flushed = _mm512_maskz_xor_epi32(_mm512_test_epi32_mask(bits, exponent), bits, signs);
        _mm512_mask_storeu_epi32(out + i, live, flushed);
    }
#endif
    for (; i < n; ++i) {
        const std::uint32_t bits = bits_of(x[i]);
        out[i] = float_of(bits & kExponent ? bits ^ sign : 0u);
    }
}

inline void order(float* __restrict a, float* __restrict b, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) {
        const float low = b[i] < a[i] ? b[i] : a[i], high = b[i] < a[i] ? a[i] : b[i];
        a[i] = low;
        b[i] = high;
    }
}

inline float least(float a, float b) { return b < a ? b : a; }
inline float most(float a, float b) { return b < a ? a : b; }

inline float or_nan(bool broken, float x) { return broken ? float_of(0x7fc00000u) : x; }

// NaN where a row is NaN.
inline void medians(float* __restrict out, float* rows, std::size_t count, std::size_t stride, std::size_t n) {
    const float *a = rows, *b = rows + stride, *c = rows + 2 * stride, *d = rows + 3 * stride, *e = rows + 4 * stride;
    if (count == 3) {
        for (std::size_t i = 0; i < n; ++i) {
            const bool broken = (a[i] != a[i]) | (b[i] != b[i]) | (c[i] != c[i]);
            out[i] = or_nan(broken, most(least(a[i], b[i]), least(most(a[i], b[i]), c[i])));
        }
    } else if (count == 5) {
        for (std::size_t i = 0; i < n; ++i) {  // without the least and the largest of four, three are left
            const bool broken = (a[i] != a[i]) | (b[i] != b[i]) | (c[i] != c[i]) | (d[i] != d[i]) | (e[i] != e[i]);
            const float low = most(least(a[i], b[i]), least(d[i], e[i])), high = least(most(a[i], b[i]), most(d[i], e[i]));
            out[i] = or_nan(broken, most(least(low, high), least(most(low, high), c[i])));
        }
    } else {
        for (std::size_t i = 0; i < n; ++i) out[i] = 0;
        for (std::size_t r = 0; r < count; ++r)
            for (std::size_t i = 0; i < n; ++i) out[i] = or_nan(rows[r * stride + i] != rows[r * stride + i], out[i]);
        for (std::size_t pass = 0; pass < count; ++pass)
            for (std::size_t r = pass % 2; r + 1 < count; r += 2) order(rows + r * stride, rows + (r + 1) * stride, n);
        for (std::size_t i = 0; i < n; ++i) out[i] = or_nan(out[i] != out[i], rows[count / 2 * stride + i]);
    }
}

void sketch_estimate(float* out, std::size_t n, std::size_t start, const float* table, std::size_t rows, std::size_t slots,
                     std::size_t tile, const std::uint64_t* keys, float* buffer) {
    for (std::size_t at = 0; at < n;) {
        const std::size_t place = (start + at) & (tile - 1), size = smaller(tile - place, n - at);
        for (std::size_t r = 0; r < rows; ++r) {
            const Cells cells = cells_of(keys[r], (start + at) / tile, slots, tile);
            const float* row = table + r * slots * tile + cells.slot;
            fetch(table + r * slots * tile + cells_of(keys[r], (start + at) / tile + 1, slots, tile).slot, tile);
            const std::size_t from = (place + cells.rotation) & (tile - 1), before_end = smaller(size, tile - from);
            copy_signed(buffer + r * tile, row + from, cells.negative, before_end);
            copy_signed(buffer + r * tile + before_end, row, cells.negative, size - before_end);
        }
        medians(out + at, buffer, rows, tile, size);
        at += size;
    }
}

std::size_t at_least(const float* x, std::size_t n, std::uint32_t least, std::uint32_t* magnitudes, std::int64_t* places,
                     std::size_t room) {
    constexpr std::size_t kStride = 256;
    std::size_t found = 0;
    for (std::size_t at = 0; at < n; at += kStride) {
        const std::size_t size = smaller(kStride, n - at);
        std::size_t i = 0;
#if defined(__AVX512F__)
        // Whole vectors are stored, as long as there is room: compressing into memory is slow on some processors.
        for (; i < size && found + 16 <= room; i += 16) {
            const __m512i bits = magnitudes_of(_mm512_maskz_loadu_epi32(first_lanes(size - i), x + at + i));
            const __mmask16 large = _mm512_mask_cmpge_epu32_mask(first_lanes(size - i), bits, _mm512_set1_epi32(static_cast<int>(least)));
            if (!large) continue;
            const __m512i from = _mm512_add_epi64(_mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi64(static_cast<long long>(at + i)));
            const __mmask8 first = static_cast<__mmask8>(large), second = static_cast<__mmask8>(large >> 8);
            _mm512_storeu_si512(magnitudes + found, _mm512_maskz_compress_epi32(large, bits));
            _mm512_storeu_si512(places + found, _mm512_maskz_compress_epi64(first, from));
            _mm512_storeu_si512(places + found + __builtin_popcount(first),
                                _mm512_maskz_compress_epi64(second, _mm512_add_epi64(from, _mm512_set1_epi64(8))));
            found += static_cast<std::size_t>(__builtin_popcount(large));
        }
#endif
        if (i >= size || largest(x + at + i, size - i) < least) continue;
        for (; i < size; ++i) {
            std::uint32_t bits = bits_of(x[at + i]) & kMagnitude;
            bits = bits < kTiny ? 0 : bits;
            if (bits < least) continue;
            if (found < room) {
                magnitudes[found] = bits;
                places[found] = static_cast<std::int64_t>(at + i);
            }
            ++found;
        }
    }
    return found;
}

// Element by element

void add_term(float* out, const float* x, float factor, bool first, std::size_t n) {
    if (first) {
        for (std::size_t i = 0; i < n; ++i) out[i] = flush(factor * flush(x[i]));
    } else {
        for (std::size_t i = 0; i < n; ++i) out[i] = flush(out[i] + flush(factor * flush(x[i])));
    }
}

void divide(float* out, const float* x, float divisor, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) out[i] = flush(flush(x[i]) / divisor);
}

void draw_atoms(std::uint8_t* __restrict chosen, const float* __restrict magnitudes, std::size_t n, double level, std::uint64_t key,
                std::size_t place) {
    const std::uint64_t coarse = block_key(key, 0), fine = block_key(key, 1);
    for (std::size_t i = 0; i < n; ++i) {
        const std::uint32_t at = static_cast<std::uint32_t>(place + i);
        const double u = uniform(coarse, at) + (uniform(fine, at) - 0.5) * 0x1p-23;
        chosen[i] = (u * level < magnitudes[i]) & (magnitudes[i] > 0.0f);
    }
}

void product_row(float* __restrict out, const float* __restrict a, const float* __restrict b, std::size_t inner, std::size_t n) {
    for (std::size_t j = 0; j < n; ++j) out[j] = 0;
    for (std::size_t i = 0; i < inner; ++i) {
        const float factor = flush(a[i]);
        for (std::size_t j = 0; j < n; ++j) out[j] = flush(out[j] + flush(factor * b[i * n + j]));
    }
}

void add_scaled(float* __restrict out, const float* __restrict x, float factor, std::size_t n) {
    for (std::size_t i = 0; i < n; ++i) out[i] = flush(flush(out[i]) + flush(factor * flush(x[i])));
}

bool all_finite(const float* x, std::size_t n) { return largest(x, n) < kExponent; }

}  // namespace

#define HVDCOMPRESS_NAME(isa) #isa
#define HVDCOMPRESS_NAME_OF(isa) HVDCOMPRESS_NAME(isa)
extern const Kernels HVDCOMPRESS_ISA = {
    HVDCOMPRESS_NAME_OF(HVDCOMPRESS_ISA), all_finite, sum_of_squares, add_term, divide, ternary_encode, ternary_decode_add, sketch_accumulate, sketch_estimate, at_least,
    levels_encode, largest_code, levels_decode_add, draw_atoms, product_row, add_scaled,
};

}  // namespace hvdcompress
