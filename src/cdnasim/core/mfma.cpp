// SPDX-License-Identifier: Apache-2.0
// Matrix instructions. EXEC is ignored. Lane layouts (one block): with G = 64 / M lane groups, lane l holds row
// (A) or column (B) l % M and the K elements of group l / M, contiguous unless noted. Results: 16x16 has row
// 4 (l / 16) + r in register r, column l % 16; 32x32 has row 8 (r / 4) + 4 (l / 32) + r % 4, column l % 32.
// 4x4 is 16 products of four lanes each: in its four, lane l holds row or column l % 4 with every K element, and of the
// result row r in register r, column l % 4.
//
// Products are exact; the order and the width in which hardware adds them is not documented. Here a sum of
// products is formed in f32 (per block of 32 for the scaled forms), and the accumulator is added to it last.
#include "fetch.h"

namespace cdna {
namespace {

using u32 = uint32_t;
using u16 = uint16_t;

typedef float Row16 __attribute__((vector_size(64), aligned(4), may_alias));

#if defined(__AVX512F__)
inline Row16 fused(Row16 a, Row16 b, Row16 c) { return Row16(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c))); }
inline Row16 spread(float x) { return Row16(_mm512_set1_ps(x)); }
#else
inline Row16 spread(float x) { return Row16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
inline Row16 fused(Row16 a, Row16 b, Row16 c) {
  for (int i = 0; i < 16; ++i) c[i] = std::fma(a[i], b[i], c[i]);
  return c;
}
#endif

// out[m][n] = sum over k, in order, of a[k][m] * b[k][n]. EXACT: the products fit f32, so that a fused multiply-add
// rounds as the product and the sum do.
template <int N, bool EXACT>
void multiply(const float* at, const float* bt, int k_len, float* out) {
  constexpr int V = N / 16, ROWS = 16 / V;
  for (int m = 0; m < N; m += ROWS) {
    Row16 acc[ROWS][V] = {};
    for (int k = 0; k < k_len; ++k) {
      const Row16* b = reinterpret_cast<const Row16*>(bt + k * N);
#pragma GCC unroll 16
      for (int i = 0; i < ROWS; ++i) {
        const Row16 x = spread(at[k * N + m + i]);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) acc[i][v] = EXACT ? fused(x, b[v], acc[i][v]) : acc[i][v] + x * b[v];
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
    if (w.vdef) check_vgpr_read(w, I, o.reg + part, ~0ull);
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
    for (int l0 = 0; l0 < LANES; l0 += 16)  // a row of the result, or half of one
      *reinterpret_cast<Row16*>(r[q] + l0) =
          *reinterpret_cast<const Row16*>(c + l0) + *reinterpret_cast<const Row16*>(out + result_row(M, l0, q) * M + l0 % M);
  }
  for (int q = 0; q < REGS; ++q) {
    std::memcpy(w.lane(I.ops[0].reg + q), r[q], sizeof r[q]);
    mark_written(w, I.ops[0].reg + q, ~0ull);
  }
}

void refuse_broadcast(Wave& w, const Inst& I) {
  if (I.cbsz | I.abid | I.blgp) fail(w, "cbsz / abid / blgp of this MFMA is not modelled");
}

// ---- elements of a plain operand: M lanes' element ``e`` of a register each
template <int M, class T>
inline void unpack(const u32* lanes, int e, float* out) {
  for (int i = 0; i < M; ++i) out[i] = T::get(lanes[i], e);
}
struct Bf16 { static constexpr bool exact = true; static constexpr int per_word = 2; static float get(u32 x, int e) { return bf16_to_f32(u16(x >> (16 * e))); } };
struct Half { static constexpr bool exact = true; static constexpr int per_word = 2; static float get(u32 x, int e) { return f16_to_f32(u16(x >> (16 * e))); } };
struct Single { static constexpr bool exact = false; static constexpr int per_word = 1; static float get(u32 x, int) { return as_f32(x); } };

template <int M, int K, class T>
void mfma_f32(Wave& w, const Inst& I) {
  refuse_broadcast(w, I);
  constexpr int GROUPS = LANES / M, PER_LANE = K / GROUPS, WORDS = PER_LANE / T::per_word;
  float t[2][K * M], out[M * M];
  u32 tmp[LANES];
  for (int side = 0; side < 2; ++side)
    for (int q = 0; q < WORDS; ++q) {
      const u32* p = register_lanes(w, I, 1 + side, q, tmp);
      for (int g = 0; g < GROUPS; ++g)
        for (int e = 0; e < T::per_word; ++e) unpack<M, T>(p + g * M, e, t[side] + (g * PER_LANE + q * T::per_word + e) * M);
    }
  multiply<M, T::exact>(t[0], t[1], K, out);
  accumulate<M>(w, I, out);
}

// 16 products of four lanes each, K elements of a lane.
template <int K, class T>
void mfma_f32_quads(Wave& w, const Inst& I) {
  refuse_broadcast(w, I);
  constexpr int WORDS = K / T::per_word;
  float t[2][K][LANES], out[4][LANES];
  u32 tmp[LANES], r[4][LANES];
  for (int side = 0; side < 2; ++side)
    for (int q = 0; q < WORDS; ++q) {
      const u32* p = register_lanes(w, I, 1 + side, q, tmp);
      for (int e = 0; e < T::per_word; ++e) unpack<LANES, T>(p, e, t[side][q * T::per_word + e]);
    }
  for (int row = 0; row < 4; ++row)
    for (int l = 0; l < LANES; ++l) {
      float sum = 0;
      for (int k = 0; k < K; ++k) sum += t[0][k][l / 4 * 4 + row] * t[1][k][l];
      out[row][l] = sum;
    }
  for (int q = 0; q < 4; ++q) {
    const u32* c = register_lanes(w, I, 3, q, tmp);
    for (int l = 0; l < LANES; ++l) r[q][l] = as_u32(as_f32(c[l]) + out[q][l]);
  }
  for (int q = 0; q < 4; ++q) {
    std::memcpy(w.lane(I.ops[0].reg + q), r[q], sizeof r[q]);
    mark_written(w, I.ops[0].reg + q, ~0ull);
  }
}

// ---- 8-bit formats. Their values are bf16's, so that two bytes say all of a code's float: ``top`` and ``next``, by
// the code without its sign. ``odd_zero``: the code of -0 is the NaN.
struct ByteCodes {
  alignas(64) uint8_t top[128], next[128];
  const float* value;
  bool odd_zero;
  explicit ByteCodes(const MiniTable& t) : value(t.data()), odd_zero(std::isnan(t[128])) {
    for (int i = 0; i < 128; ++i) {
      const u32 u = as_u32(t[size_t(i)]);
      top[i] = uint8_t(u >> 24);
      next[i] = uint8_t(u >> 16);
    }
  }
};
const ByteCodes C_OCP_E4M3(T_OCP_E4M3), C_OCP_E5M2(T_OCP_E5M2), C_FNUZ_E4M3(T_FNUZ_E4M3), C_FNUZ_E5M2(T_FNUZ_E5M2);

// The four bytes of M lanes' words as floats: byte e in out[e][lane].
template <int M>
inline void decode_bytes(const u32* lanes, const ByteCodes& c, float* out) {
#if defined(__AVX512VBMI__)
  const __m512i t0 = _mm512_load_si512(c.top), t1 = _mm512_load_si512(c.top + 64);
  const __m512i n0 = _mm512_load_si512(c.next), n1 = _mm512_load_si512(c.next + 64);
  const __m512i sign = _mm512_set1_epi8(char(0x80)), step = _mm512_set1_epi32(0x01010101);
  for (int i = 0; i < M; i += 16) {
    const __m512i x = _mm512_loadu_si512(lanes + i);
    __m512i top = _mm512_or_si512(_mm512_permutex2var_epi8(t0, x, t1), _mm512_and_si512(x, sign));
    __m512i next = _mm512_permutex2var_epi8(n0, x, n1);
    if (c.odd_zero) {
      const __mmask64 nan = _mm512_cmpeq_epi8_mask(x, sign);
      top = _mm512_mask_set1_epi8(top, nan, 0x7f);
      next = _mm512_mask_set1_epi8(next, nan, char(0xc0));
    }
    // Byte e of ``next`` and byte e of ``top`` (64 further) become the upper half of a dword.
    __m512i from = _mm512_add_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_setzero_si512());
    from = _mm512_slli_epi32(from, 2);
    from = _mm512_or_si512(_mm512_slli_epi32(from, 16), _mm512_slli_epi32(_mm512_or_si512(from, _mm512_set1_epi32(64)), 24));
    for (int e = 0; e < 4; ++e) {
      _mm512_storeu_si512(out + e * M + i, _mm512_maskz_permutex2var_epi8(0xccccccccccccccccull, next, from, top));
      from = _mm512_add_epi8(from, step);
    }
  }
#else
  for (int e = 0; e < 4; ++e)
    for (int i = 0; i < M; ++i) out[e * M + i] = c.value[lanes[i] >> (8 * e) & 0xff];
#endif
}
// The eight e2m1 nibbles of M lanes' words.
template <int M>
inline void decode_nibbles(const u32* lanes, float* out) {
#if defined(__AVX512F__)
  const __m512 table = _mm512_loadu_ps(T_E2M1.data());
  for (int i = 0; i < M; i += 16) {
    const __m512i x = _mm512_loadu_si512(lanes + i);
    for (int e = 0; e < 8; ++e) _mm512_storeu_ps(out + e * M + i, _mm512_permutexvar_ps(_mm512_srli_epi32(x, unsigned(4 * e)), table));
  }
#else
  for (int e = 0; e < 8; ++e)
    for (int i = 0; i < M; ++i) out[e * M + i] = T_E2M1[lanes[i] >> (4 * e) & 15];
#endif
}

template <bool E5> const ByteCodes& byte_codes(const Wave& w) {
  if (w.k->arch == Arch::gfx942) return E5 ? C_FNUZ_E5M2 : C_FNUZ_E4M3;
  return E5 ? C_OCP_E5M2 : C_OCP_E4M3;
}

template <int M, int K, bool A5, bool B5>
void mfma_fp8(Wave& w, const Inst& I) {
  refuse_broadcast(w, I);
  constexpr int GROUPS = LANES / M, PER_LANE = K / GROUPS;
  float t[2][K * M], out[M * M];
  u32 tmp[LANES];
  for (int side = 0; side < 2; ++side) {
    const ByteCodes& codes = side ? byte_codes<B5>(w) : byte_codes<A5>(w);
    for (int q = 0; q < PER_LANE / 4; ++q) {
      const u32* p = register_lanes(w, I, 1 + side, q, tmp);
      for (int g = 0; g < GROUPS; ++g) decode_bytes<M>(p + g * M, codes, t[side] + (g * PER_LANE + q * 4) * M);
    }
  }
  multiply<M, true>(t[0], t[1], K, out);
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
  const ByteCodes& codes = format == 1 ? C_OCP_E5M2 : C_OCP_E4M3;
  for (int q = 0; q < words; ++q) {
    const u32* p = register_lanes(w, I, op, q, tmp);
    for (int g = 0; g < LANES / M; ++g)
      if (format == 4) decode_nibbles<M>(p + g * M, out + (32 * g + 8 * q) * M);
      else decode_bytes<M>(p + g * M, codes, out + ((q < 4 ? 0 : K / 2) + 16 * g + 4 * (q & 3)) * M);
  }
}

// The scales' codes of every block of 32 k, by row of A and by column of B. False when some product of two is not far
// from f32's ends.
template <int M, int BLOCKS>
bool scale_codes(Wave& w, const Inst& I, u32 (*codes)[BLOCKS][M]) {
  u32 tmp[LANES], out_of_range = 0;
  for (int side = 0; side < 2; ++side) {
    const u32* s = word(w, I, 4 + side, 0, side, tmp);
    const int byte = (I.op_sel >> side & 1) | (I.op_sel_hi >> side & 1) << 1;
    for (int b = 0; b < BLOCKS; ++b)
      for (int i = 0; i < M; ++i) {
        const u32 c = s[b * M + i] >> (8 * byte) & 0xff;
        codes[side][b][i] = c;
        out_of_range |= u32(c - 90 > 74);
      }
  }
  return !out_of_range;
}

// out[m][n] = sum over the blocks of (sum over the block's 32 k of a[k][m] b[k][n]) * the blocks' scales, which are
// powers of two that the product stays a normal float under: no rounding on the way.
template <int M, int BLOCKS>
void multiply_scaled(const float* at, const float* bt, const u32 (*codes)[BLOCKS][M], float* out) {
  constexpr int V = M / 16, ROWS = 8 / V;
  float scale[2][BLOCKS][M];
  for (int side = 0; side < 2; ++side)
    for (int b = 0; b < BLOCKS; ++b)
      for (int i = 0; i < M; ++i) scale[side][b][i] = as_f32(codes[side][b][i] << 23);
  for (int m = 0; m < M; m += ROWS) {
    Row16 sum[ROWS][V] = {};
    for (int block = 0; block < BLOCKS; ++block) {
      Row16 acc[ROWS][V] = {};
      const float *a = at + 32 * block * M + m, *end = a + 32 * M;
      const Row16* b = reinterpret_cast<const Row16*>(bt + 32 * block * M);
#pragma GCC unroll 2
      for (; a < end; a += M, b += V) {
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
          const Row16 x = spread(a[i]);
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) acc[i][v] = fused(x, b[v], acc[i][v]);
        }
      }
      const Row16* col = reinterpret_cast<const Row16*>(scale[1][block]);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) sum[i][v] += acc[i][v] * (spread(scale[0][block][m + i]) * col[v]);
    }
    for (int i = 0; i < ROWS; ++i)
      for (int v = 0; v < V; ++v) *reinterpret_cast<Row16*>(out + (m + i) * M + 16 * v) = sum[i][v];
  }
}

// The same for any scales, through double.
template <int M, int BLOCKS>
void multiply_far(const float* at, const float* bt, const u32 (*codes)[BLOCKS][M], float* out) {
  float part[M * M];
  for (int b = 0; b < BLOCKS; ++b) {
    multiply<M, true>(at + 32 * b * M, bt + 32 * b * M, 32, part);
    for (int i = 0; i < M; ++i)
      for (int j = 0; j < M; ++j) {
        const float x = float(double(part[i * M + j]) * e8m0_to_f32(codes[0][b][i]) * e8m0_to_f32(codes[1][b][j]));
        out[i * M + j] = b ? out[i * M + j] + x : 0.0f + x;
      }
  }
}

template <int M, int K, bool SCALED>
void mfma_f8f6f4(Wave& w, const Inst& I) {
  constexpr int BLOCKS = K / 32;
  float at[K * M], bt[K * M], sum[M * M];
  decode_f8f6f4<M, K>(w, I, 1, I.cbsz, at);
  decode_f8f6f4<M, K>(w, I, 2, I.blgp, bt);
  u32 codes[2][BLOCKS][M];
  bool near = true;
  if constexpr (SCALED) near = scale_codes<M, BLOCKS>(w, I, codes);
  else
    for (auto& side : codes)
      for (auto& block : side) std::fill_n(block, M, 127u);
  if (near) multiply_scaled<M, BLOCKS>(at, bt, codes, sum);
  else multiply_far<M, BLOCKS>(at, bt, codes, sum);
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
    MF("v_mfma_f32_4x4x4_16b_bf16", "4", "2", (mfma_f32_quads<4, Bf16>)),
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
