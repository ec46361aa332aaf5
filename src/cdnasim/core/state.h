// SPDX-License-Identifier: Apache-2.0
// The state of the simulated machine and the decoded instruction: what every other file of the core shares.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace cdna {

constexpr int LANES = 64;
constexpr int MAX_OPERANDS = 6;
// Scalar register file, indexed as the hardware encodes scalar operands.
constexpr int SGPR_FILE = 128;
constexpr int REG_FLAT_SCRATCH = 102;
constexpr int REG_VCC = 106;
constexpr int REG_M0 = 124;
constexpr int REG_EXEC = 126;

struct SimError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Arch : int32_t { gfx942 = 942, gfx950 = 950 };

enum OperandKind : int32_t { KIND_NONE, KIND_VGPR, KIND_SGPR, KIND_CONST, KIND_SCC, KIND_VCCZ, KIND_EXECZ, KIND_OFF };
enum OperandFlags : int32_t { FLAG_NEG = 1, FLAG_ABS = 2, FLAG_SEXT = 4 };

// Cache policy bits, as LLVM's CPol encodes them for gfx940 and later.
enum CachePolicy : int32_t { CPOL_SC0 = 1, CPOL_NT = 2, CPOL_SC1 = 16 };

enum InstClass : int32_t {
  CLASS_SALU, CLASS_VALU, CLASS_MFMA, CLASS_SMEM, CLASS_VMEM_LOAD, CLASS_VMEM_STORE, CLASS_VMEM_ATOMIC,
  CLASS_LDS, CLASS_BRANCH, CLASS_WAIT, CLASS_BARRIER, CLASS_SLEEP, CLASS_OTHER, NUM_CLASSES
};

struct Operand {
  int8_t kind = KIND_NONE;
  int8_t flags = 0;   // OperandFlags
  int16_t width = 0;  // dwords
  int32_t reg = 0;    // register index (AGPRs already mapped behind the VGPRs)
  uint64_t value = 0; // KIND_CONST: the bits as the operand's type reads them
};

// Small, so that a kernel's code stays in the host's cache. Mirrored field by field by cdnasim/native.py.
struct Inst {
  void (*fn)(struct Wave&, const Inst&);
  int32_t opcode;
  int32_t index;      // in Kernel::code
  int8_t cls, num_ops;
  int8_t plain;       // no DPP, SDWA, op_sel, clamp, omod, neg or abs: operands and result are whole registers
  int8_t clamp, omod, op_sel, op_sel_hi, neg_lo, neg_hi;
  int8_t row_mask, bank_mask, bound_ctrl;
  int16_t dpp_ctrl;                                          // < 0: no DPP
  int8_t sdwa, dst_sel, dst_unused, src0_sel, src1_sel;      // sdwa 0: no SDWA
  int8_t cpol, offen, idxen, lds, cbsz, abid, blgp;
  int32_t offset0, offset1, imm, target, line;
  Operand ops[MAX_OPERANDS];
};

using Handler = void (*)(struct Wave&, const Inst&);

// One row of the opcode table. ``operands`` is a comma-separated list of role + class + dwords + type:
// role d (written), s (read), x (both); class v (VGPR or AGPR), s (scalar), a (any vector-ALU source),
// i (immediate), l (label), o (address register or "off"); type u, i, f, h (f16), b (bf16), d (f64).
// ``mods`` names the modifiers that this opcode accepts, space-separated.
struct OpDef {
  const char* name;
  const char* operands;
  const char* mods;
  int32_t cls;
  Handler fn;
};

void add_ops(const OpDef* table, size_t count);
int32_t num_ops();
const OpDef& op_def(int32_t index);
template <size_t N>
struct OpTable {
  explicit OpTable(const OpDef (&t)[N]) { add_ops(t, N); }
};

struct Kernel {
  std::vector<Inst> code;
  Arch arch = Arch::gfx950;
  int32_t num_vgprs = 0;  // VGPRs and AGPRs together
  int32_t num_sgprs = 0;
  int32_t lds_bytes = 0, scratch_bytes = 0;
  int32_t ieee = 1, dx10_clamp = 1;
  std::vector<uint64_t> executed;  // per instruction, in all launches
};

// WAVE_ROUND: until the other ranks see what this one stored (the end of the round).
enum WaveState : int32_t { WAVE_READY, WAVE_BARRIER, WAVE_DONE, WAVE_ROUND };

// A vector memory operation that a wave has issued and not yet waited for (hostile memory model). A load is a
// PendingLoad that samples memory and writes the registers when it completes; done loads keep their place in line.
struct PendingStore {
  uint64_t addr;
  uint32_t bytes;
  int32_t policy;
  uint8_t data[16];
};
struct PendingLoad {
  virtual void complete(struct Wave& w) = 0;
  virtual ~PendingLoad() = default;
};
struct PendingOp {
  std::unique_ptr<PendingLoad> load;
  int reg = 0, width = 0;  // vector registers that the load fills
  bool writes_back = false;  // a write-back of the cache: a store of what is in it
  std::vector<PendingStore> stores;
  uint64_t first = ~0ull, end = 0;  // all of the stores' bytes are between
};

// A wave's operations that have not completed, the oldest first. Keeps its memory.
class PendingOps {
 public:
  size_t size() const { return ops_.size() - head_; }
  bool empty() const { return ops_.size() == head_; }
  auto begin() { return ops_.begin() + ptrdiff_t(head_); }
  auto end() { return ops_.end(); }
  PendingOp& operator[](size_t i) { return ops_[head_ + i]; }
  void push_back(PendingOp op) { ops_.push_back(std::move(op)); }
  PendingOp pop_front() {
    PendingOp op = std::move(ops_[head_++]);
    if (empty() || head_ > 64) {
      ops_.erase(ops_.begin(), ops_.begin() + ptrdiff_t(head_));
      head_ = 0;
    }
    return op;
  }

 private:
  std::vector<PendingOp> ops_;
  size_t head_ = 0;
};

// An operation of the wave's counters that nothing has waited for, and the registers that it fills.
struct Unwaited {
  int32_t reg = 0, line = 0;
  int16_t width = 0;
  bool vector = false, lds = false, store = false;  // lds: answers in order
};
struct Waits {
  std::vector<Unwaited> vm, lgkm;  // the oldest first
  uint8_t vgpr[512] = {}, sgpr[SGPR_FILE] = {};
};

struct Wave {
  uint32_t* v = nullptr;        // [num_vgprs][64]
  uint32_t s[SGPR_FILE] = {};
  uint32_t scc = 0;
  bool fp16_ovfl = false;       // MODE: conversions to 8 bits saturate
  int32_t pc = 0;
  int32_t state = WAVE_READY;
  int32_t wave_in_group = 0;
  bool yield = false;           // give the turn to another wave after this instruction
  bool again = false;           // the instruction did nothing yet and is to be run again
  bool retry = false;           // its next instruction was tried before
  bool atomic = false;          // when the round ends (an atomic on memory of peers)
  uint64_t peer_round = 0;      // the round of its last deferred store to peer memory
  uint64_t first_clock = 0, last_clock = 0;  // the rank's clock when it was placed, and when it last ran
  struct Workgroup* wg = nullptr;
  struct Machine* m = nullptr;
  struct Rank* r = nullptr;
  const Kernel* k = nullptr;
  uint64_t issued = 0;
  uint64_t barrier_count = 0;
  uint64_t by_class[NUM_CLASSES] = {};
  uint64_t* vdef = nullptr;     // lanes ever written, per VGPR (null: not tracked)
  uint32_t sdef[4] = {};
  std::vector<uint8_t> scratch; // [64][scratch_bytes]
  // The last poll, for deadlock reports.
  uint64_t last_load_addr = 0;
  uint32_t last_load_value = 0;
  int32_t last_load_line = 0;
  uint64_t polls = 0;
  // Lines loaded past the caches since the last s_sleep: what a poll that finds nothing waits on.
  std::vector<uint64_t> poll_lines, parked_lines;
  bool poll_overflow = false, preempted = false, parked = false;
  PendingOps pending;
  int pending_stores = 0;       // of these, stores and write-backs that have not completed
  bool draining = false;        // in its rank's list of waves that stand still with stores under way
  std::unique_ptr<Waits> waits; // when waits are checked
  uint64_t depth = 0;           // hand-offs on the longest chain that led here

  uint64_t exec() const { uint64_t e; std::memcpy(&e, &s[REG_EXEC], 8); return e; }
  void set_exec(uint64_t e) { std::memcpy(&s[REG_EXEC], &e, 8); }
  uint64_t vcc() const { uint64_t e; std::memcpy(&e, &s[REG_VCC], 8); return e; }
  uint64_t s64(int r) const { uint64_t e; std::memcpy(&e, &s[r], 8); return e; }
  uint32_t* lane(int reg) { return v + size_t(reg) * LANES; }
};

// Who read and wrote each byte of a dword of LDS: a wave, or -1 nobody, -2 several (core/lds_shadow.h).
struct LdsBytes { int8_t reader[4], writer[4]; uint8_t written; };

struct Workgroup {
  int32_t id[3] = {}, linear = 0;
  int32_t rank = 0, cu = 0, xcd = 0;
  struct Launch* launch = nullptr;
  uint8_t* lds = nullptr;
  uint32_t lds_bytes = 0;
  uint32_t *lds_wtag = nullptr, *lds_rtag = nullptr;  // per dword, when LDS is checked (core/lds_shadow.h)
  std::vector<LdsBytes> lds_mixed;                    // per dword, once a sub-dword access needs it
  std::vector<Wave> waves;
  uint8_t* block = nullptr;                           // what all these lie in, of the rank's pool
  int32_t at_barrier = 0, done = 0;
  uint64_t issued = 0;
};

[[noreturn]] void fail(const Wave& w, const std::string& what);
std::string hex(uint64_t v);

}  // namespace cdna
