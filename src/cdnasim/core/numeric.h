// SPDX-License-Identifier: Apache-2.0
// Number formats: bit casts, f16, bf16, and the 8-, 6- and 4-bit formats of the matrix instructions.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace cdna {

template <class To, class From>
inline To bits(From f) {
  static_assert(sizeof(To) == sizeof(From));
  To t;
  std::memcpy(&t, &f, sizeof t);
  return t;
}
inline float as_f32(uint32_t u) { return bits<float>(u); }
inline uint32_t as_u32(float f) { return bits<uint32_t>(f); }
inline double as_f64(uint64_t u) { return bits<double>(u); }
inline uint64_t as_u64(double f) { return bits<uint64_t>(f); }

// f16 through the host's half type: conversions are exact or round to nearest even.
inline float f16_to_f32(uint16_t h) { return float(bits<_Float16>(h)); }
inline uint16_t f32_to_f16(float f) { return bits<uint16_t>(_Float16(f)); }

inline float bf16_to_f32(uint16_t b) { return as_f32(uint32_t(b) << 16); }
// Round to nearest even; a NaN stays a (quiet) NaN.
inline uint16_t f32_to_bf16(float f) {
  uint32_t u = as_u32(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return uint16_t((u >> 16) | 0x40);
  return uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

// 2^n, for n of a normal double.
inline double power_of_two(int n) { return as_f64(uint64_t(1023 + n) << 52); }

// A small float format: sign, exponent of E bits, mantissa of M bits, bias B.
struct MiniFormat {
  int exp_bits, man_bits, bias;
  enum Specials { IEEE, OCP_FN, FNUZ, FINITE } specials;
};
constexpr MiniFormat OCP_E4M3{4, 3, 7, MiniFormat::OCP_FN};
constexpr MiniFormat OCP_E5M2{5, 2, 15, MiniFormat::IEEE};
constexpr MiniFormat FNUZ_E4M3{4, 3, 8, MiniFormat::FNUZ};
constexpr MiniFormat FNUZ_E5M2{5, 2, 16, MiniFormat::FNUZ};
constexpr MiniFormat E2M3{2, 3, 1, MiniFormat::FINITE};
constexpr MiniFormat E3M2{3, 2, 3, MiniFormat::FINITE};
constexpr MiniFormat E2M1{2, 1, 1, MiniFormat::FINITE};

inline float mini_to_f32(const MiniFormat& f, uint32_t code) {
  const int width = 1 + f.exp_bits + f.man_bits;
  const uint32_t sign = (code >> (width - 1)) & 1;
  const uint32_t exp = (code >> f.man_bits) & ((1u << f.exp_bits) - 1);
  const uint32_t man = code & ((1u << f.man_bits) - 1);
  const uint32_t top = (1u << f.exp_bits) - 1;
  if (f.specials == MiniFormat::FNUZ && sign && !exp && !man) return as_f32(0x7fc00000u);
  if (f.specials == MiniFormat::OCP_FN && exp == top && man == (1u << f.man_bits) - 1) return as_f32(0x7fc00000u);
  if (f.specials == MiniFormat::IEEE && exp == top)
    return man ? as_f32(0x7fc00000u) : as_f32(0x7f800000u | sign << 31);
  const double digits = exp ? (1u << f.man_bits) | man : man;
  const float mag = float(digits * power_of_two(int(exp ? exp : 1) - f.bias - f.man_bits));
  return sign ? -mag : mag;
}

// Every code's value.
using MiniTable = std::array<float, 256>;
inline MiniTable mini_table(const MiniFormat& f) {
  MiniTable t{};
  for (uint32_t i = 0; i < 1u << (1 + f.exp_bits + f.man_bits); ++i) t[i] = mini_to_f32(f, i);
  return t;
}
inline const MiniTable T_OCP_E4M3 = mini_table(OCP_E4M3), T_OCP_E5M2 = mini_table(OCP_E5M2), T_E2M1 = mini_table(E2M1);
inline const MiniTable T_FNUZ_E4M3 = mini_table(FNUZ_E4M3), T_FNUZ_E5M2 = mini_table(FNUZ_E5M2);

// Largest finite magnitude's code, without the sign.
inline uint32_t mini_max_code(const MiniFormat& f) {
  const uint32_t all = (1u << (f.exp_bits + f.man_bits)) - 1;
  if (f.specials == MiniFormat::OCP_FN) return all - 1;
  if (f.specials == MiniFormat::IEEE) return (((1u << f.exp_bits) - 1) << f.man_bits) - 1;
  return all;
}

// Round to nearest even. ``saturate``: values past the largest finite one become it; otherwise NaN (or infinity
// where the format has one). Formats without NaN take the largest magnitude for one.
inline uint32_t f32_to_mini(const MiniFormat& f, float x, bool saturate) {
  const int width = 1 + f.exp_bits + f.man_bits;
  const uint32_t sign = as_u32(x) >> 31;
  const uint32_t sign_bit = sign << (width - 1);
  const uint32_t nan_code = f.specials == MiniFormat::FNUZ ? 1u << (width - 1)
                            : f.specials == MiniFormat::FINITE ? sign_bit | mini_max_code(f)
                                                               : sign_bit | ((1u << (width - 1)) - 1);
  const uint32_t inf_code = f.specials == MiniFormat::IEEE ? sign_bit | (((1u << f.exp_bits) - 1) << f.man_bits) : nan_code;
  if (std::isnan(x)) return nan_code;
  const float max = mini_to_f32(f, mini_max_code(f));
  if (std::isinf(x)) return saturate && f.specials == MiniFormat::FINITE ? sign_bit | mini_max_code(f) : inf_code;
  double a = std::fabs(double(x));
  if (a == 0) return f.specials == MiniFormat::FNUZ ? 0 : sign_bit;
  int e = int(as_u64(a) >> 52) - 1023;
  if (e < 1 - f.bias) e = 1 - f.bias;
  const double q = std::nearbyint(a * power_of_two(f.man_bits - e));  // integer mantissa, maybe rounded up a binade
  const double rounded = q * power_of_two(e - f.man_bits);
  if (rounded > max) return saturate ? sign_bit | mini_max_code(f) : inf_code;
  if (q == 0) return f.specials == MiniFormat::FNUZ ? 0 : sign_bit;
  if (q >= (1 << (f.man_bits + 1))) return sign_bit | uint32_t(e + 1 + f.bias) << f.man_bits;
  const uint32_t qi = uint32_t(q);
  if (qi >= (1u << f.man_bits)) return sign_bit | uint32_t(e + f.bias) << f.man_bits | (qi - (1u << f.man_bits));
  return sign_bit | qi;
}

inline float e8m0_to_f32(uint32_t code) {
  return code == 255 ? as_f32(0x7fc00000u) : code == 0 ? as_f32(0x00400000u) : as_f32(code << 23);
}

inline bool is_snan32(uint32_t u) { return (u & 0x7fc00000u) == 0x7f800000u && (u & 0x3fffffu); }
inline bool is_nan32(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }
inline uint32_t quiet32(uint32_t u) { return u | 0x400000u; }

}  // namespace cdna
