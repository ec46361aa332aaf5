// SPDX-License-Identifier: Apache-2.0
// Conversions between number formats, and movement of values between lanes.
#include "fetch.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using u64 = uint64_t;
using u16 = uint16_t;
using i32 = int32_t;

inline i32 to_i32(double x) {
  if (std::isnan(x)) return 0;
  if (x >= 2147483647.0) return 2147483647;
  if (x <= -2147483648.0) return i32(-2147483647 - 1);
  return i32(x);
}
inline u32 to_u32(double x) {
  if (std::isnan(x) || x <= 0) return 0;
  if (x >= 4294967295.0) return 4294967295u;
  return u32(x);
}
template <int N> inline float ubyte(u32 a) { return float(a >> (8 * N) & 0xff); }

inline const MiniFormat& e4m3(const Wave& w) { return w.k->arch == Arch::gfx942 ? FNUZ_E4M3 : OCP_E4M3; }
inline const MiniFormat& e5m2(const Wave& w) { return w.k->arch == Arch::gfx942 ? FNUZ_E5M2 : OCP_E5M2; }
template <bool E5> inline const MiniFormat& fp8(const Wave& w) { return E5 ? e5m2(w) : e4m3(w); }
template <bool E5> inline const MiniTable& fp8_table(const Wave& w) {
  if (w.k->arch == Arch::gfx942) return E5 ? T_FNUZ_E5M2 : T_FNUZ_E4M3;
  return E5 ? T_OCP_E5M2 : T_OCP_E4M3;
}

// Two f32 -> two bytes in one half of the destination (op_sel's last bit); the other half stays.
template <bool E5>
void cvt_pk_fp8_f32(Wave& w, const Inst& I) {
  float at[LANES], bt[LANES];
  const float* a = source<F32>(w, I, 1, 0, at);
  const float* b = source<F32>(w, I, 2, 1, bt);
  u32 r[LANES];
  const u32* d = w.lane(I.ops[0].reg);
  const u64 mask = w.exec();
  const bool high = (I.op_sel >> 3 & 1) || (I.op_sel >> 2 & 1);
  for (int l = 0; l < LANES; ++l) {
    if (!(mask >> l & 1)) { r[l] = d[l]; continue; }
    const u32 two = f32_to_mini(fp8<E5>(w), a[l], w.fp16_ovfl) | f32_to_mini(fp8<E5>(w), b[l], w.fp16_ovfl) << 8;
    r[l] = high ? (d[l] & 0xffffu) | two << 16 : (d[l] & 0xffff0000u) | two;
  }
  blend(w.lane(I.ops[0].reg), r, mask);
  mark_written(w, I.ops[0].reg, mask);
}
// One half of the source (op_sel bit 0, or an SDWA word) -> two f32.
template <bool E5>
void cvt_pk_f32_fp8(Wave& w, const Inst& I) {
  u32 tmp[LANES];
  const u32* p = word(w, I, 1, 0, 0, tmp);
  const bool high = I.sdwa ? I.src0_sel == 5 : (I.op_sel & 1);
  if (I.sdwa && I.src0_sel != 4 && I.src0_sel != 5 && I.src0_sel != 6) fail(w, "SDWA byte select of a packed fp8 conversion");
  const MiniTable& value = fp8_table<E5>(w);
  u32 r[2][LANES];
  for (int l = 0; l < LANES; ++l) {
    const u32 two = high ? p[l] >> 16 : p[l] & 0xffff;
    r[0][l] = as_u32(value[two & 0xff]);
    r[1][l] = as_u32(value[two >> 8]);
  }
  const u64 mask = w.exec();
  for (int part = 0; part < 2; ++part) {
    blend(w.lane(I.ops[0].reg + part), r[part], mask);
    mark_written(w, I.ops[0].reg + part, mask);
  }
}
template <bool E5>
void cvt_f32_fp8(Wave& w, const Inst& I) {
  u32 tmp[LANES];
  const u32* p = word(w, I, 1, 0, 0, tmp);
  float r[LANES];
  const int byte = I.sdwa ? (I.src0_sel == 6 ? 0 : I.src0_sel) : (I.op_sel & 3);
  if (byte > 3) fail(w, "SDWA word select of a byte conversion");
  for (int l = 0; l < LANES; ++l) r[l] = fp8_table<E5>(w)[p[l] >> (8 * byte) & 0xff];
  Inst plain = I;
  plain.sdwa = 0;
  put<F32>(w, plain, 0, r);
}

// gfx950's scaled conversions: the scale is the power of two of the exponent of the f32 scale operand.
inline float scale_of(float s) {
  return e8m0_to_f32(as_u32(s) >> 23 & 0xff);
}
template <int FMT> inline const MiniFormat& scaled_format() {
  if constexpr (FMT == 0) return OCP_E4M3;
  else if constexpr (FMT == 1) return OCP_E5M2;
  else return E2M1;
}
template <int FMT> inline const MiniTable& scaled_table() {
  if constexpr (FMT == 0) return T_OCP_E4M3;
  else if constexpr (FMT == 1) return T_OCP_E5M2;
  else return T_E2M1;
}
// FMT 0 e4m3, 1 e5m2, 2 e2m1 -> f32 (OUT 0), bf16 (1), f16 (2), two at a time.
template <int FMT, int OUT>
void cvt_scale_up(Wave& w, const Inst& I) {
  u32 tmp[LANES];
  float st[LANES];
  const u32* p = word(w, I, 1, 0, 0, tmp);
  const float* s = source<F32>(w, I, 2, 1, st);
  const int which = I.op_sel & 3;
  const MiniTable& value = scaled_table<FMT>();
  u32 r[2][LANES];
  for (int l = 0; l < LANES; ++l) {
    const u32 both = FMT == 2 ? p[l] >> (8 * which) & 0xff : p[l] >> (16 * (which & 1)) & 0xffff;
    const u32 lo = FMT == 2 ? both & 15 : both & 0xff, hi = FMT == 2 ? both >> 4 : both >> 8;
    const float a = value[lo] * scale_of(s[l]), b = value[hi] * scale_of(s[l]);
    if (OUT == 0) { r[0][l] = as_u32(a); r[1][l] = as_u32(b); }
    else if (OUT == 1) r[0][l] = f32_to_bf16(a) | u32(f32_to_bf16(b)) << 16;
    else r[0][l] = f32_to_f16(a) | u32(f32_to_f16(b)) << 16;
  }
  const u64 mask = w.exec();
  for (int part = 0; part < (OUT == 0 ? 2 : 1); ++part) {
    blend(w.lane(I.ops[0].reg + part), r[part], mask);
    mark_written(w, I.ops[0].reg + part, mask);
  }
}
// Two values divided by the scale, rounded into the small format; saturating.
template <int FMT, int IN>
void cvt_scale_down(Wave& w, const Inst& I) {
  float x[2][LANES], st[LANES];
  u32 tmp[LANES];
  int scale_op = 2;
  if constexpr (IN == 0) {
    float at[LANES], bt[LANES];
    std::memcpy(x[0], source<F32>(w, I, 1, 0, at), sizeof at);
    std::memcpy(x[1], source<F32>(w, I, 2, 1, bt), sizeof bt);
    scale_op = 3;
  } else {
    const u32* p = word(w, I, 1, 0, 0, tmp);
    for (int l = 0; l < LANES; ++l) {
      x[0][l] = IN == 1 ? bf16_to_f32(u16(p[l])) : f16_to_f32(u16(p[l]));
      x[1][l] = IN == 1 ? bf16_to_f32(u16(p[l] >> 16)) : f16_to_f32(u16(p[l] >> 16));
    }
  }
  const float* s = source<F32>(w, I, scale_op, scale_op - 1, st);
  // The last two bits of op_sel choose the destination byte (e2m1), the last one the destination word.
  const int which = FMT == 2 ? I.op_sel >> 2 & 3 : I.op_sel >> 3 & 1;
  const u32* d = w.lane(I.ops[0].reg);
  u32 r[LANES];
  for (int l = 0; l < LANES; ++l) {
    const float k = 1.0f / scale_of(s[l]);
    const u32 lo = f32_to_mini(scaled_format<FMT>(), x[0][l] * k, true), hi = f32_to_mini(scaled_format<FMT>(), x[1][l] * k, true);
    const u32 both = FMT == 2 ? lo | hi << 4 : lo | hi << 8;
    const int shift = FMT == 2 ? 8 * which : 16 * which;
    const u32 field = (FMT == 2 ? 0xffu : 0xffffu) << shift;
    r[l] = (d[l] & ~field) | both << shift;
  }
  blend(w.lane(I.ops[0].reg), r, w.exec());
  mark_written(w, I.ops[0].reg, w.exec());
}

void cvt_pk_bf16_f32(Wave& w, const Inst& I) {
  op2<U32, F32, F32, [](float a, float b) { return u32(f32_to_bf16(a)) | u32(f32_to_bf16(b)) << 16; }>(w, I);
}
inline u32 round_to_zero_f16(float x) {
  const u16 h = f32_to_f16(x);
  if (std::isnan(x) || std::isinf(x)) return h;
  if ((h & 0x7fff) == 0x7c00) return (h & 0x8000) | 0x7bff;
  return std::fabs(f16_to_f32(h)) > std::fabs(x) ? u32(h - 1) : h;
}
constexpr auto PKRTZ = [](float a, float b) { return round_to_zero_f16(a) | round_to_zero_f16(b) << 16; };

// ---- lanes
void readlane(Wave& w, const Inst& I) {
  const u32 lane = scalar32(w, I, 2) & 63;
  if (w.vdef) check_vgpr_read(w, I, I.ops[1].reg, 1ull << lane);
  put_s32(w, I, 0, w.lane(I.ops[1].reg)[lane]);
}
void readfirstlane(Wave& w, const Inst& I) {
  const u64 exec = w.exec();
  const int lane = exec ? __builtin_ctzll(exec) : 0;
  if (w.vdef) check_vgpr_read(w, I, I.ops[1].reg, 1ull << lane);
  put_s32(w, I, 0, w.lane(I.ops[1].reg)[lane]);
}
void writelane(Wave& w, const Inst& I) {
  // Compilers spill whole scalar tuples this way, parts of which may never have been written.
  const u32 value = I.ops[1].kind == KIND_SGPR ? w.s[I.ops[1].reg] : scalar32(w, I, 1);
  const u32 lane = scalar32(w, I, 2) & 63;
  w.lane(I.ops[0].reg)[lane] = value;
  mark_written(w, I.ops[0].reg, 1ull << lane);
}
template <bool HIGH>
void mbcnt(Wave& w, const Inst& I) {
  u32 at[LANES], bt[LANES], r[LANES];
  const u32* a = source<U32>(w, I, 1, 0, at);
  const u32* b = source<U32>(w, I, 2, 1, bt);
  for (int l = 0; l < LANES; ++l) {
    const u64 below = (1ull << l) - 1;
    r[l] = b[l] + u32(__builtin_popcount(a[l] & u32(HIGH ? below >> 32 : below)));
  }
  put<U32>(w, I, 0, r);
}
// Both registers are written. Rows of N lanes: the first one's odd rows change places with the second's even rows.
template <int N>
void permlane_swap(Wave& w, const Inst& I) {
  u32* a = w.lane(I.ops[0].reg);
  u32* b = w.lane(I.ops[1].reg);
  const u64 exec = w.exec();
  if (w.vdef) { check_vgpr_read(w, I, I.ops[0].reg, exec); check_vgpr_read(w, I, I.ops[1].reg, exec); }
  for (int l = 0; l < LANES; ++l) {
    if (!(l & N)) continue;
    const int other = l - N;
    const u32 x = a[l], y = b[other];
    if (exec >> l & 1) a[l] = y;
    if (exec >> other & 1) b[other] = x;
  }
  mark_written(w, I.ops[0].reg, exec);
  mark_written(w, I.ops[1].reg, exec);
}
void v_swap(Wave& w, const Inst& I) {
  u32* a = w.lane(I.ops[0].reg);
  u32* b = w.lane(I.ops[1].reg);
  u32 t[LANES];
  std::memcpy(t, a, sizeof t);
  blend(a, b, w.exec());
  blend(b, t, w.exec());
  mark_written(w, I.ops[0].reg, w.exec());
  mark_written(w, I.ops[1].reg, w.exec());
}
void v_nop(Wave&, const Inst&) {}

}  // namespace

#define NM "dpp sdwa neg abs clamp omod"
#define C(n, d, s, f) {n, "dv1" d ",sa1" s, NM, CLASS_VALU, f}
#define UP(n, d, f) {n, "dv" d ",sa1u,sa1f", "op_sel", CLASS_VALU, f}
const OpDef VALU_CONVERT[] = {
    C("v_cvt_f32_i32", "f", "u", (op1<F32, I32, [](i32 a) { return float(a); }>)),
    C("v_cvt_f32_u32", "f", "u", (op1<F32, U32, [](u32 a) { return float(a); }>)),
    C("v_cvt_i32_f32", "u", "f", (op1<I32, F32, [](float a) { return to_i32(std::trunc(a)); }>)),
    C("v_cvt_u32_f32", "u", "f", (op1<U32, F32, [](float a) { return to_u32(std::trunc(a)); }>)),
    C("v_cvt_rpi_i32_f32", "u", "f", (op1<I32, F32, [](float a) { return to_i32(std::floor(a + 0.5f)); }>)),
    C("v_cvt_flr_i32_f32", "u", "f", (op1<I32, F32, [](float a) { return to_i32(std::floor(a)); }>)),
    C("v_cvt_f32_f16", "f", "h", (op1<F32, F16, [](u16 a) { return f16_to_f32(a); }>)),
    C("v_cvt_f16_f32", "h", "f", (op1<F16, F32, [](float a) { return f32_to_f16(a); }>)),
    C("v_cvt_f16_u16", "h", "h", (op1<F16, U16, [](u16 a) { return f32_to_f16(float(a)); }>)),
    C("v_cvt_f16_i16", "h", "h", (op1<F16, I16, [](int16_t a) { return f32_to_f16(float(a)); }>)),
    {"v_cvt_f64_f32", "dv2d,sa1f", "neg abs clamp omod", CLASS_VALU, op1<F64, F32, [](float a) { return double(a); }>},
    {"v_cvt_f32_f64", "dv1f,sa2d", "neg abs clamp omod", CLASS_VALU, op1<F32, F64, [](double a) { return float(a); }>},
    {"v_cvt_f64_i32", "dv2d,sa1u", "clamp omod", CLASS_VALU, op1<F64, I32, [](i32 a) { return double(a); }>},
    {"v_cvt_f64_u32", "dv2d,sa1u", "clamp omod", CLASS_VALU, op1<F64, U32, [](u32 a) { return double(a); }>},
    {"v_cvt_i32_f64", "dv1u,sa2d", "neg abs clamp", CLASS_VALU, op1<I32, F64, [](double a) { return to_i32(std::trunc(a)); }>},
    {"v_cvt_u32_f64", "dv1u,sa2d", "neg abs clamp", CLASS_VALU, op1<U32, F64, [](double a) { return to_u32(std::trunc(a)); }>},
    C("v_cvt_f32_ubyte0", "f", "u", (op1<F32, U32, ubyte<0>>)),
    C("v_cvt_f32_ubyte1", "f", "u", (op1<F32, U32, ubyte<1>>)),
    C("v_cvt_f32_ubyte2", "f", "u", (op1<F32, U32, ubyte<2>>)),
    C("v_cvt_f32_ubyte3", "f", "u", (op1<F32, U32, ubyte<3>>)),
    {"v_cvt_pkrtz_f16_f32", "dv1p,sa1f,sa1f", NM, CLASS_VALU, op2<U32, F32, F32, PKRTZ>},
    {"v_cvt_pk_bf16_f32", "dv1p,sa1f,sa1f", "neg abs", CLASS_VALU, cvt_pk_bf16_f32},
    {"v_cvt_pk_f16_f32", "dv1p,sa1f,sa1f", "neg abs", CLASS_VALU,
     op2<U32, F32, F32, [](float a, float b) { return u32(f32_to_f16(a)) | u32(f32_to_f16(b)) << 16; }>},
    {"v_cvt_f32_bf16", "dv1f,sa1h", "sdwa", CLASS_VALU, op1<F32, U16, [](u16 a) { return bf16_to_f32(a); }>},
    {"v_cvt_pk_fp8_f32", "xv1u,sa1f,sa1f", "neg abs op_sel", CLASS_VALU, cvt_pk_fp8_f32<false>},
    {"v_cvt_pk_bf8_f32", "xv1u,sa1f,sa1f", "neg abs op_sel", CLASS_VALU, cvt_pk_fp8_f32<true>},
    {"v_cvt_pk_f32_fp8", "dv2f,sa1u", "sdwa op_sel", CLASS_VALU, cvt_pk_f32_fp8<false>},
    {"v_cvt_pk_f32_bf8", "dv2f,sa1u", "sdwa op_sel", CLASS_VALU, cvt_pk_f32_fp8<true>},
    {"v_cvt_f32_fp8", "dv1f,sa1u", "sdwa op_sel", CLASS_VALU, cvt_f32_fp8<false>},
    {"v_cvt_f32_bf8", "dv1f,sa1u", "sdwa op_sel", CLASS_VALU, cvt_f32_fp8<true>},
    UP("v_cvt_scalef32_pk_f32_fp8", "2f", (cvt_scale_up<0, 0>)),
    UP("v_cvt_scalef32_pk_f32_bf8", "2f", (cvt_scale_up<1, 0>)),
    UP("v_cvt_scalef32_pk_f32_fp4", "2f", (cvt_scale_up<2, 0>)),
    UP("v_cvt_scalef32_pk_bf16_fp8", "1p", (cvt_scale_up<0, 1>)),
    UP("v_cvt_scalef32_pk_bf16_bf8", "1p", (cvt_scale_up<1, 1>)),
    UP("v_cvt_scalef32_pk_bf16_fp4", "1p", (cvt_scale_up<2, 1>)),
    UP("v_cvt_scalef32_pk_f16_fp8", "1p", (cvt_scale_up<0, 2>)),
    UP("v_cvt_scalef32_pk_f16_bf8", "1p", (cvt_scale_up<1, 2>)),
    UP("v_cvt_scalef32_pk_f16_fp4", "1p", (cvt_scale_up<2, 2>)),
    {"v_cvt_scalef32_pk_fp8_f32", "xv1u,sa1f,sa1f,sa1f", "op_sel neg abs", CLASS_VALU, cvt_scale_down<0, 0>},
    {"v_cvt_scalef32_pk_bf8_f32", "xv1u,sa1f,sa1f,sa1f", "op_sel neg abs", CLASS_VALU, cvt_scale_down<1, 0>},
    {"v_cvt_scalef32_pk_fp4_f32", "xv1u,sa1f,sa1f,sa1f", "op_sel neg abs", CLASS_VALU, cvt_scale_down<2, 0>},
    {"v_cvt_scalef32_pk_fp8_bf16", "xv1u,sa1u,sa1f", "op_sel", CLASS_VALU, cvt_scale_down<0, 1>},
    {"v_cvt_scalef32_pk_bf8_bf16", "xv1u,sa1u,sa1f", "op_sel", CLASS_VALU, cvt_scale_down<1, 1>},
    {"v_cvt_scalef32_pk_fp4_bf16", "xv1u,sa1u,sa1f", "op_sel", CLASS_VALU, cvt_scale_down<2, 1>},

    {"v_readlane_b32", "ds1u,sv1u,ss1u", "", CLASS_VALU, readlane},
    {"v_readfirstlane_b32", "ds1u,sv1u", "", CLASS_VALU, readfirstlane},
    {"v_writelane_b32", "xv1u,ss1u,ss1u", "", CLASS_VALU, writelane},
    {"v_mbcnt_lo_u32_b32", "dv1u,sa1u,sa1u", "", CLASS_VALU, mbcnt<false>},
    {"v_mbcnt_hi_u32_b32", "dv1u,sa1u,sa1u", "", CLASS_VALU, mbcnt<true>},
    {"v_permlane16_swap_b32", "xv1u,xv1u", "", CLASS_VALU, permlane_swap<16>},
    {"v_permlane32_swap_b32", "xv1u,xv1u", "", CLASS_VALU, permlane_swap<32>},
    {"v_swap_b32", "xv1u,xv1u", "", CLASS_VALU, v_swap},
    {"v_nop", "", "", CLASS_VALU, v_nop},
};
static const OpTable valu_convert_table(VALU_CONVERT);

}  // namespace cdna
