// What an instrumented text calls: how often its pieces ran, and from where in the caches of a Xeon with matrix tiles each access
// came. Compiled without vector registers, which belong to the text. One thread.
#include <stdint.h>
#include <string.h>

enum { LOAD, STORE, MODIFY, PAST, FETCH, FETCH_NEAR, TILE_LOAD, TILE_STORE };
enum { PIECES = 1 << 14, ACCESSES = 1 << 16, LEVELS = 4, REGIONS = 8, OPEN = 16 };

uint64_t tiles_pieces[PIECES];                  // executions of each piece
uint64_t tiles_lines[ACCESSES][LEVELS];         // lines that each access took: from the first level, the second, memory; and lines it drove out
uint64_t tiles_regions[ACCESSES][REGIONS];      // accesses to each array
int32_t tiles_kinds[ACCESSES], tiles_bytes[ACCESSES];
uint64_t tiles_bounds[REGIONS][2];
int32_t tiles_phases[ACCESSES];                 // of each access
uint64_t tiles_visits[REGIONS];                 // how often a phase followed another one
static int phase;

struct line { uint64_t tag; int dirty; };
static struct line first[64][12], second[2048][16];
static uint64_t open_lines[OPEN];
static int open_at;

// the line moved to the front of its set; 0 if it was not there
static int find(struct line* set, const int ways, const uint64_t tag, const int dirty) {
    for (int way = 0; way < ways; ++way)
        if (set[way].tag == tag) {
            const struct line found = {tag, set[way].dirty | dirty};
            memmove(set + 1, set, way * sizeof *set);
            set[0] = found;
            return 1;
        }
    return 0;
}

static struct line put(struct line* set, const int ways, const uint64_t tag, const int dirty) {
    const struct line out = set[ways - 1];
    memmove(set + 1, set, (ways - 1) * sizeof *set);
    set[0] = (struct line){tag, dirty};
    return out;
}

static int put_second(const uint64_t tag, const int dirty) {  // whether a changed line leaves for memory
    const struct line out = put(second[tag % 2048], 16, tag, dirty);
    return out.tag && out.dirty;
}

static void touch(const int id, const uint64_t tag, const int writes, const int fetches) {
    if (find(first[tag % 64], 12, tag, writes)) {
        tiles_lines[id][0] += 1;
        return;
    }
    const int is_near = find(second[tag % 2048], 16, tag, 0);
    tiles_lines[id][is_near ? 1 : 2] += 1;
    if (!is_near) tiles_lines[id][3] += put_second(tag, 0);
    if (fetches) return;
    const struct line out = put(first[tag % 64], 12, tag, writes);
    if (out.tag && out.dirty && !find(second[out.tag % 2048], 16, out.tag, 1)) tiles_lines[id][3] += put_second(out.tag, 1);
}

static void past(const int id, const uint64_t tag) {
    for (int each = 0; each < OPEN; ++each)
        if (open_lines[each] == tag) return;
    open_lines[open_at++ % OPEN] = tag;
    tiles_lines[id][2] += 1;
}

__attribute__((used)) void tiles_trace(const uint64_t at, const int id, const int64_t stride) {
    const int kind = tiles_kinds[id];
    if (tiles_phases[id] != phase) tiles_visits[phase = tiles_phases[id]] += 1;
    for (int each = 0; each < REGIONS; ++each) tiles_regions[id][each] += tiles_bounds[each][0] <= at && at < tiles_bounds[each][1];
    if (kind == TILE_LOAD || kind == TILE_STORE) {
        for (int row = 0; row < 16; ++row) {
            const uint64_t from = at + row * stride;
            for (uint64_t tag = from / 64; tag <= (from + 63) / 64; ++tag) touch(id, tag, kind == TILE_STORE, 0);
        }
        return;
    }
    for (uint64_t tag = at / 64; tag <= (at + tiles_bytes[id] - 1) / 64; ++tag)
        if (kind == PAST) past(id, tag);
        else touch(id, tag, kind == STORE || kind == MODIFY, kind == FETCH);
}

void tiles_forget(void) {
    memset(tiles_pieces, 0, sizeof tiles_pieces);
    memset(tiles_lines, 0, sizeof tiles_lines);
    memset(tiles_regions, 0, sizeof tiles_regions);
    memset(tiles_visits, 0, sizeof tiles_visits);
}

// on the stack: where to return, which access, a stride, %rax; the address in %rax
asm(".text\n"
    ".globl tiles_entry\n"
    "tiles_entry:\n"
    "\tpushfq\n\tpushq %rcx\n\tpushq %rdx\n\tpushq %rsi\n\tpushq %rdi\n\tpushq %r8\n\tpushq %r9\n\tpushq %r10\n\tpushq %r11\n\tpushq %rbp\n"
    "\tmovq %rax, %rdi\n\tmovl 88(%rsp), %esi\n\tmovq 96(%rsp), %rdx\n"
    "\tmovq %rsp, %rbp\n\tandq $-16, %rsp\n\tcld\n\tcall tiles_trace\n\tmovq %rbp, %rsp\n"
    "\tpopq %rbp\n\tpopq %r11\n\tpopq %r10\n\tpopq %r9\n\tpopq %r8\n\tpopq %rdi\n\tpopq %rsi\n\tpopq %rdx\n\tpopq %rcx\n\tpopfq\n\tret\n");
