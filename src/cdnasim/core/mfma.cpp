// SPDX-License-Identifier: Apache-2.0
// Matrix instructions. EXEC is ignored. Lane layouts (one block): with G = 64 / M lane groups, lane l holds row
// (A) or column (B) l % M and the K elements of group l / M, contiguous unless noted. Results: 16x16 has row
// 4 (l / 16) + r in register r, column l % 16; 32x32 has row 8 (r / 4) + 4 (l / 32) + r % 4, column l % 32.
//
// Products are exact; the order and the width in which hardware adds them is not documented. Here a sum of
// products is formed in f32 (per block of 32 for the scaled forms), and the accumulator is added to it last.
#include <array>

#include "fetch.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using u16 = uint16_t;

typedef float Row16 __attribute__((vector_size(64), aligned(4), may_alias));

// out[m][n] = sum over k, in order, of a[k][m] * b[k][n]; four rows at a time.
template <int N>
void multiply(const float* at, const float* bt, int k_len, float* out) {
  constexpr int V = N / 16, ROWS = 4;
  for (int m = 0; m < N; m += ROWS) {
    Row16 acc[ROWS][V] = {};
    for (int k = 0; k < k_len; ++k) {
      const Row16* b = reinterpret_cast<const Row16*>(bt + k * N);
      for (int i = 0; i < ROWS; ++i) {
        const float x = at[k * N + m + i];
        for (int v = 0; v < V; ++v) acc[i][v] += x * b[v];
      }
    }
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < V; ++v) *reinterpret_cast<Row16*>(out + (m + i) * N + 16 * v) = acc[i][v];
  }
}

inline int result_row(int m_dim, int lane, int r) {
  return m_dim == 16 ? 4 * (lane / 16) + r : 8 * (r / 4) + 4 * (lane / 32) + r % 4;
}

const u32* register_lanes(Wave& w, const Inst& I, int k, int part, u32* tmp) {
  const Operand& o = I.ops[k];
  if (o.kind == KIND_VGPR) {
    if (!w.vdef.empty()) check_vgpr_read(w, I, o.reg + part, ~0ull);
    return w.lane(o.reg + part);
  }
  if (o.kind != KIND_CONST) fail(w, "an MFMA source that is neither a register nor a constant");
  for (int l = 0; l < LANES; ++l) tmp[l] = u32(o.value);
  return tmp;
}

// out is [M][M] row-major; adds the accumulator (operand 3) and writes operand 0.
template <int M>
void accumulate(Wave& w, const Inst& I, const float* out) {
  constexpr int REGS = M * M / LANES;
  u32 r[REGS][LANES], tmp[LANES];
  for (int q = 0; q < REGS; ++q) {
    const u32* c = register_lanes(w, I, 3, q, tmp);
    for (int l = 0; l < LANES; ++l) r[q][l] = as_u32(as_f32(c[l]) + out[result_row(M, l, q) * M + l % M]);
  }
  for (int q = 0; q < REGS; ++q) {
    std::memcpy(w.lane(I.ops[0].reg + q), r[q], sizeof r[q]);
    mark_written(w, I.ops[0].reg + q, ~0ull);
  }
}

void refuse_broadcast(Wave& w, const Inst& I) {
  if (I.cbsz | I.abid | I.blgp) fail(w, "cbsz / abid / blgp of this MFMA is not modelled");
}

// ---- elements of a plain operand: unpack(word array of a lane, element) -> float
struct Bf16 { static constexpr int per_word = 2; static float get(u32 x, int e) { return bf16_to_f32(u16(x >> (16 * e))); } };
struct Half { static constexpr int per_word = 2; static float get(u32 x, int e) { return f16_to_f32(u16(x >> (16 * e))); } };
struct Single { static constexpr int per_word = 1; static float get(u32 x, int) { return as_f32(x); } };

template <int M, int K, class T>
void mfma_f32(Wave& w, const Inst& I) {
  refuse_broadcast(w, I);
  constexpr int GROUPS = LANES / M, PER_LANE = K / GROUPS, WORDS = PER_LANE / T::per_word;
  float at[K * M], bt[K * M], out[M * M];
  u32 tmp[LANES];
  for (int q = 0; q < WORDS; ++q) {
    const u32* pa = register_lanes(w, I, 1, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < T::per_word; ++e) at[((l / M) * PER_LANE + q * T::per_word + e) * M + l % M] = T::get(pa[l], e);
    const u32* pb = register_lanes(w, I, 2, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < T::per_word; ++e) bt[((l / M) * PER_LANE + q * T::per_word + e) * M + l % M] = T::get(pb[l], e);
  }
  multiply<M>(at, bt, K, out);
  accumulate<M>(w, I, out);
}

// ---- 8-bit formats, decoded by table
using Table = std::array<float, 256>;
Table make_table(const MiniFormat& f) {
  Table t{};
  const int codes = 1 << (1 + f.exp_bits + f.man_bits);
  for (int i = 0; i < codes; ++i) t[i] = mini_to_f32(f, u32(i));
  return t;
}
const Table T_OCP_E4M3 = make_table(OCP_E4M3), T_OCP_E5M2 = make_table(OCP_E5M2);
const Table T_FNUZ_E4M3 = make_table(FNUZ_E4M3), T_FNUZ_E5M2 = make_table(FNUZ_E5M2), T_E2M1 = make_table(E2M1);

template <bool E5> const Table& byte_table(const Wave& w) {
  if (w.k->arch == Arch::gfx942) return E5 ? T_FNUZ_E5M2 : T_FNUZ_E4M3;
  return E5 ? T_OCP_E5M2 : T_OCP_E4M3;
}

template <int M, int K, bool A5, bool B5>
void mfma_fp8(Wave& w, const Inst& I) {
  refuse_broadcast(w, I);
  constexpr int GROUPS = LANES / M, PER_LANE = K / GROUPS;
  const Table &ta = byte_table<A5>(w), &tb = byte_table<B5>(w);
  float at[K * M], bt[K * M], out[M * M];
  u32 tmp[LANES];
  for (int q = 0; q < PER_LANE / 4; ++q) {
    const u32* pa = register_lanes(w, I, 1, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < 4; ++e) at[((l / M) * PER_LANE + q * 4 + e) * M + l % M] = ta[pa[l] >> (8 * e) & 0xff];
    const u32* pb = register_lanes(w, I, 2, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < 4; ++e) bt[((l / M) * PER_LANE + q * 4 + e) * M + l % M] = tb[pb[l] >> (8 * e) & 0xff];
  }
  multiply<M>(at, bt, K, out);
  accumulate<M>(w, I, out);
}

// ---- scaled f8f6f4: cbsz and blgp name the formats (0 e4m3, 1 e5m2, 4 e2m1).
// An 8-bit operand's 32 bytes are two halves of 16: k = 16 g and K / 2 + 16 g. An e2m1 operand's 16 bytes are
// k = 32 g, low nibble first.
// ``out`` is [K][M].
template <int M, int K>
void decode_f8f6f4(Wave& w, const Inst& I, int op, int format, float* out) {
  u32 tmp[LANES];
  const int words = format == 4 ? 4 : 8;
  if (format != 0 && format != 1 && format != 4) fail(w, "f8f6f4 operand format " + std::to_string(format) + " (6-bit) is not modelled");
  if (I.ops[op].width != words) fail(w, "f8f6f4 operand of " + std::to_string(I.ops[op].width) + " registers for format " + std::to_string(format));
  const float* t = (format == 4 ? T_E2M1 : format == 1 ? T_OCP_E5M2 : T_OCP_E4M3).data();
  for (int q = 0; q < words; ++q) {
    const u32* p = register_lanes(w, I, op, q, tmp);
    for (int g = 0; g < LANES / M; ++g) {
      const u32* lanes = p + g * M;
      if (format == 4) {
        for (int e = 0; e < 8; ++e)
          for (int i = 0; i < M; ++i) out[(32 * g + 8 * q + e) * M + i] = t[lanes[i] >> (4 * e) & 15];
      } else {
        const int k0 = (q < 4 ? 0 : K / 2) + 16 * g + 4 * (q & 3);
        for (int e = 0; e < 4; ++e)
          for (int i = 0; i < M; ++i) out[(k0 + e) * M + i] = t[lanes[i] >> (8 * e) & 0xff];
      }
    }
  }
}

template <int M, int K, bool SCALED>
void mfma_f8f6f4(Wave& w, const Inst& I) {
  constexpr int BLOCKS = K / 32;
  float at[K * M], bt[K * M], part[M * M], sum[M * M] = {};
  decode_f8f6f4<M, K>(w, I, 1, I.cbsz, at);
  decode_f8f6f4<M, K>(w, I, 2, I.blgp, bt);
  u32 ta[LANES], tb[LANES];
  const u32 *sa = nullptr, *sb = nullptr;
  int byte_a = 0, byte_b = 0;
  if (SCALED) {
    sa = word(w, I, 4, 0, 0, ta);
    sb = word(w, I, 5, 0, 1, tb);
    byte_a = (I.op_sel & 1) | (I.op_sel_hi & 1) << 1;
    byte_b = (I.op_sel >> 1 & 1) | (I.op_sel_hi >> 1 & 1) << 1;
  }
  for (int b = 0; b < BLOCKS; ++b) {
    multiply<M>(at + 32 * b * M, bt + 32 * b * M, 32, part);
    float row_scale[M], col_scale[M];
    bool moderate = true;  // the product of two scales stays a normal float: no rounding on the way
    for (int i = 0; i < M; ++i) {
      const u32 ra = SCALED ? sa[b * M + i] >> (8 * byte_a) & 0xff : 127, cb = SCALED ? sb[b * M + i] >> (8 * byte_b) & 0xff : 127;
      moderate &= ra >= 90 && ra <= 164 && cb >= 90 && cb <= 164;
      row_scale[i] = e8m0_to_f32(ra);
      col_scale[i] = e8m0_to_f32(cb);
    }
    for (int i = 0; i < M; ++i) {
      if (moderate) {
        for (int j = 0; j < M; ++j) sum[i * M + j] += part[i * M + j] * (row_scale[i] * col_scale[j]);
      } else {
        for (int j = 0; j < M; ++j) sum[i * M + j] += float(double(part[i * M + j]) * row_scale[i] * col_scale[j]);
      }
    }
  }
  accumulate<M>(w, I, sum);
}

// ---- integers: exact, wrapping in 32 bits
template <int M, int K>
void mfma_i8(Wave& w, const Inst& I) {
  refuse_broadcast(w, I);
  constexpr int GROUPS = LANES / M, PER_LANE = K / GROUPS, REGS = M * M / LANES;
  int8_t a[M][K], b[M][K];
  u32 tmp[LANES];
  for (int q = 0; q < PER_LANE / 4; ++q) {
    const u32* pa = register_lanes(w, I, 1, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < 4; ++e) a[l % M][(l / M) * PER_LANE + q * 4 + e] = int8_t(pa[l] >> (8 * e));
    const u32* pb = register_lanes(w, I, 2, q, tmp);
    for (int l = 0; l < LANES; ++l)
      for (int e = 0; e < 4; ++e) b[l % M][(l / M) * PER_LANE + q * 4 + e] = int8_t(pb[l] >> (8 * e));
  }
  u32 r[REGS][LANES];
  for (int q = 0; q < REGS; ++q) {
    const u32* c = register_lanes(w, I, 3, q, tmp);
    for (int l = 0; l < LANES; ++l) {
      u32 s = c[l];
      for (int k = 0; k < K; ++k) s += u32(int32_t(a[result_row(M, l, q)][k]) * b[l % M][k]);
      r[q][l] = s;
    }
  }
  for (int q = 0; q < REGS; ++q) {
    std::memcpy(w.lane(I.ops[0].reg + q), r[q], sizeof r[q]);
    mark_written(w, I.ops[0].reg + q, ~0ull);
  }
}

}  // namespace

#define MM "cbsz abid blgp"
#define MF(n, d, a, f) {n, "dv" d "f,sv" a "u,sv" a "u,sa" d "f", MM, CLASS_MFMA, f}
const OpDef MFMA[] = {
    MF("v_mfma_f32_16x16x16_bf16", "4", "2", (mfma_f32<16, 16, Bf16>)),
    MF("v_mfma_f32_16x16x16_bf16_1k", "4", "2", (mfma_f32<16, 16, Bf16>)),
    MF("v_mfma_f32_16x16x16bf16_1k", "4", "2", (mfma_f32<16, 16, Bf16>)),
    MF("v_mfma_f32_32x32x8_bf16", "16", "2", (mfma_f32<32, 8, Bf16>)),
    MF("v_mfma_f32_32x32x8_bf16_1k", "16", "2", (mfma_f32<32, 8, Bf16>)),
    MF("v_mfma_f32_32x32x8bf16_1k", "16", "2", (mfma_f32<32, 8, Bf16>)),
    MF("v_mfma_f32_16x16x32_bf16", "4", "4", (mfma_f32<16, 32, Bf16>)),
    MF("v_mfma_f32_32x32x16_bf16", "16", "4", (mfma_f32<32, 16, Bf16>)),
    MF("v_mfma_f32_16x16x16_f16", "4", "2", (mfma_f32<16, 16, Half>)),
    MF("v_mfma_f32_32x32x8_f16", "16", "2", (mfma_f32<32, 8, Half>)),
    MF("v_mfma_f32_16x16x32_f16", "4", "4", (mfma_f32<16, 32, Half>)),
    MF("v_mfma_f32_32x32x16_f16", "16", "4", (mfma_f32<32, 16, Half>)),
    MF("v_mfma_f32_16x16x4_f32", "4", "1", (mfma_f32<16, 4, Single>)),
    MF("v_mfma_f32_32x32x2_f32", "16", "1", (mfma_f32<32, 2, Single>)),
    MF("v_mfma_f32_16x16x32_fp8_fp8", "4", "2", (mfma_fp8<16, 32, false, false>)),
    MF("v_mfma_f32_16x16x32_fp8_bf8", "4", "2", (mfma_fp8<16, 32, false, true>)),
    MF("v_mfma_f32_16x16x32_bf8_fp8", "4", "2", (mfma_fp8<16, 32, true, false>)),
    MF("v_mfma_f32_16x16x32_bf8_bf8", "4", "2", (mfma_fp8<16, 32, true, true>)),
    MF("v_mfma_f32_32x32x16_fp8_fp8", "16", "2", (mfma_fp8<32, 16, false, false>)),
    MF("v_mfma_f32_32x32x16_fp8_bf8", "16", "2", (mfma_fp8<32, 16, false, true>)),
    MF("v_mfma_f32_32x32x16_bf8_fp8", "16", "2", (mfma_fp8<32, 16, true, false>)),
    MF("v_mfma_f32_32x32x16_bf8_bf8", "16", "2", (mfma_fp8<32, 16, true, true>)),
    {"v_mfma_i32_16x16x32_i8", "dv4u,sv2u,sv2u,sa4u", MM, CLASS_MFMA, mfma_i8<16, 32>},
    {"v_mfma_i32_32x32x16_i8", "dv16u,sv2u,sv2u,sa16u", MM, CLASS_MFMA, mfma_i8<32, 16>},
    {"v_mfma_i32_16x16x64_i8", "dv4u,sv4u,sv4u,sa4u", MM, CLASS_MFMA, mfma_i8<16, 64>},
    {"v_mfma_i32_32x32x32_i8", "dv16u,sv4u,sv4u,sa16u", MM, CLASS_MFMA, mfma_i8<32, 32>},
    // Operand widths of the f8f6f4 forms depend on the format: 0 means checked by the handler.
    {"v_mfma_f32_16x16x128_f8f6f4", "dv4f,sv0u,sv0u,sa4f", MM, CLASS_MFMA, mfma_f8f6f4<16, 128, false>},
    {"v_mfma_f32_32x32x64_f8f6f4", "dv16f,sv0u,sv0u,sa16f", MM, CLASS_MFMA, mfma_f8f6f4<32, 64, false>},
    {"v_mfma_scale_f32_16x16x128_f8f6f4", "dv4f,sv0u,sv0u,sa4f,sa1u,sa1u", MM " op_sel op_sel_hi", CLASS_MFMA, mfma_f8f6f4<16, 128, true>},
    {"v_mfma_scale_f32_32x32x64_f8f6f4", "dv16f,sv0u,sv0u,sa16f,sa1u,sa1u", MM " op_sel op_sel_hi", CLASS_MFMA, mfma_f8f6f4<32, 64, true>},
};
static const OpTable mfma_table(MFMA);

}  // namespace cdna
