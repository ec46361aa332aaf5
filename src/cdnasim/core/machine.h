// SPDX-License-Identifier: Apache-2.0
// The machine: memory, checks, counters, the memory model and the scheduler's data.
#pragma once

#include <algorithm>
#include <random>
#include <unordered_map>

#include "state.h"

namespace cdna {

enum CheckLevel : int32_t { CHECK_OFF, CHECK_WARN, CHECK_ERROR };
// Order shared with cdnasim/native.py.
enum Check : int32_t {
  CHECK_REGISTER, CHECK_MEMORY_UNWRITTEN, CHECK_LDS_UNWRITTEN, CHECK_MISALIGNED, CHECK_LDS_RACE, CHECK_BARRIER,
  CHECK_OFFSET_WRAP, CHECK_WAITS, CHECK_NOT_FINITE, NUM_CHECKS
};

// What one wave did: the instructions it ran, and its registers before the first run of one source line.
struct Watch {
  int32_t rank = -1, workgroup = 0, wave = 0, dump_line = 0;
  uint64_t limit = 0;
  std::vector<int32_t> lines;
  std::vector<uint32_t> vgprs, sgprs;
  bool dumped = false;
};

// The hand-off that last wrote 8 bytes of memory past the caches: how many hand-offs led to it, and who did it.
struct Handoff { uint32_t depth; int32_t rank, workgroup; };

// Allocations begin a page in the hostile memory model.
constexpr uint64_t MODEL_PAGE = 4096;

struct Allocation {
  uint64_t base = 0, bytes = 0;
  uint64_t model_base = 0;  // its address in the hostile memory model
  int32_t rank = 0;       // owner
  int32_t peer = 0;       // other ranks may touch it
  int32_t read_only = 0;
  std::vector<uint64_t> written;  // a bit per byte; empty: all of it counts as written
  std::vector<uint64_t> touched;  // a bit per 64-byte line read or written, over all launches since it was cleared
  std::string name;
  uint64_t end() const { return base + bytes; }
};

// By policy: sc0 is 1, sc1 2, nt 4.
struct Traffic { uint64_t load_bytes[8] = {}, store_bytes[8] = {}; };

// The bank conflicts of one access of an instruction, for the address distances it had last.
struct BankMemo {
  uint32_t offset[LANES] = {};
  uint64_t mask = 0;
  uint32_t cycles = 0;
  bool known = false;
};

// What one wave did, kept after it ended. Mirrored by cdnasim/native.py as a row of 64-bit words.
struct WaveRecord {
  uint64_t workgroup, wave, compute_unit, issued, barriers, polls, depth, first_clock, last_clock;
  uint64_t by_class[NUM_CLASSES];
};

// A stretch of a wave's time: from ``begin`` to ``end`` (the rank's clock) it ran, and ended at ``line``.
struct Span {
  uint64_t begin, end;
  int32_t workgroup, wave, line, kind;  // kind: 0 goes on, 1 waits at a barrier, 2 sleeps, 3 ended, 4 waits on peers
};

struct Counters {
  uint64_t by_class[NUM_CLASSES] = {};
  Traffic traffic;
  uint64_t lds_read_bytes = 0, lds_write_bytes = 0, lds_conflict_cycles = 0, lds_accesses = 0;
  uint64_t longest_wave = 0, waves = 0, handoff_depth = 0;
};

struct Launch {
  Kernel* kernel = nullptr;
  int32_t grid[3] = {1, 1, 1}, block[3] = {1, 1, 1};
  int32_t rank = 0, lds_bytes = 0, persistent = 0;
  uint64_t kernarg = 0, dispatch_packet = 0;
  int32_t next = 0, finished = 0, total = 0;
  Counters counters;
  std::vector<uint64_t> executed;  // per instruction
  std::vector<BankMemo> banks;     // two an instruction, once it touched LDS
  std::vector<WaveRecord> waves;
  int32_t user_sgprs = 0, kernarg_sgpr = -1, dispatch_sgpr = -1, queue_sgpr = -1, dispatch_id_sgpr = -1,
          private_size_sgpr = -1, preload_first = -1, preload_dwords = 0, preload_offset = 0;
  int32_t id_x = 1, id_y = 0, id_z = 0, workgroup_info = 0, workitem_dims = 0;
};

// A store to peer memory that other ranks do not see yet (they run in rounds: core/scheduler.cpp).
struct Deferred {
  uint64_t addr;
  uint32_t bytes, depth;
  int32_t workgroup;
  uint8_t data[16];
};

// A rank's deferred dwords, by address / 4: open addressing, emptied often.
class Overlay {
 public:
  // Whether a dword of one of the lanes may be here: by 128-byte lines, of which several share a bit.
  bool may_hold(const uint64_t* addr, uint64_t mask, uint32_t bytes) const {
    if (used.empty()) return false;
    for (; mask; mask &= mask - 1) {
      const uint64_t first = addr[__builtin_ctzll(mask)], last = first + bytes - 1;
      if (line_bits[line(first) / 64] >> (line(first) % 64) & 1 || line_bits[line(last) / 64] >> (line(last) % 64) & 1) return true;
    }
    return false;
  }
  const uint32_t* find(uint64_t key) const {
    if (used.empty()) return nullptr;
    const size_t i = place(key);
    return slots[i].key == key ? &slots[i].value : nullptr;
  }
  void put(uint64_t key, uint32_t value) {
    if (2 * used.size() >= slots.size()) grow();
    const size_t i = place(key);
    if (slots[i].key != key) used.push_back(i);
    slots[i] = {key, value};
    line_bits[line(4 * key) / 64] |= 1ull << (line(4 * key) % 64);
  }
  void clear() {
    if (used.empty()) return;
    for (size_t i : used) slots[i].key = NONE;
    used.clear();
    std::memset(line_bits, 0, sizeof line_bits);
  }

 private:
  static constexpr uint64_t NONE = ~0ull;
  struct Slot { uint64_t key = NONE; uint32_t value = 0; };
  static size_t line(uint64_t addr) { return (addr >> 7) * 0x9e3779b97f4a7c15ull >> 52; }
  size_t place(uint64_t key) const {  // where the key is, or would be
    size_t i = key * 0x9e3779b97f4a7c15ull >> 20 & (slots.size() - 1);
    while (slots[i].key != key && slots[i].key != NONE) i = (i + 1) & (slots.size() - 1);
    return i;
  }
  void grow() {
    std::vector<Slot> old(std::max<size_t>(1024, 2 * slots.size()));
    old.swap(slots);
    for (size_t& i : used) {
      const Slot s = old[i];
      i = place(s.key);
      slots[i] = s;
    }
  }
  std::vector<Slot> slots;
  std::vector<size_t> used;
  uint64_t line_bits[64] = {};
};

// A rank's part of the machine: all that its waves change while the ranks run side by side.
struct Rank {
  struct Machine* m = nullptr;
  int32_t id = 0;
  std::mt19937_64 rng;
  uint64_t clock = 0;           // instructions executed by this rank
  uint64_t progress_clock = 0;  // when memory last changed, a barrier opened or a wave ended
  Allocation* last_hit = nullptr;
  std::vector<Wave*> ready, woken, waiting;                 // waiting: for the end of the round
  Wave* next = nullptr;                                     // chosen, and neither of ``ready`` nor run yet
  std::vector<Wave*> draining;                              // stand still with stores under way (hostile memory)
  std::unordered_map<uint64_t, std::vector<Wave*>> parked;  // by 128-byte line
  std::vector<std::unique_ptr<Workgroup>> live;
  std::vector<int> free_cu;     // free workgroup slots of each compute unit
  size_t turn = 0;
  std::vector<Launch*> queue;
  size_t at = 0;                // in queue
  std::unordered_map<uint64_t, Handoff> handoffs;  // by address / 8
  std::vector<Deferred> deferred;
  Overlay overlay;
  std::vector<std::pair<std::string, std::string>> warnings;  // (kind and line, text)
  std::vector<Span> spans;
  std::string error;
  std::vector<uint8_t*> slabs, pool;  // pool: blocks of ended workgroups, of pool_bytes each
  size_t pool_bytes = 0;
};

struct Machine {
  Arch arch = Arch::gfx950;
  int32_t ranks = 1, num_xcd = 8, num_cu = 256, lds_per_cu = 160 * 1024;
  std::vector<std::unique_ptr<Allocation>> allocations;  // by base
  std::vector<Allocation*> in_order;                     // in which they were made
  uint64_t model_end = 0;                                // the next one's address in the hostile memory model
  std::vector<Rank> rank;
  int32_t check[NUM_CHECKS] = {};
  std::vector<std::string> warnings;
  std::unordered_map<std::string, uint64_t> warning_count;
  uint64_t stall_bound = 0;       // instructions without progress that count as a deadlock
  int32_t schedule = 0, quantum_min = 60, quantum_max = 150;
  int32_t hostile = 0, unasked = 1;  // unasked: hostile memory fetches lines that nobody asked for
  int32_t count_traffic = 1;
  std::mt19937_64 rng;            // of what is between ranks
  int32_t threads = 1;
  int32_t defer = 0;              // ranks run side by side: stores to peers wait for the end of the round
  uint64_t round = 1;
  struct Hostile* model = nullptr;
  Watch watch;
  int32_t count_handoffs = 0, timeline = 0;

  Allocation* find(uint64_t addr);
  uint64_t clock() const { uint64_t n = 0; for (const Rank& r : rank) n += r.clock; return n; }
};

uint64_t machine_clock(const Wave& w);
void report(Wave& w, const char* kind, const std::string& text);

// ---- checks.cpp
void check_waits(Wave& w, const Inst& I);
uint64_t bounded_lanes(Wave& w, const Inst& I);
void check_born(Wave& w, const Inst& I, uint64_t bounded);

// ---- vmem.cpp
// The lines of a wave's polls, each once; false, and noted, when they are too many to wait on.
bool distinct_poll_lines(Wave& w);

// ---- memory.cpp
// Checks a vector access (every active lane, ``bytes`` each) and accounts for it.
// True when a peer may touch the memory, too.
bool check_access(Wave& w, const Inst& I, const uint64_t* addr, uint64_t mask, uint32_t bytes, bool store, int align);
void check_scalar_access(Wave& w, uint64_t addr, uint32_t bytes);
void write_bytes(Wave& w, uint64_t addr, const void* data, uint32_t bytes);  // at once, noting progress
void memory_changed(Wave& w, uint64_t addr, uint32_t bytes);

// ---- hostile.cpp: what the architecture does not promise does not hold
struct Hostile;
void hostile_init(Machine& m);
void hostile_free(Machine& m);
bool hostile_load_waits(Wave& w, int reg, int width);
void hostile_loaded(Wave& w, std::unique_ptr<PendingLoad> load, int reg, int width);
template <class F>
std::unique_ptr<PendingLoad> pending_load(F f) {
  struct Made : PendingLoad {
    F f;
    explicit Made(F g) : f(std::move(g)) {}
    void complete(Wave&) override { f(); }
  };
  return std::make_unique<Made>(std::move(f));
}
void hostile_load(Wave& w, const Inst& I, uint64_t addr, uint32_t bytes, void* out);
void hostile_issue_store(Wave& w, std::vector<PendingStore> stores);
void hostile_atomic(Wave& w, uint64_t addr, uint32_t bytes);
void hostile_wait(Wave& w, int outstanding);
bool hostile_straggle(Wave& w, int outstanding);
void hostile_invalidate(Wave& w, const Inst& I);
void hostile_write_back(Wave& w, const Inst& I);
void hostile_tick(Wave& w);
void hostile_stand_still(Wave& w);
bool hostile_drain(Rank& r);
void hostile_drain_one(Rank& r);
void hostile_forget(Rank& r, const Workgroup& g);
void hostile_forget_caches(Machine& m);
void hostile_launch_begin(Machine& m, int rank);
void hostile_launch_end(Machine& m, int rank);

// Peer memory while ranks run side by side: what this rank wrote and others do not see yet, over memory.
void peer_load(Wave& w, uint64_t addr, uint32_t bytes, void* out);
void peer_store(Wave& w, uint64_t addr, const void* data, uint32_t bytes, bool handoff);

// ---- scheduler.cpp
void barrier(Wave& w, const Inst& I);
void end_program(Wave& w, const Inst& I);
void note_handoff_store(Wave& w, uint64_t addr);
void note_handoff_load(Wave& w, uint64_t addr);
void pool_free(Rank& r);
void start(Rank& r);                // the rank's next launch
Wave* choose(Rank& r);              // the wave to run next, taken out of ``ready``
void run_wave(Rank& r, Wave* w, int limit = 0);  // a quantum of it, or ``limit`` instructions
void unpark(Rank& r, Wave* w);
[[noreturn]] void deadlock(Machine& m, uint64_t still);
void park(Wave& w);
void wake(Rank& r, uint64_t addr, uint32_t bytes);
void run_launches(Machine& m, std::vector<std::vector<Launch*>>& queues);
std::string describe(const Wave& w);

}  // namespace cdna
