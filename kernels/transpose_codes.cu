// The transposed copy of codes: math.md, section 10. A block processes tiles of 128 rows and 128
// columns one after the other. The last tile comes first: its codes were written last and are still
// in the L2 (16384x4096 with the norm: 90 us, first tile first 92 us).
//
// Stores have 16 bytes. If the number of rows is no multiple of 16 (IS_RAGGED), columns of the copy
// begin anywhere. A column's part of a tile then begins up to 31 rows early, on a sector of the L2
// (32 bytes), and a tile has the 32 rows before its own, too.
//
// A tile is stored in shared memory as words of four columns. The words of a row change places, so that
// accesses along rows and down columns have no bank conflicts.

constexpr int SIDE = 128, WORDS = SIDE / 4, STRIPS = SIDE / STRIP;
static_assert(THREADS == STRIPS * WORDS, "a thread has 16 rows of 4 columns");

// Bytes of a sector, and rows of a tile before its own.
constexpr int SECTOR = 32, BEFORE = IS_RAGGED ? SECTOR : 0;

// The place of a word of a row of a tile.
__device__ inline int place(int row, int word) { return row * WORDS + (word ^ (row / STRIP % STRIPS * 4)); }

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) transpose_codes(const __grid_constant__ Params p) {
    __shared__ __align__(16) unsigned tile[(BEFORE + SIDE) * WORDS];
    // Whether every row of codes begins on 16 bytes. Without IS_RAGGED, also every column of the copy.
    unsigned long long bytes = (unsigned long long)p.codes.data | p.codes.row_stride;
    if constexpr (!IS_RAGGED) bytes |= (unsigned long long)p.codes_t.data | p.codes_t.row_stride;
#if HAS_ROW_GROUPS
    bytes |= p.codes.group_stride;
#endif
    if constexpr (HAS_COLUMN_GROUPS) bytes |= p.cols;
    const bool is_wide = bytes % STRIP == 0;
    const unsigned long long across = (p.cols + SIDE - 1) / SIDE;
    // A column that begins early may end in a further tile.
    const unsigned long long tiles = (p.rows + (IS_RAGGED ? SECTOR - 1 : 0) + SIDE - 1) / SIDE * across;
    wait_for_earlier_kernels();

    for (unsigned long long turn = blockIdx.x; turn < tiles; turn += gridDim.x) {
        const unsigned long long number = tiles - 1 - turn;
        const unsigned long long row0 = number / across * SIDE, col0 = number % across * SIDE;
        // The first row and the end of those that there are, counted from the tile's own.
        const int least = row0 == 0 ? 0 : -BEFORE, rows = int(min((long long)(p.rows - row0), (long long)SIDE));
        const int cols = int(min(p.cols - col0, (unsigned long long)SIDE));
        // Eight threads read a row of the tile.
        const int strip = threadIdx.x % STRIPS * STRIP;
        const auto read = [&](int r) {
            unsigned words[4] = {};
            if (r >= least && r < rows) {
                const Code* from = ROW(codes, row0 + r) + col0 + strip;
                if (is_wide && strip + STRIP <= cols) {
                    load<16, Hint::EvictFirst>(from, words);
                } else {
                    for (int i = 0; i < STRIP && strip + i < cols; ++i) words[i / 4] |= unsigned(from[i].bits) << (8 * (i % 4));
                }
            }
            *reinterpret_cast<uint4*>(&tile[place(BEFORE + r, strip / 4)]) = make_uint4(words[0], words[1], words[2], words[3]);
        };
        #pragma unroll
        for (int r = 0; r < BEFORE + SIDE; r += THREADS / STRIPS) read(int(threadIdx.x / STRIPS) + r - BEFORE);
        __syncthreads();
        const int first = threadIdx.x % STRIPS * STRIP, word = threadIdx.x / STRIPS;
        unsigned strip_of_four[STRIP];
        const auto read_strip = [&](int row) {
            #pragma unroll
            for (int i = 0; i < STRIP; ++i) strip_of_four[i] = tile[place(BEFORE + row + i, word)];
        };
        if constexpr (!IS_RAGGED) read_strip(first);
        #pragma unroll
        for (int byte = 0; byte < 4; ++byte) {
            const int col = word * 4 + byte;
            if (col >= cols) break;
            Code* to = p.codes_t.data + (group_column(p) + col0 + col) * p.codes_t.row_stride + row0;
            int row = first;
            if constexpr (IS_RAGGED) {
                row -= int((unsigned long long)to % SECTOR);
                read_strip(row);
            }
            unsigned words[STRIP / 4];
            gather_strip(strip_of_four, byte, words);
            if ((IS_RAGGED || is_wide) && row >= least && row + STRIP <= rows) {
                store<16, Hint::EvictFirst>(to + row, words);
            } else {
                #pragma unroll
                for (int i = 0; i < STRIP; ++i)
                    if (row + i >= least && row + i < rows) store_byte(to + row + i, words[i / 4] >> (8 * (i % 4)));
            }
        }
        __syncthreads();
    }
}
