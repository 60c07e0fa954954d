// Forward to codes by a given scale, and their transposed copy: math.md, equations (1) to (6), (Q1) and
// (Q5), and section 10.
//
// When: many rows, a multiple of 16, of which at least 32 fit shared memory, and no matrix but x is read.
// Who: a block has tiles of TILE_ROWS rows, and GROUPS of these rows in each step. A thread has the same
// columns in each row. Where: a row is read once, into a ring of STAGES steps in shared memory. A thread
// reads back only what it copied itself. It copies STAGES - 1 steps ahead, also from the next tile, so that
// rows arrive while a tile's copy is stored. The codes of a tile wait in shared memory, as words of four
// columns. The words of a row change places, so that accesses along rows and down columns have no bank
// conflicts.
//
// A tile has 32 or 64 bytes of a column: whole sectors of the L2, but part of a line. The stores ask the L2
// to keep them until other blocks fill the line. 16384x4096 takes 78 us, and 83 us without that hint.

static_assert(SCALE == GIVEN && CLUSTER == 1 && !LOADS_AT_USE && !HAS_COLUMN_GROUPS, "a block has whole rows, for a scale that is known");

constexpr int TILE_ROWS = GROUPS * UNROLL, STRIPS = TILE_ROWS / STRIP, WORDS = STEP * PACKS / 4;
static_assert(TILE_ROWS % STRIP == 0 && 32 % STRIPS == 0 && WORDS % 32 == 0, "strips share the banks evenly");
static_assert(PACK == 4 || (PACK == 8 && 32 / STRIPS % 2 == 0), "the words of a pack stay side by side");

// The place of a word of a row of a tile.
__device__ inline unsigned place(unsigned row, unsigned word) { return row * WORDS + (word ^ (row / STRIP * (32 / STRIPS))); }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) quantized_forward_transposed(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) unsigned tile[];
    __shared__ float exchange[2][GROUPS][SUMS_ABOUT_MEAN][SENDERS];
    Before::Slot* const ring = reinterpret_cast<Before::Slot*>(tile + TILE_ROWS * WORDS);
    const unsigned group = threadIdx.x / THREADS_PER_ROW, thread = threadIdx.x % THREADS_PER_ROW;
    Part at = {0, thread * PACK, columns_left(p.cols, thread * PACK), 0.0f, 0.0f};
    RowSums<SUMS_ABOUT_MEAN> sums(exchange, group, thread);
    const bool is_wide = ((unsigned long long)p.codes_t.data | p.codes_t.row_stride) % STRIP == 0;
    wait_for_earlier_kernels();
    const Divisor given(*p.scale);
    float largest = 0.0f; // over all rows of the thread

    // The row of the next copy, and the steps that are left in its tile.
    unsigned long long next = (unsigned long long)blockIdx.x * TILE_ROWS + group;
    int left_in_tile = UNROLL;
    const auto start = [&](int slot) {
        if (next < p.rows) {
            #pragma unroll
            for (int k = 0; k < PACKS; ++k) ring[slot].start(At{p, next, at.first, at.left}, k);
        }
        close_batch();
        next += GROUPS;
        if (--left_in_tile == 0) {
            next += (unsigned long long)(gridDim.x - 1) * TILE_ROWS;
            left_in_tile = UNROLL;
        }
    };
    for (int slot = 0; slot < STAGES - 1; ++slot) start(slot);

    int slot = 0;
    for (unsigned long long row0 = (unsigned long long)blockIdx.x * TILE_ROWS; row0 < p.rows; row0 += (unsigned long long)gridDim.x * TILE_ROWS) {
        for (unsigned row = group; row < TILE_ROWS; row += GROUPS) {
            start(slot == 0 ? STAGES - 1 : slot - 1);
            wait_copies<STAGES - 1>();
            at.row = row0 + row;
            const bool exists = at.row < p.rows;
            Pack<H> h[PACKS] = {};
            if (exists) {
                ring[slot].finish(At{p, at.row, at.first, at.left});
                #pragma unroll
                for (int k = 0; k < PACKS; ++k) h[k] = ring[slot].pack(k);
            }
            slot = slot == STAGES - 1 ? 0 : slot + 1;
            float mean[1] = {0.0f}, rstd[1];
            find_statistics<PACKS>(p, sums, [&](int, int k) { return h[k]; }, at.left, [] {}, mean, rstd);
            at.mean = mean[0];
            at.rstd = rstd[0];
            float factor = given.reciprocal;
            const bool is_product = IS_FACTORED && given.power == 1.0f && makes_codes(factor * at.rstd);
            if (is_product) factor *= at.rstd;
            if (exists) {
                write_row(p, at, true, h, is_product, given.power, factor, largest, [&](int k, const Codes& codes) {
                    unsigned* const to = &tile[place(row, (at.first + k * STEP) / 4)];
                    if constexpr (PACK == 8) *reinterpret_cast<uint2*>(to) = make_uint2(codes.words[0], codes.words[1]);
                    else *to = codes.words[0];
                });
            }
            store_statistics(thread == 0, p.mean, p.rstd, [&](int) { return exists; }, [&](int) { return at; }, mean, rstd);
        }
        __syncthreads();
        // Adjacent lanes have the strips of the same columns.
        #pragma unroll 2
        for (unsigned i = threadIdx.x; i < WORDS * STRIPS; i += THREADS) {
            const unsigned row = i % STRIPS * STRIP, word = i / STRIPS;
            unsigned rows[STRIP];
            #pragma unroll
            for (int j = 0; j < STRIP; ++j) rows[j] = tile[place(row + j, word)];
            #pragma unroll
            for (int byte = 0; byte < 4; ++byte) {
                const unsigned long long col = word * 4 + byte;
                // The number of rows is a multiple of STRIP.
                if (col >= p.cols || row0 + row >= p.rows) break;
                Code* to = p.codes_t.data + col * p.codes_t.row_stride + row0 + row;
                unsigned strip[STRIP / 4];
                gather_strip(rows, byte, strip);
                if (is_wide) {
                    store<16, Hint::Keep>(to, strip);
                } else {
                    #pragma unroll
                    for (int j = 0; j < STRIP; ++j) store_byte(to + j, strip[j / 4] >> (8 * (j % 4)));
                }
            }
        }
        __syncthreads();
    }
    if constexpr (FINDS_AMAX) fold_amax(p.amax, largest);
}
