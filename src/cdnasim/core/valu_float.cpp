// SPDX-License-Identifier: Apache-2.0
// Vector floating point: arithmetic, comparisons, transcendentals, division helpers, packed f32 and f16.
#include "fetch.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;
using u16 = uint16_t;

// f16 arithmetic through float: one operation rounded twice is exact here (24 >= 2 * 11 + 2).
template <auto F> u16 h2(u16 a, u16 b) { return f32_to_f16(F(f16_to_f32(a), f16_to_f32(b))); }
// The product of two halves is exact in long double, and so is the sum of it and a half.
inline u16 h_fma(u16 a, u16 b, u16 c) {
  const long double x = (long double)f16_to_f32(a) * f16_to_f32(b) + f16_to_f32(c);
  return bits<u16>(_Float16(x));
}

// Without branches, so that a wave's lanes are compared together. Zeros are ordered by their signs.
inline float larger(float a, float b) { return a == b ? as_f32(as_u32(a) & as_u32(b)) : a > b ? a : b; }
inline float smaller(float a, float b) { return a == b ? as_f32(as_u32(a) | as_u32(b)) : a < b ? a : b; }
// IEEE minNum / maxNum: a NaN operand gives the other one.
inline float other_than_nan(float a, float b, float r) {
  const bool na = is_nan32(as_u32(a)), nb = is_nan32(as_u32(b));
  r = nb ? a : r;
  r = na ? b : r;
  return na & nb ? as_f32(quiet32(as_u32(a))) : r;
}
inline float max_num(float a, float b) { return other_than_nan(a, b, larger(a, b)); }
inline float min_num(float a, float b) { return other_than_nan(a, b, smaller(a, b)); }
// minimum / maximum: a NaN operand gives NaN.
inline float nan_of(float a, float b, float r) {
  r = is_nan32(as_u32(b)) ? as_f32(quiet32(as_u32(b))) : r;
  return is_nan32(as_u32(a)) ? as_f32(quiet32(as_u32(a))) : r;
}
inline float maximum(float a, float b) { return nan_of(a, b, larger(a, b)); }
inline float minimum(float a, float b) { return nan_of(a, b, smaller(a, b)); }
inline float max3(float a, float b, float c) { return max_num(max_num(a, b), c); }
inline float min3(float a, float b, float c) { return min_num(min_num(a, b), c); }
inline float med3(float a, float b, float c) {
  if (std::isnan(a) || std::isnan(b) || std::isnan(c)) return min3(a, b, c);
  const float m = max3(a, b, c);
  if (m == a) return max_num(b, c);
  if (m == b) return max_num(a, c);
  return max_num(a, b);
}
inline u16 to_h(float f) { return f32_to_f16(f); }
inline u16 h_max(u16 a, u16 b) { return to_h(max_num(f16_to_f32(a), f16_to_f32(b))); }
inline u16 h_min(u16 a, u16 b) { return to_h(min_num(f16_to_f32(a), f16_to_f32(b))); }
inline double dmax(double a, double b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == 0 && b == 0) return std::signbit(a) ? b : a;
  return a > b ? a : b;
}
inline double dmin(double a, double b) {
  if (std::isnan(a)) return b;
  if (std::isnan(b)) return a;
  if (a == 0 && b == 0) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}

// The transcendental unit takes a denormal f32 for zero and gives zero for one, whatever the mode.
inline float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float t_rcp(float x) { return flush(float(1.0 / double(flush(x)))); }
inline float t_rsq(float x) { x = flush(x); return float(1.0 / std::sqrt(double(x))); }
inline float t_sqrt(float x) { return std::sqrt(flush(x)); }
inline float t_exp2(float x) { return flush(float(std::exp2(double(flush(x))))); }
inline float t_log2(float x) { return float(std::log2(double(flush(x)))); }
// Arguments in turns; outside [-256, 256] the result is the one of zero.
inline float t_sin(float x) { return std::fabs(x) > 256 ? 0.0f : float(std::sin(double(x) * 6.283185307179586476925)); }
inline float t_cos(float x) { return std::fabs(x) > 256 ? 1.0f : float(std::cos(double(x) * 6.283185307179586476925)); }

inline float fract(float x) {
  const float f = x - std::floor(x);
  return f >= 1.0f ? as_f32(0x3f7fffffu) : f;
}
inline int frexp_exp(float x) {
  if (std::isinf(x) || std::isnan(x) || x == 0) return 0;
  int e;
  std::frexp(x, &e);
  return e;
}
inline float frexp_mant(float x) {
  if (std::isinf(x) || std::isnan(x)) return x;
  int e;
  return std::frexp(x, &e);
}
// ldexp rounds once, also into the denormals.
inline float ldexp_f32(float x, int n) { return std::ldexp(x, n < -400 ? -400 : n > 400 ? 400 : n); }

// ---- classes: bit 0 signalling NaN, 1 quiet NaN, 2 -inf, 3 -normal, 4 -denormal, 5 -0, 6 +0, ... 9 +inf
inline u32 class_of(u32 u) {
  const u32 sign = u >> 31, exp = u >> 23 & 0xff, man = u & 0x7fffff;
  if (exp == 255 && man) return man & 0x400000 ? 2 : 1;
  if (exp == 255) return sign ? 1u << 2 : 1u << 9;
  if (exp) return sign ? 1u << 3 : 1u << 8;
  if (man) return sign ? 1u << 4 : 1u << 7;
  return sign ? 1u << 5 : 1u << 6;
}
template <bool EXEC>
void cmp_class(Wave& w, const Inst& I) {
  cmp<F32, U32, [](float a, u32 b) { return (class_of(as_u32(a)) & b) != 0; }, EXEC>(w, I);
}

// ---- division helpers
inline int exponent(float x) { return int(as_u32(x) >> 23 & 0xff); }
inline bool denormal32(double x) { return x != 0 && std::fabs(x) < 0x1p-126; }
void div_scale(Wave& w, const Inst& I) {
  float at[LANES], bt[LANES], ct[LANES], r[LANES];
  const float* s0 = source<F32>(w, I, 2, 0, at);
  const float* s1 = source<F32>(w, I, 3, 1, bt);
  const float* s2 = source<F32>(w, I, 4, 2, ct);
  u64 flags = 0;
  for (int l = 0; l < LANES; ++l) {
    const float a = s0[l], d = s1[l], n = s2[l];
    float x = a;
    bool vcc = false;
    const bool tiny_rcp = std::fabs(1.0 / double(d)) < 0x1p-126 && std::isfinite(d);
    const bool tiny_quot = denormal32(double(n) / double(d));
    if (n == 0 || d == 0) x = as_f32(0x7fc00000u);
    else if (exponent(n) - exponent(d) >= 96) {
      vcc = true;
      if (a == d) x = std::ldexp(a, 64);
    } else if (exponent(d) == 0) x = std::ldexp(a, 64);
    else if (tiny_rcp && tiny_quot) {
      // The manual prints +64 here, which would make a large denominator infinite; a quotient that is to be
      // scaled down by 2^64 at the end needs the denominator 2^64 smaller.
      vcc = true;
      if (a == d) x = std::ldexp(a, -64);
    } else if (tiny_rcp) x = std::ldexp(a, -64);
    else if (tiny_quot) {
      vcc = true;
      if (a == n) x = std::ldexp(a, 64);
    } else if (exponent(n) <= 23) x = std::ldexp(a, 64);
    r[l] = x;
    flags |= u64(vcc) << l;
  }
  const u64 mask = w.exec();
  put<F32>(w, I, 0, r);
  put_s64(w, I, 1, flags & mask);
}
void div_fmas(Wave& w, const Inst& I) {
  float at[LANES], bt[LANES], ct[LANES], r[LANES];
  const float* a = source<F32>(w, I, 1, 0, at);
  const float* b = source<F32>(w, I, 2, 1, bt);
  const float* c = source<F32>(w, I, 3, 2, ct);
  const u64 vcc = w.vcc();
  for (int l = 0; l < LANES; ++l) {
    const float x = std::fma(a[l], b[l], c[l]);
    r[l] = vcc >> l & 1 ? std::ldexp(x, exponent(c[l]) > 127 ? 64 : -64) : x;
  }
  put<F32>(w, I, 0, r);
}
inline float div_fixup_one(float q, float d, float n) {
  const u32 sign = (as_u32(d) ^ as_u32(n)) & 0x80000000u;
  if (std::isnan(n)) return as_f32(quiet32(as_u32(n)));
  if (std::isnan(d)) return as_f32(quiet32(as_u32(d)));
  if ((n == 0 && d == 0) || (std::isinf(n) && std::isinf(d))) return as_f32(0xffc00000u);
  if (d == 0 || std::isinf(n)) return as_f32(sign | 0x7f800000u);
  if (std::isinf(d) || n == 0) return as_f32(sign);
  if (exponent(n) - exponent(d) < -150) return as_f32(sign);
  if (exponent(d) == 255) return as_f32(sign | 0x7f800000u);
  return as_f32(sign | (as_u32(q) & 0x7fffffffu));
}

// ---- packed f32: op_sel picks the word that makes the low result, op_sel_hi the high one.
template <auto F, int N>
void packed_f32(Wave& w, const Inst& I) {
  float src[3][2][LANES];
  for (int n = 0; n < N; ++n) {
    const Operand& o = I.ops[1 + n];
    for (int part = 0; part < 2; ++part) {
      const int sel = (part ? I.op_sel_hi : I.op_sel) >> n & 1;
      if (o.kind == KIND_CONST && sel) fail(w, "the high word of a constant of a packed f32 operation");
      u32 tmp[LANES];
      const u32* p = word(w, I, 1 + n, sel, n, tmp);
      const u32 flip = (part ? I.neg_hi : I.neg_lo) >> n & 1 ? 0x80000000u : 0;
      for (int l = 0; l < LANES; ++l) src[n][part][l] = as_f32(p[l] ^ flip);
    }
  }
  float r[2][LANES];
  for (int part = 0; part < 2; ++part)
    for (int l = 0; l < LANES; ++l) {
      r[part][l] = F(src[0][part][l], src[1][part][l], N > 2 ? src[2][part][l] : 0.0f);
      if (I.clamp) r[part][l] = modify_float(w, I, r[part][l]);
    }
  const u64 mask = w.exec();
  for (int part = 0; part < 2; ++part) {
    blend(w.lane(I.ops[0].reg + part), reinterpret_cast<u32*>(r[part]), mask);
    mark_written(w, I.ops[0].reg + part, mask);
  }
}
void packed_mov(Wave& w, const Inst& I) {
  u32 r[2][LANES];
  for (int part = 0; part < 2; ++part) {
    u32 tmp[LANES];
    // The low result is a word of source 0, the high one a word of source 1.
    const u32* p = word(w, I, 1 + part, I.op_sel >> part & 1, part, tmp);
    std::memcpy(r[part], p, sizeof tmp);
  }
  const u64 mask = w.exec();
  for (int part = 0; part < 2; ++part) {
    blend(w.lane(I.ops[0].reg + part), r[part], mask);
    mark_written(w, I.ops[0].reg + part, mask);
  }
}

// ---- packed 16 bit: two halves of one register; F takes and gives raw 16-bit values.
template <auto F, int N, bool FP>
void packed_16(Wave& w, const Inst& I) {
  u32 r[LANES];
  const u32* p[3];
  u32 tmp[3][LANES];
  for (int n = 0; n < N; ++n) p[n] = word(w, I, 1 + n, 0, n, tmp[n]);
  for (int l = 0; l < LANES; ++l) {
    u32 out = 0;
    for (int part = 0; part < 2; ++part) {
      u16 v[3] = {0, 0, 0};
      for (int n = 0; n < N; ++n) {
        const int sel = (part ? I.op_sel_hi : I.op_sel) >> n & 1;
        v[n] = u16(p[n][l] >> (16 * sel));
        if (FP && ((part ? I.neg_hi : I.neg_lo) >> n & 1)) v[n] ^= 0x8000;
      }
      u16 x = F(v[0], v[1], v[2]);
      if (FP && I.clamp) x = to_h(modify_float(w, I, f16_to_f32(x)));
      out |= u32(x) << (16 * part);
    }
    r[l] = out;
  }
  put<U32>(w, I, 0, r);
}

// ---- mixed precision: op_sel_hi says a source is f16, op_sel picks its half; neg_hi is abs.
template <int DST>  // 0: f32, 1: f16 into the low half, 2: into the high half
void fma_mix(Wave& w, const Inst& I) {
  float s[3][LANES];
  for (int n = 0; n < 3; ++n) {
    u32 tmp[LANES];
    const u32* p = word(w, I, 1 + n, 0, n, tmp);
    for (int l = 0; l < LANES; ++l) {
      float x = I.op_sel_hi >> n & 1 ? f16_to_f32(u16(p[l] >> (I.op_sel >> n & 1 ? 16 : 0))) : as_f32(p[l]);
      if (I.neg_hi >> n & 1 || I.ops[1 + n].flags & FLAG_ABS) x = std::fabs(x);
      if (I.neg_lo >> n & 1 || I.ops[1 + n].flags & FLAG_NEG) x = -x;
      s[n][l] = x;
    }
  }
  u32 r[LANES];
  const u32* d = w.lane(I.ops[0].reg);
  for (int l = 0; l < LANES; ++l) {
    float x = std::fma(s[0][l], s[1][l], s[2][l]);
    if (I.clamp) x = modify_float(w, I, x);
    if (DST == 0) r[l] = as_u32(x);
    else if (DST == 1) r[l] = (d[l] & 0xffff0000u) | to_h(x);
    else r[l] = (d[l] & 0xffffu) | u32(to_h(x)) << 16;
  }
  blend(w.lane(I.ops[0].reg), r, w.exec());
  mark_written(w, I.ops[0].reg, w.exec());
}

// Two products added one after another, everything rounded to f32.
inline float dot2(float a0, float b0, float a1, float b1, float c) {
  const float first = a0 * b0 + c;
  return a1 * b1 + first;
}
inline float dot2_f32_f16(u32 a, u32 b, float c) {
  return dot2(f16_to_f32(u16(a)), f16_to_f32(u16(b)), f16_to_f32(u16(a >> 16)), f16_to_f32(u16(b >> 16)), c);
}
inline float dot2_f32_bf16(u32 a, u32 b, float c) {
  return dot2(bf16_to_f32(u16(a)), bf16_to_f32(u16(b)), bf16_to_f32(u16(a >> 16)), bf16_to_f32(u16(b >> 16)), c);
}
constexpr auto FMA3 = [](float a, float b, float c) { return std::fma(a, b, c); };
constexpr auto DFMA3 = [](double a, double b, double c) { return std::fma(a, b, c); };

}  // namespace

#define FM "neg abs clamp omod"
#define FMD "dpp sdwa neg abs clamp omod"
#define FMH "dpp sdwa neg abs clamp omod op_sel"
#define N1(n, ...) {n, "dv1f,sa1f", FMD, CLASS_VALU, __VA_ARGS__}
#define N2(n, ...) {n, "dv1f,sa1f,sa1f", FMD, CLASS_VALU, __VA_ARGS__}
#define N3(n, ...) {n, "dv1f,sa1f,sa1f,sa1f", FM, CLASS_VALU, __VA_ARGS__}
#define H1(n, ...) {n, "dv1h,sa1h", FMH, CLASS_VALU, __VA_ARGS__}
#define H2(n, ...) {n, "dv1h,sa1h,sa1h", FMH, CLASS_VALU, __VA_ARGS__}
#define D1(n, ...) {n, "dv2d,sa2d", FM, CLASS_VALU, __VA_ARGS__}
#define D2(n, ...) {n, "dv2d,sa2d,sa2d", FM, CLASS_VALU, __VA_ARGS__}
#define PK(n, ...) {n, "dv2f,sa2f,sa2f", "op_sel op_sel_hi neg_lo neg_hi clamp", CLASS_VALU, __VA_ARGS__}
#define P16(n, ...) {n, "dv1p,sa1p,sa1p", "op_sel op_sel_hi neg_lo neg_hi clamp", CLASS_VALU, __VA_ARGS__}
#define P16_3(n, ...) {n, "dv1p,sa1p,sa1p,sa1p", "op_sel op_sel_hi neg_lo neg_hi clamp", CLASS_VALU, __VA_ARGS__}
#define MIX(n, d, f) {n, "xv1" d ",sa1f,sa1f,sa1f", "op_sel op_sel_hi neg abs neg_lo neg_hi clamp", CLASS_VALU, f}
const OpDef VALU_FLOAT[] = {
    N2("v_add_f32", (op2<F32, F32, F32, [](float a, float b) { return a + b; }>)),
    N2("v_sub_f32", (op2<F32, F32, F32, [](float a, float b) { return a - b; }>)),
    N2("v_subrev_f32", (op2<F32, F32, F32, [](float a, float b) { return b - a; }>)),
    N2("v_mul_f32", (op2<F32, F32, F32, [](float a, float b) { return a * b; }>)),
    N2("v_mul_legacy_f32", (op2<F32, F32, F32, [](float a, float b) { return a == 0 || b == 0 ? 0.0f : a * b; }>)),
    N2("v_max_f32", (op2<F32, F32, F32, max_num>)),
    N2("v_min_f32", (op2<F32, F32, F32, min_num>)),
    N3("v_fma_f32", (op3<F32, F32, F32, F32, FMA3>)),
    {"v_fmac_f32", "xv1f,sa1f,sa1f", FMD, CLASS_VALU, op_acc<F32, FMA3>},
    {"v_fmamk_f32", "dv1f,sa1f,sa1f,sa1f", "", CLASS_VALU, op3<F32, F32, F32, F32, FMA3>},
    {"v_fmaak_f32", "dv1f,sa1f,sa1f,sa1f", "", CLASS_VALU, op3<F32, F32, F32, F32, FMA3>},
    N3("v_max3_f32", (op3<F32, F32, F32, F32, max3>)),
    N3("v_min3_f32", (op3<F32, F32, F32, F32, min3>)),
    N3("v_med3_f32", (op3<F32, F32, F32, F32, med3>)),
    N3("v_maximum3_f32", (op3<F32, F32, F32, F32, [](float a, float b, float c) { return maximum(maximum(a, b), c); }>)),
    N3("v_minimum3_f32", (op3<F32, F32, F32, F32, [](float a, float b, float c) { return minimum(minimum(a, b), c); }>)),
    N1("v_rcp_f32", (op1<F32, F32, t_rcp>)),
    N1("v_rcp_iflag_f32", (op1<F32, F32, t_rcp>)),
    N1("v_rsq_f32", (op1<F32, F32, t_rsq>)),
    N1("v_sqrt_f32", (op1<F32, F32, t_sqrt>)),
    N1("v_exp_f32", (op1_active<F32, F32, t_exp2>)),
    N1("v_log_f32", (op1_active<F32, F32, t_log2>)),
    N1("v_sin_f32", (op1_active<F32, F32, t_sin>)),
    N1("v_cos_f32", (op1_active<F32, F32, t_cos>)),
    N1("v_floor_f32", (op1<F32, F32, [](float a) { return std::floor(a); }>)),
    N1("v_ceil_f32", (op1<F32, F32, [](float a) { return std::ceil(a); }>)),
    N1("v_trunc_f32", (op1<F32, F32, [](float a) { return std::trunc(a); }>)),
    N1("v_rndne_f32", (op1<F32, F32, [](float a) { return std::nearbyint(a); }>)),
    N1("v_fract_f32", (op1<F32, F32, fract>)),
    {"v_frexp_exp_i32_f32", "dv1u,sa1f", "neg abs", CLASS_VALU, op1<I32, F32, frexp_exp>},
    N1("v_frexp_mant_f32", (op1<F32, F32, frexp_mant>)),
    {"v_ldexp_f32", "dv1f,sa1f,sa1u", FM, CLASS_VALU, op2<F32, F32, I32, ldexp_f32>},
    {"v_div_scale_f32", "dv1f,ds2u,sa1f,sa1f,sa1f", FM, CLASS_VALU, div_scale},
    N3("v_div_fmas_f32", div_fmas),
    N3("v_div_fixup_f32", (op3<F32, F32, F32, F32, div_fixup_one>)),
    {"v_cmp_class_f32", "ds2u,sa1f,sa1u", "neg abs sdwa", CLASS_VALU, cmp_class<false>},
    {"v_cmpx_class_f32", "ds2u,sa1f,sa1u", "neg abs sdwa", CLASS_VALU, cmp_class<true>},

    D2("v_add_f64", (op2<F64, F64, F64, [](double a, double b) { return a + b; }>)),
    D2("v_mul_f64", (op2<F64, F64, F64, [](double a, double b) { return a * b; }>)),
    D2("v_max_f64", (op2<F64, F64, F64, dmax>)),
    D2("v_min_f64", (op2<F64, F64, F64, dmin>)),
    {"v_fma_f64", "dv2d,sa2d,sa2d,sa2d", FM, CLASS_VALU, op3<F64, F64, F64, F64, DFMA3>},
    {"v_fmac_f64", "xv2d,sa2d,sa2d", FM, CLASS_VALU, op_acc<F64, DFMA3>},
    D1("v_rcp_f64", (op1<F64, F64, [](double a) { return 1.0 / a; }>)),
    D1("v_rsq_f64", (op1<F64, F64, [](double a) { return 1.0 / std::sqrt(a); }>)),
    D1("v_sqrt_f64", (op1<F64, F64, [](double a) { return std::sqrt(a); }>)),
    D1("v_floor_f64", (op1<F64, F64, [](double a) { return std::floor(a); }>)),
    D1("v_ceil_f64", (op1<F64, F64, [](double a) { return std::ceil(a); }>)),
    D1("v_trunc_f64", (op1<F64, F64, [](double a) { return std::trunc(a); }>)),
    D1("v_rndne_f64", (op1<F64, F64, [](double a) { return std::nearbyint(a); }>)),

    H2("v_add_f16", (op2<F16, F16, F16, h2<[](float a, float b) { return a + b; }>>)),
    H2("v_sub_f16", (op2<F16, F16, F16, h2<[](float a, float b) { return a - b; }>>)),
    H2("v_subrev_f16", (op2<F16, F16, F16, h2<[](float a, float b) { return b - a; }>>)),
    H2("v_mul_f16", (op2<F16, F16, F16, h2<[](float a, float b) { return a * b; }>>)),
    H2("v_max_f16", (op2<F16, F16, F16, h_max>)),
    H2("v_min_f16", (op2<F16, F16, F16, h_min>)),
    {"v_fma_f16", "dv1h,sa1h,sa1h,sa1h", "neg abs clamp omod op_sel", CLASS_VALU, op3<F16K, F16, F16, F16, h_fma>},
    H1("v_rcp_f16", (op1<F16, F16, [](u16 a) { return to_h(1.0f / f16_to_f32(a)); }>)),
    H1("v_sqrt_f16", (op1<F16, F16, [](u16 a) { return to_h(std::sqrt(f16_to_f32(a))); }>)),
    H1("v_rsq_f16", (op1<F16, F16, [](u16 a) { return to_h(float(1.0 / std::sqrt(double(f16_to_f32(a))))); }>)),
    H1("v_exp_f16", (op1_active<F16, F16, [](u16 a) { return to_h(std::exp2(f16_to_f32(a))); }>)),
    H1("v_log_f16", (op1_active<F16, F16, [](u16 a) { return to_h(std::log2(f16_to_f32(a))); }>)),

    PK("v_pk_add_f32", (packed_f32<[](float a, float b, float) { return a + b; }, 2>)),
    PK("v_pk_mul_f32", (packed_f32<[](float a, float b, float) { return a * b; }, 2>)),
    {"v_pk_fma_f32", "dv2f,sa2f,sa2f,sa2f", "op_sel op_sel_hi neg_lo neg_hi clamp", CLASS_VALU, packed_f32<FMA3, 3>},
    {"v_pk_mov_b32", "dv2u,sa2u,sa2u", "op_sel op_sel_hi", CLASS_VALU, packed_mov},
    P16("v_pk_add_f16", (packed_16<[](u16 a, u16 b, u16) { return to_h(f16_to_f32(a) + f16_to_f32(b)); }, 2, true>)),
    P16("v_pk_mul_f16", (packed_16<[](u16 a, u16 b, u16) { return to_h(f16_to_f32(a) * f16_to_f32(b)); }, 2, true>)),
    P16("v_pk_max_f16", (packed_16<[](u16 a, u16 b, u16) { return h_max(a, b); }, 2, true>)),
    P16("v_pk_min_f16", (packed_16<[](u16 a, u16 b, u16) { return h_min(a, b); }, 2, true>)),
    P16_3("v_pk_fma_f16", (packed_16<h_fma, 3, true>)),
    P16("v_pk_add_u16", (packed_16<[](u16 a, u16 b, u16) { return u16(a + b); }, 2, false>)),
    P16("v_pk_sub_u16", (packed_16<[](u16 a, u16 b, u16) { return u16(a - b); }, 2, false>)),
    P16("v_pk_add_i16", (packed_16<[](u16 a, u16 b, u16) { return u16(a + b); }, 2, false>)),
    P16("v_pk_sub_i16", (packed_16<[](u16 a, u16 b, u16) { return u16(a - b); }, 2, false>)),
    P16("v_pk_mul_lo_u16", (packed_16<[](u16 a, u16 b, u16) { return u16(u32(a) * b); }, 2, false>)),
    P16("v_pk_min_u16", (packed_16<[](u16 a, u16 b, u16) { return a < b ? a : b; }, 2, false>)),
    P16("v_pk_max_u16", (packed_16<[](u16 a, u16 b, u16) { return (a > b ? a : b); }, 2, false>)),
    P16("v_pk_min_i16", (packed_16<[](u16 a, u16 b, u16) { return int16_t(a) < int16_t(b) ? a : b; }, 2, false>)),
    P16("v_pk_max_i16", (packed_16<[](u16 a, u16 b, u16) { return ((int16_t(a) > int16_t(b) ? a : b)); }, 2, false>)),
    P16("v_pk_lshlrev_b16", (packed_16<[](u16 a, u16 b, u16) { return u16(b << (a & 15)); }, 2, false>)),
    P16("v_pk_lshrrev_b16", (packed_16<[](u16 a, u16 b, u16) { return ((u16(b >> (a & 15)))); }, 2, false>)),
    P16("v_pk_ashrrev_i16", (packed_16<[](u16 a, u16 b, u16) { return ((u16(int16_t(b) >> (a & 15)))); }, 2, false>)),
    P16_3("v_pk_mad_u16", (packed_16<[](u16 a, u16 b, u16 c) { return u16(u32(a) * b + c); }, 3, false>)),
    P16_3("v_pk_mad_i16", (packed_16<[](u16 a, u16 b, u16 c) { return u16(u32(a) * b + c); }, 3, false>)),
    MIX("v_fma_mix_f32", "f", fma_mix<0>),
    MIX("v_fma_mixlo_f16", "h", fma_mix<1>),
    MIX("v_fma_mixhi_f16", "h", fma_mix<2>),
    {"v_dot2_f32_f16", "dv1f,sa1p,sa1p,sa1f", "clamp", CLASS_VALU, op3<F32, U32, U32, F32, dot2_f32_f16>},
    {"v_dot2_f32_bf16", "dv1f,sa1p,sa1p,sa1f", "clamp", CLASS_VALU, op3<F32, U32, U32, F32, dot2_f32_bf16>},
    {"v_dot2c_f32_bf16", "xv1f,sa1p,sa1p", "", CLASS_VALU,
     [](Wave& w, const Inst& I) {
       u32 at[LANES], bt[LANES];
       float ct[LANES], r[LANES];
       const u32* a = source<U32>(w, I, 1, 0, at);
       const u32* b = source<U32>(w, I, 2, 1, bt);
       const float* c = source<F32>(w, I, 0, 2, ct);
       for (int l = 0; l < LANES; ++l) r[l] = dot2_f32_bf16(a[l], b[l], c[l]);
       put<F32>(w, I, 0, r);
     }},
};
static const OpTable valu_float_table(VALU_FLOAT);

// Ordered comparisons are false with a NaN, the n-forms and "u" are true.
#define FC(cname, suffix, spec, T, E, expr)                                                                          \
  {"v_cmp_" cname "_" suffix, spec, "sdwa neg abs", CLASS_VALU, cmp<T, T, [](T::t x, T::t y) { const auto a = E(x), b = E(y); return (expr); }, false>}, \
  {"v_cmpx_" cname "_" suffix, spec, "sdwa neg abs", CLASS_VALU, cmp<T, T, [](T::t x, T::t y) { const auto a = E(x), b = E(y); return (expr); }, true>}
#define FCS(suffix, spec, T, E)                                        \
  FC("lt", suffix, spec, T, E, a < b), FC("eq", suffix, spec, T, E, a == b), FC("le", suffix, spec, T, E, a <= b), \
  FC("gt", suffix, spec, T, E, a > b), FC("lg", suffix, spec, T, E, (a < b || a > b)), FC("ge", suffix, spec, T, E, a >= b), \
  FC("o", suffix, spec, T, E, (a == a && b == b)), FC("u", suffix, spec, T, E, !(a == a && b == b)), \
  FC("nge", suffix, spec, T, E, !(a >= b)), FC("nlg", suffix, spec, T, E, !(a < b || a > b)), \
  FC("ngt", suffix, spec, T, E, !(a > b)), FC("nle", suffix, spec, T, E, !(a <= b)), \
  FC("neq", suffix, spec, T, E, !(a == b)), FC("nlt", suffix, spec, T, E, !(a < b))
#define SAME(x) (x)
const OpDef VALU_FCMP[] = {
    FCS("f32", "ds2u,sa1f,sa1f", F32, SAME),
    FCS("f16", "ds2u,sa1h,sa1h", F16, f16_to_f32),
    FCS("f64", "ds2u,sa2d,sa2d", F64, SAME),
};
static const OpTable valu_fcmp_table(VALU_FCMP);

}  // namespace cdna
